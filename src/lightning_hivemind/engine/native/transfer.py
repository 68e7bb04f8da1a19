"""From an accelerator into host memory: on a stream of its own, beside what the accelerator computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Transfer:
    """See the module. Of what lies in host memory already it makes plain copies.

    Args:
        device: where the values are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._written: torch.cuda.Event | None = None

    def written(self) -> None:
        """What will be fetched is whole once the device has done what the calling thread has told it so far."""
        if self._stream is not None:
            self._written = torch.cuda.current_stream(self._stream.device).record_event()

    def fetch(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each first tensor into the second; comes back when all is there.

        From any thread. What it tells the device afterwards may change the first ones.
        """
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return
        torch.cuda.set_device(self._stream.device)  # else the way back from the stream would wake up the first GPU
        with torch.cuda.stream(self._stream):
            if self._written is not None:
                self._stream.wait_event(self._written)
            for source, target in pairs:
                copy(source, target)
        self._stream.synchronize()


def copy(source: Tensor, target: Tensor) -> None:
    """Begin to copy between a device and pinned memory, if nothing is to be converted: see :func:`finish`.

    (What is to be is copied at once, and converted in host memory: a device may have no room for it.)
    """
    converts = source.dtype != target.dtype or source.stride() != target.stride()
    target.copy_(source, non_blocking=not converts and (source.is_cuda or target.is_cuda))


def finish(device: torch.device) -> None:
    """All that the calling thread has told the device is done: copies that have begun, say."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
