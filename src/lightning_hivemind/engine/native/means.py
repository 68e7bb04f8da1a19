"""Mean gradients on their way into a step, and which contributions each was a part of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
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

    def with_(self, other: Mean, marks: int) -> Mean:
        """The mean of both, of one epoch; in this one's memory, which nobody else has."""
        samples, end = self.samples + other.samples, self.values.numel() - marks
        self.values[:end].mul_(self.samples / samples).add_(other.values[:end], alpha=other.samples / samples)
        torch.maximum(self.values[end:], other.values[end:], out=self.values[end:])
        return replace(self, samples=samples)

    def is_in(self, numbers: Collection[int]) -> bool:
        return not self.given.keys().isdisjoint(numbers)


class Carried:
    """Other peers' means, that are given with this one's."""

    def __init__(self, marks: int) -> None:
        self._marks = marks
        self._means: list[Mean] = []

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self._means)

    @property
    def was_given(self) -> bool:
        """Whether some were in a round before."""
        return any(one.given for one in self._means)

    def add(self, mean: Mean) -> None:
        """Into another one of that epoch, if no round has had it: there are no more of them than epochs that count."""
        for place, one in enumerate(self._means):
            if one.epoch == mean.epoch and not one.given:
                self._means[place] = one.with_(mean, self._marks)
                return
        self._means.append(mean)

    def take(self) -> tuple[Mean, ...]:
        means, self._means = self._means, []
        return tuple(means)

    def put_back(self, means: Collection[Mean]) -> None:
        self._means = [*means, *self._means]

    def drop(self, which: Callable[[Mean], bool]) -> int:
        """Returns their samples."""
        dropped = sum(one.samples for one in self._means if which(one))
        self._means = [one for one in self._means if not which(one)]
        return dropped


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
