"""What a model carries besides parameters, equal at all peers: BatchNorm's statistics, a user's extra tensors.

Peers average how these have *changed* since the step before, so that what never changes stays as it is to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Statistics:
    """Floating-point ``tensors`` of any shape and device; others (counters, indices) stay each peer's own."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        self.elements = sum(tensor.numel() for tensor in self._tensors)
        self._base = torch.empty(0)
        self.rebase()

    @torch.no_grad()
    def rebase(self) -> None:
        """What is there now is what all peers have: a state was taken over."""
        self._base = self._now()

    @torch.no_grad()
    def changes(self) -> Tensor:
        """float32 CPU (elements,): since the last step."""
        now, base = self._now(), self._base
        return torch.where(now == base, 0.0, now - base)  # infinities that stay are no change

    @torch.no_grad()
    def step(self, changes: Tensor) -> None:
        """Apply the average of all peers' changes, float32 CPU (elements,)."""
        self._base = torch.where(changes == 0.0, self._base, self._base + changes)
        sizes = [tensor.numel() for tensor in self._tensors]
        for part, tensor in zip(torch.split(self._base, sizes), self._tensors, strict=True):
            tensor.copy_(part.view_as(tensor))

    def _now(self) -> Tensor:
        parts = [tensor.detach().to("cpu", torch.float32, copy=True).flatten() for tensor in self._tensors]
        return torch.cat(parts) if parts else torch.empty(0)
