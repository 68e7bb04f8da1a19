"""Gradients of several batches, where ranks have a model in parts: each rank sums its own, and rank 0 gets the sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hivemind.engine.native.sums import add, dense
from lightning_hivemind.peer.pieces import Pieces
from lightning_hivemind.peer.ranks import Ranks
from lightning_hivemind.peer.shards import Shards


class PartialSums:
    """See the module, and :class:`.engine.base.RanksSums`; both methods are collectives.

    In float32 where the gradients are: as :class:`.BufferSum` does it with whole ones, so that it has the same bits.
    """

    def __init__(self, ranks: Ranks, shards: Shards, pieces: Pieces) -> None:
        self._ranks, self._shards, self._pieces = ranks, shards, pieces
        #: what is trained is fixed now
        self._numbers = [n for n, one in enumerate(shards.of_optimizer) if one.requires_grad]
        self._sums: dict[int, Tensor] = {}
        self._reached: set[int] = set()

    @torch.no_grad()
    def add(self, factor: float, *, first: bool) -> None:
        found = self._shards.gradients()
        if first:
            self._reached.clear()
        for number in self._numbers:
            gradient = dense(found[number])
            if gradient is None:
                continue
            if number not in self._sums:
                self._sums[number] = torch.empty_like(gradient, dtype=torch.float32)
            part = self._sums[number]
            if number not in self._reached and not first:
                part.zero_()
            add(gradient, factor, part, first=first)
            self._reached.add(number)

    @torch.no_grad()
    def gather(self, whole: Sequence[Tensor]) -> list[bool]:
        told = self._ranks.share("gradients", "".join("01"[number in self._reached] for number in self._numbers))
        reached = [any(one[place] == "1" for one in told) for place in range(len(self._numbers))]
        targets: list[Tensor] = []
        for one, has in zip(whole, reached, strict=self._ranks.leads):
            if has:
                targets.append(one)
            else:
                one.zero_()
        which = [number for number, has in zip(self._numbers, reached, strict=True) if has]
        parts = [self._sums[number] if number in self._reached else None for number in which]
        self._pieces.gather(which, parts, [torch.float32] * len(which), targets)
        return reached
