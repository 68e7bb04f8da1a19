"""This peer's gradients between two steps: gathered per batch, given to rounds, put back where an average is applied.

The training thread adds, the rounds' thread gives: one lock. All means are over samples.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hivemind.engine.native.protocol.lineage import Contribution, PeerId


@dataclass(slots=True)
class _Sum:
    """``values`` float32 (elements,) on the model's device: the sum of batches' gradients, each times samples / first.

    In units of the first batch, so that one batch, and equal batches whose number is a power of two, come out of the
    mean bit for bit as a plain Trainer has them.
    """

    values: Tensor
    samples: int = 0
    first: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class _Mean:
    """``values`` float32 CPU (elements,): the mean gradient of ``samples``, the oldest of ``epoch``."""

    values: Tensor
    samples: int
    epoch: int


class Gradients:
    """See the module.

    Args:
        me: the peer's id.
        parameters: of the optimizer; those that require no gradient are left out. All on one device.
        max_staleness: what was computed with parameters of more epochs ago is dropped.
    """

    def __init__(self, me: PeerId, parameters: Sequence[Tensor], *, max_staleness: int) -> None:
        self._me, self._max_staleness = me, max_staleness
        self.parameters = [p for p in parameters if p.requires_grad]
        self.elements = sum(p.numel() for p in self.parameters)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._lock = threading.Lock()
        self._sum = _Sum(torch.zeros(self.elements, device=device))
        #: what a round has now, and what came back from one
        self._given: tuple[Contribution, _Mean] | None = None
        self._back: _Mean | None = None
        self._number = time.time_ns() // 1000  # grows over restarts, too

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

        Returns how many samples are here now. ``param.grad`` stays as it is; none counts as zeros.
        """
        with self._lock:
            total = self._sum
            if not total.samples:
                total.first, total.epoch = samples, epoch
            for part, parameter in zip(self._views(total.values), self.parameters, strict=True):
                if not total.samples:
                    part.copy_(parameter.grad) if parameter.grad is not None else part.zero_()
                elif parameter.grad is not None:
                    part.add_(parameter.grad, alpha=samples / total.first)
            total.samples += samples
            return self._samples

    @torch.no_grad()
    def use(self, average: Tensor) -> None:
        """Put an average into ``param.grad``, for the optimizer; ``average`` float32 CPU (elements,) is left alone."""
        for part, parameter in zip(self._views(average), self.parameters, strict=True):
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = part.to(parameter.device, parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(part)

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
            contribution = Contribution(peer=self._me, number=self._number, samples=mean.samples)
            self._given = (contribution, mean)
            return contribution, mean.values

    def returned(self) -> None:
        """The round came to nothing: the next one gets it, with what was added meanwhile."""
        with self._lock:
            if self._given is not None:
                self._back, self._given = self._given[1], None

    def committed(self, mine: Contribution | None, epoch: int) -> int:
        """A commit has led to ``epoch``, with this peer's contribution ``mine``.

        Returns the samples that are too old now, and dropped.
        """
        with self._lock:
            if self._given is not None:
                contribution, mean = self._given
                self._given = None
                if mine is None or mine.number != contribution.number:
                    self._back = mean
            dropped = 0
            if self._back is not None and epoch - self._back.epoch > self._max_staleness:
                dropped, self._back = self._back.samples, None
            if self._sum.samples and epoch - self._sum.epoch > self._max_staleness:
                dropped, self._sum.samples = dropped + self._sum.samples, 0
            return dropped

    # ------------------------------------------------------------------ private

    def _mean_of_sum(self) -> _Mean | None:
        total = self._sum
        if not total.samples:
            return None
        values = total.values.to("cpu", copy=True)
        if total.samples != total.first:
            values.mul_(total.first / total.samples)
        return _Mean(values, total.samples, total.epoch)

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return [part.view_as(p) for part, p in zip(torch.split(flat, sizes), self.parameters, strict=True)]


def _merged(one: _Mean, other: _Mean) -> _Mean:
    samples = one.samples + other.samples
    values = one.values * (one.samples / samples)  # not in place: a connection may still be sending it
    values.add_(other.values, alpha=other.samples / samples)
    return _Mean(values, samples, min(one.epoch, other.epoch))
