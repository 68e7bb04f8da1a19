"""This peer's gradients between two steps: gathered per batch, and given to rounds.

The training thread adds, the rounds' thread gives: one lock. All means are over samples.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hivemind.engine.native.protocol.lineage import Contribution, PeerId
from lightning_hivemind.engine.native.statistics import Statistics


@dataclass(slots=True)
class _Sum:
    """``values`` float32 (trained,) on the model's device: the sum of batches' gradients, each times samples / first.

    In units of the first batch, so that one batch, and equal batches whose number is a power of two, come out of the
    mean bit for bit as a plain Trainer has them.
    """

    values: Tensor
    samples: int = 0
    first: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class _Mean:
    """``values`` float32 CPU (elements,): the mean gradient of ``samples``, the oldest of ``epoch``.

    ``numbers``: the contributions that it was, or was a part of, already.
    """

    values: Tensor
    samples: int
    epoch: int
    numbers: frozenset[int] = frozenset()


class Gradients:
    """See the module.

    Args:
        me: the peer's id.
        parameters: of the optimizer; those that require no gradient are left out. All on one device.
        statistics: what is averaged besides, behind the gradients.
        max_staleness: what was computed with parameters of more epochs ago is dropped.
    """

    def __init__(self, me: PeerId, parameters: Sequence[Tensor], statistics: Statistics, *, max_staleness: int) -> None:
        self._me, self._max_staleness, self._statistics = me, max_staleness, statistics
        self.parameters = [p for p in parameters if p.requires_grad]
        trained = sum(p.numel() for p in self.parameters)
        self.elements = trained + statistics.elements
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._lock = threading.Lock()
        self._sum = _Sum(torch.zeros(trained, device=device))
        #: what a round has now, and what came back from one
        self._given: tuple[Contribution, _Mean] | None = None
        self._back: _Mean | None = None
        self._number = time.time_ns() // 1000  # grows over restarts, too
        self._head_epoch = 0

    # ------------------------------------------------------------------ the training thread

    @property
    def samples(self) -> int:
        """Whose gradients are here and in no commit."""
        with self._lock:
            return self._samples

    @property
    def _samples(self) -> int:
        given = self._given[1].samples if self._given is not None else 0
        return self._sum.samples + given + (self._back.samples if self._back is not None else 0)

    @torch.no_grad()
    def add(self, samples: int, epoch: int) -> int:
        """Take in ``param.grad``, the mean of a batch of ``samples``, computed with the parameters of ``epoch``.

        Returns how many samples are too old to count, and dropped. ``param.grad`` stays as it is; none counts as zeros.
        """
        with self._lock:
            if self._head_epoch - epoch > self._max_staleness:
                return samples
            total = self._sum
            if not total.samples:
                total.first, total.epoch = samples, epoch
            for part, parameter in zip(self._views(total.values), self.parameters, strict=True):
                if not total.samples:
                    part.copy_(parameter.grad) if parameter.grad is not None else part.zero_()
                elif parameter.grad is not None:
                    part.add_(parameter.grad, alpha=samples / total.first)
            total.samples += samples
            return 0

    def discard(self) -> int:
        """Forget what no round has; returns the samples that are lost."""
        with self._lock:
            lost = self._sum.samples + (self._back.samples if self._back is not None else 0)
            self._sum.samples, self._back = 0, None
            return lost

    # ------------------------------------------------------------------ the rounds' thread

    @torch.no_grad()
    def give(self) -> tuple[Contribution, Tensor] | None:
        """Fix what this peer gives to a round: float32 CPU (elements,), never changed again; None if nothing.

        What is added from now on is for the next round.
        """
        with self._lock:
            assert self._given is None, "one round at a time"
            mean = self._mean_of_sum()
            if self._back is not None:
                mean = self._back if mean is None else _merged(self._back, mean)
            if mean is None:
                return None
            self._back, self._sum.samples = None, 0
            self._number += 1
            mean = replace(mean, numbers=mean.numbers | {self._number})
            contribution = Contribution(peer=self._me, number=self._number, samples=mean.samples)
            self._given = (contribution, mean)
            return contribution, mean.values

    def returned(self) -> None:
        """The round came to nothing: the next one gets it, with what was added meanwhile."""
        with self._lock:
            if self._given is not None:
                self._back, self._given = self._given[1], None

    def committed(self, listed: Collection[Contribution], epoch: int) -> int:
        """Commits have led to ``epoch``; ``listed`` are the contributions of this peer that are in them.

        Returns the samples that are too old now, and dropped.
        """
        counted = {one.number: one.samples for one in listed}
        with self._lock:
            self._head_epoch = epoch
            if self._given is not None:
                self._back, self._given = self._given[1], None
            dropped = 0
            if self._back is not None and self._back.numbers & counted.keys():
                dropped = self._back.samples - sum(counted.get(number, 0) for number in self._back.numbers)
                self._back = None
            if self._back is not None and epoch - self._back.epoch > self._max_staleness:
                dropped, self._back = dropped + self._back.samples, None
            if self._sum.samples and epoch - self._sum.epoch > self._max_staleness:
                dropped, self._sum.samples = dropped + self._sum.samples, 0
            return dropped

    def moved(self, epoch: int) -> int:
        """This peer goes to ``epoch`` by a way on which its contributions cannot be followed: nothing is kept.

        Returns the samples that are lost.
        """
        with self._lock:
            self._head_epoch = epoch
            lost, self._given, self._back, self._sum.samples = self._samples, None, None, 0
            return lost

    # ------------------------------------------------------------------ private

    def _mean_of_sum(self) -> _Mean | None:
        total = self._sum
        if not total.samples:
            return None
        values = torch.empty(self.elements)
        trained, rest = torch.split(values, [total.values.numel(), self._statistics.elements])
        trained.copy_(total.values)
        if total.samples != total.first:
            trained.mul_(total.first / total.samples)
        rest.copy_(self._statistics.changes())
        return _Mean(values, total.samples, total.epoch)

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return [part.view_as(p) for part, p in zip(torch.split(flat, sizes), self.parameters, strict=True)]


def _merged(one: _Mean, other: _Mean) -> _Mean:
    samples = one.samples + other.samples
    values = one.values * (one.samples / samples)  # not in place: a connection may still be sending it
    values.add_(other.values, alpha=other.samples / samples)
    return _Mean(values, samples, min(one.epoch, other.epoch), one.numbers | other.numbers)
