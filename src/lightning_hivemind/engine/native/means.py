"""Mean gradients on their way into a step, and which contributions each was a part of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_hivemind.engine.native.memory import Memory
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

    def followed_by(self, newer: Mean, trained: int, marks: int, room: Tensor | None) -> Mean:
        """Both, of one peer: gradients (``trained``) by samples, and what has changed with them adds up.

        In ``room``, since a connection may still be sending either; None if the newer values contain the older ones.
        """
        samples, end, values = self.samples + newer.samples, self.values.numel() - marks, newer.values
        if room is not None:
            torch.mul(newer.values[:trained], newer.samples / samples, out=room[:trained])
            room[:trained].add_(self.values[:trained], alpha=self.samples / samples)
            torch.add(self.values[trained:end], newer.values[trained:end], out=room[trained:end])
            torch.maximum(self.values[end:], newer.values[end:], out=room[end:])
            values = room
        return Mean(values, samples, min(self.epoch, newer.epoch), {**self.given, **newer.given})

    def is_in(self, numbers: Collection[int]) -> bool:
        return not self.given.keys().isdisjoint(numbers)


def mean_of(parts: Sequence[Mean], marks: int, memory: Memory) -> Tensor:
    """float32 CPU (elements,): of all of several peers, of whose statistics each one's changes are its own."""
    if len(parts) == 1:
        return parts[0].values
    samples, elements = sum(one.samples for one in parts), parts[0].values.numel()
    values = memory.floats(elements)
    torch.mul(parts[0].values, parts[0].samples / samples, out=values)
    for one in parts[1:]:
        values.add_(one.values, alpha=one.samples / samples)
    values[elements - marks :] = torch.stack([one.values[elements - marks :] for one in parts]).amax(0)
    return values


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
    def is_void(self) -> bool:
        """Whether what it was made of is not this peer's any more: it cannot be given again."""
        return self.own is None and not self.carried

    @property
    def epoch(self) -> int:
        """Of the oldest of it."""
        return min(one.epoch for one in (self.own, *self.carried) if one is not None)
