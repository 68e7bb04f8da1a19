"""Memory that a forked child does without.

The DHT process is forked from the trainer, model and all. It never looks at the model, but as long as it lives the
kernel keeps for it what every parameter was at that moment: the whole model a second time, and each page is copied when
the trainer first writes to it - in a peer that joins, while the others wait for it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_hivemind.platform import advise_memory

_DONTFORK, _DOFORK = 10, 11  # linux/mman.h


@contextlib.contextmanager
def kept_from_children(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Processes that are forked within it must not touch the values of these (Linux; elsewhere they may).

    Only whole pages are kept from them, and not the outermost: what an allocator notes around a tensor stays.
    """
    spans = [span for tensor in tensors for span in _pages(tensor)]
    for span in spans:
        advise_memory(*span, _DONTFORK)
    try:
        yield
    finally:
        for span in spans:
            advise_memory(*span, _DOFORK)


def _pages(tensor: Tensor) -> list[tuple[int, int]]:
    """Address and length; nothing of what is on a device, shared anyway, small, or has no plain memory of its own."""
    try:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_shared():  # type: ignore[no-untyped-call]
            return []
        if type(tensor.data) is not Tensor:
            return []
        storage = tensor.untyped_storage()
        begin, page = storage.data_ptr(), mmap.PAGESIZE
    except (RuntimeError, NotImplementedError, ValueError):  # of wrappers around others, lazy and fake ones
        return []
    if not begin:
        return []
    first = (begin // page + 2) * page
    length = (begin + storage.nbytes()) // page * page - page - first
    return [(first, length)] if length > 0 else []
