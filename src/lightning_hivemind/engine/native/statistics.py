"""What a model carries besides parameters, equal at all peers: BatchNorm's statistics, a user's extra tensors.

Peers average how these have *changed* since the step before, so that what never changes stays as it is to the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Statistics:
    """Floating-point ``tensors`` of any shape and device; others (counters, indices) stay each peer's own.

    Attributes:
        base: copies in host memory of what all peers have in common, as of ``epoch``.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        self.elements = sum(tensor.numel() for tensor in self.tensors)
        self.base: list[Tensor] = []
        self.epoch = 0
        self._lock = threading.Lock()  # a round may ask while a step is made
        self.rebase(0)

    @torch.no_grad()
    def rebase(self, epoch: int) -> None:
        """What is there now is what all peers have at ``epoch``: a state was taken over."""
        with self._lock:
            self.base = [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]
            self.epoch = epoch

    @torch.no_grad()
    def changes(self, epoch: int) -> Tensor:
        """float32 CPU (elements,): since the step to ``epoch``. What is or has become infinite or NaN has not changed.

        Zeros while that step is still to be made here: it may have these changes already.
        """
        with self._lock:
            if self.epoch != epoch or not self.tensors:
                return torch.zeros(self.elements)
            parts = []
            for tensor, base in zip(self.tensors, self.base, strict=True):
                change = (tensor.detach().to("cpu", torch.float64) - base.double()).float().flatten()
                parts.append(torch.where(torch.isfinite(change), change, 0.0))
            return torch.cat(parts)

    @torch.no_grad()
    def step(self, changes: Tensor, epoch: int) -> None:
        """To ``epoch``, by the average of all peers' changes, float32 CPU (elements,); see :meth:`publish`."""
        with self._lock:
            sizes = [base.numel() for base in self.base]
            for part, base in zip(torch.split(changes, sizes), self.base, strict=True):
                moved = (base.double() + part.view_as(base)).to(base.dtype)
                base.copy_(torch.where(part.view_as(base) == 0.0, base, moved))
            self.epoch = epoch

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model what all peers have."""
        for tensor, base in zip(self.tensors, self.base, strict=True):
            tensor.copy_(base)
