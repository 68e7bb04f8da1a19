"""Mean gradients on their way into a step, and which contributions each was a part of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from lightning_hivemind.engine.native.protocol.lineage import Contribution


@dataclass(frozen=True, slots=True)
class Mean:
    """``values`` float32 CPU (elements,): the mean gradient of ``samples``, the oldest of ``epoch``.

    ``given``: the contributions that it was a part of already, by number: how many of its samples each had.
    """

    values: Tensor
    samples: int
    epoch: int
    given: Mapping[int, int] = field(default_factory=dict)

    def gave(self, number: int) -> Mean:
        return replace(self, given={**self.given, number: self.samples})

    def is_in(self, numbers: Collection[int]) -> bool:
        return not self.given.keys().isdisjoint(numbers)


@dataclass(frozen=True, slots=True)
class Made:
    """A contribution, and what it was made of: this peer's own mean, and those of others that it carries."""

    contribution: Contribution
    own: Mean | None
    carried: tuple[Mean, ...]

    @property
    def epoch(self) -> int:
        """Of the oldest of it."""
        return min(one.epoch for one in (self.own, *self.carried) if one is not None)
