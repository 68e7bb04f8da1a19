"""The outer step of :class:`~lightning_hivemind.outer.DiLoCo`, on what all peers have in common."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.outer import DiLoCo, StreamingDiLoCo

log = logging.getLogger("lightning_hivemind")

#: values at a time: each takes 24 bytes meanwhile
PIECE = 2**20


class OuterStep:
    """SGD whose gradient is how far the peers' own steps have led, the other way round; in host memory.

    In float64 from step to step, rounded once: peers on unlike processors then make the same one.

    Args:
        parameters: whose shapes it has.

    Attributes:
        velocity: float32 CPU, for each parameter: the momentum; equal at all peers.
    """

    def __init__(self, settings: DiLoCo, parameters: Sequence[Tensor]) -> None:
        self._settings = settings
        self.velocity = [torch.zeros(p.shape, dtype=torch.float32, device="cpu") for p in parameters]

    def __len__(self) -> int:
        return len(self.velocity)

    @property
    def fragments(self) -> int:
        """Into how many the parameters are cut, each of which has a round of its own."""
        return self._settings.fragments if isinstance(self._settings, StreamingDiLoCo) else 1

    def moved(self, place: int, base: Tensor, change: Tensor, begin: int = 0) -> Tensor:
        """``base``, of parameter ``place`` from that value on, after the step: peers have moved it by ``change``."""
        moved = torch.empty_like(base, memory_format=torch.contiguous_format)
        velocity = self.velocity[place].view(-1)[begin : begin + base.numel()]
        parts = (torch.split(one.reshape(-1), PIECE) for one in (base, change, velocity, moved.view(-1)))
        for piece in zip(*parts, strict=True):
            self._move(*piece)
        return moved

    def _move(self, base: Tensor, change: Tensor, velocity: Tensor, moved: Tensor) -> None:
        settings, change = self._settings, change.double()
        momentum = velocity.double().mul_(settings.momentum).add_(change)
        velocity.copy_(momentum)
        step = change.add_(momentum, alpha=settings.momentum) if settings.nesterov else momentum
        moved.copy_(base.double().add_(step, alpha=settings.lr))

    def kept(self, base: Sequence[Tensor]) -> dict[str, Any]:
        """For a checkpoint: copies of the momentum, and of what all peers have in common (the first of ``base``)."""
        common = [one.clone() for one in base[: len(self)]]
        return {"velocity": [one.clone() for one in self.velocity], "base": common}

    @torch.no_grad()
    def load(self, kept: Mapping[str, Any], base: Sequence[Tensor]) -> None:
        """What :meth:`kept` gave; nothing, if there is no checkpoint, or one of another way to train."""
        found = [*kept.get("velocity", ()), *kept.get("base", ())]
        targets = [*self.velocity, *base[: len(self)]]
        if not found:
            return
        if [one.shape for one in found] != [one.shape for one in targets]:
            log.warning("the checkpoint's outer momentum is of another model: it is left away")
            return
        for target, value in zip(targets, found, strict=True):
            target.copy_(value)
