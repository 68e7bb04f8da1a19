"""What a model carries besides parameters, equal at all peers: BatchNorm's statistics, a user's extra tensors.

Peers average how these have *changed* since the step before, so that what never changes stays as it is to the last bit.
Counters move by the mean of what the peers have counted, rounded.
With ``use_local_updates`` the parameters themselves are among them, and moments of the optimizer, if wanted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import torch
from torch import Tensor

from lightning_hivemind.engine.native.fragments import Fragments, Stretch
from lightning_hivemind.engine.native.host import host_zeros
from lightning_hivemind.engine.native.outer import OuterStep

#: of a sum over some thousand peers in float32, relative
ROUNDING = 1e-4
#: dtypes of counters, which are single numbers. Whatever else holds whole numbers are indices, masks, quantised
#: weights, pointers into a ring: their mean means nothing.
COUNTERS = (torch.int16, torch.int32, torch.int64)


def has_mean(tensor: Tensor) -> bool:
    """Whether the mean of several peers' means anything."""
    return tensor.is_floating_point() or (tensor.dtype in COUNTERS and not tensor.dim())


class Statistics:
    """``tensors`` of floating point, of any shape and device, and counters; others stay each peer's ``own``.

    Args:
        carries: what has changed here since this peer gave its changes to a round is kept over the step, so that the
            tensors are ahead of what all have (:meth:`changes`). Else they are after each step what all have; what
            this peer has seen and not given waits beside them.
        moments: of the optimizer, behind the others. They are always replaced: with what is carried added, a second
            moment could get below zero.
        outer: how the first of them, parameters, are moved by the average of their changes; None: by just that.

    Attributes:
        sizes: of what a round has, in values: a tensor each, but for a fragment of parameters. ``elements`` in all.
        base: copies in host memory of what all peers have in common.
        epoch: the global step that the tensors have been given; ``base`` may be one ahead, until :meth:`publish`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        carries: bool = False,
        moments: Sequence[Tensor] = (),
        outer: OuterStep | None = None,
    ) -> None:
        self.carries, self.moments, self.outer = carries, len(moments), outer
        averaged = [has_mean(one) for one in tensors]
        self.tensors = [*compress(tensors, averaged), *moments]
        self.own = [one for one, is_averaged in zip(tensors, averaged, strict=True) if not is_averaged]
        counts = [tensor.numel() for tensor in self.tensors]
        cut = 0 if outer is None else len(outer)
        self._fragments = Fragments(counts[:cut], 1 if outer is None else outer.fragments)
        self._others = [Stretch(place, 0, size) for place, size in enumerate(counts)][cut:]
        self.sizes = [*self._fragments.sizes, *counts[cut:]]
        self.elements = sum(self.sizes)
        self._carried = self.elements - sum(tensor.numel() for tensor in moments)
        self.base: list[Tensor] = []
        self.epoch = self._coming = 0
        #: what is of the last round, with what is carried
        self._ahead: list[tuple[Stretch, Tensor]] = []
        #: not ``carries``: the tensors where what has changed since was not given, and what was not before that
        self._since: list[Tensor] = []
        self._waiting: Tensor | None = None
        #: what lay in the tensors before something else was put there; empty while nothing can have been
        self._lent: list[Tensor] = []
        self._lock = threading.Lock()  # a round may ask while a step is made
        self.rebase(0)

    @torch.no_grad()
    def rebase(self, epoch: int) -> None:
        """What is there now is what all peers have at ``epoch``: a state was taken over."""
        with self._lock:
            self.base = self._now()
            self.epoch = self._coming = epoch
            self._begin_at_base()

    def lend(self) -> None:
        """Something else may be put into the tensors, until :meth:`back`: what lies there now is what counts."""
        with self._lock:
            self._lent = []
            self._lent = self._now()

    def back(self) -> None:
        """What is there is what was there before, or what has become of it."""
        with self._lock:
            self._lent = []

    def adopted(self, epoch: int) -> None:
        """:attr:`base` was set to what all peers have at ``epoch``; see :meth:`publish`."""
        self._coming = epoch

    @contextlib.contextmanager
    def taking(self, epoch: int) -> Iterator[Tensor]:
        """float32 CPU (elements,), for a contribution: what has changed here and is in no other one, from now on.

        If this raises, it is in none. With ``carries`` nothing is taken: see :meth:`changes`.
        """
        with torch.no_grad():
            if self.carries:
                yield self.changes(epoch)
                return
            with self._lock:
                now = self._now()
                yield self._not_given(now)
                self._since, self._waiting = now, None

    @torch.no_grad()
    def forget(self) -> None:
        """What has changed here and is in no contribution will be in none, as the samples with which it came."""
        if not self.carries:
            with self._lock:
                self._since, self._waiting = self._now(), None

    @torch.no_grad()
    def changes(self, epoch: int) -> Tensor:
        """``carries``: float32 CPU (elements,), what has changed since the step to ``epoch``.

        What is or has become infinite or NaN has not. Zeros while that step is still to be made here, or published: it
        may have these changes already.
        """
        with self._lock:
            if self.epoch != epoch or not self.tensors:
                return host_zeros(self.elements)
            return self._ahead_of_base(epoch)

    @torch.no_grad()
    def step(self, changes: Tensor, epoch: int, counted: Tensor | None = None) -> None:
        """To ``epoch``, by the average of all peers' changes, float32 CPU (elements,); see :meth:`publish`.

        ``counted``: this peer's own changes that are in it, as :meth:`changes` gave them; None if none are.
        """
        with self._lock:
            left = self._ahead_of_base(epoch - 1) if self.carries and self.tensors else None
            if left is not None and counted is not None:
                left -= counted
            first_moment, outer_steps = len(self.base) - self.moments, 0 if self.outer is None else len(self.outer)
            stretches = self._stretches(epoch - 1)
            bases, sizes = [one.of(self.base[one.place]) for one in stretches], [one.elements for one in stretches]
            for stretch, part, base in zip(stretches, torch.split(changes, sizes), bases, strict=True):
                if self.outer is not None and stretch.place < outer_steps:
                    moved = self.outer.moved(stretch.place, base, part, stretch.begin)
                else:
                    moved = _moved(base, part)
                base.copy_(moved if stretch.place < first_moment else _not_just_below_zero(moved, base))
            if left is not None:
                left[self._carried :] = 0.0
                ahead = zip(stretches, torch.split(left, sizes), bases, strict=True)
                self._ahead = [(stretch, _moved(base, part)) for stretch, part, base in ahead]
            self._coming = epoch

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model what all peers have, and what it is ahead of that."""
        with self._lock:
            if not self.carries and self.tensors:
                self._begin_at_base(self._not_given(self._now()))
            for stretch, value in self._ahead:
                _put(value, stretch, self.tensors[stretch.place])
            if not self._ahead:
                for tensor, base in zip(self.tensors, self.base, strict=True):
                    tensor.copy_(base)
            self._ahead, self.epoch = [], self._coming

    def _now(self) -> list[Tensor]:
        """Contiguous copies, for batches go on meanwhile."""
        form = torch.contiguous_format
        return [one.detach().to("cpu", copy=True, memory_format=form) for one in self._lent or self.tensors]

    def _begin_at_base(self, waiting: Tensor | None = None) -> None:
        if not self.carries:
            self._since, self._waiting = [one.clone() for one in self.base], waiting  # steps change the base

    def _stretches(self, epoch: int) -> list[Stretch]:
        """Of what a round is that leads on from there."""
        return [*self._fragments.of(epoch), *self._others]

    def _ahead_of_base(self, epoch: int) -> Tensor:
        now, stretches = self._lent or self.tensors, self._stretches(epoch)
        mine = (stretch.of(now[stretch.place].detach()).to("cpu") for stretch in stretches)
        return _differences(mine, [stretch.of(self.base[stretch.place]) for stretch in stretches])

    def _not_given(self, now: list[Tensor]) -> Tensor:
        found = _differences(now, self._since)
        return found if self._waiting is None else found.add_(self._waiting)


def _differences(now: Iterable[Tensor], before: Sequence[Tensor]) -> Tensor:
    """float32 CPU, one after the other; zero where there is none, or no number."""
    parts = []
    for mine, base in zip(now, before, strict=True):
        if torch.equal(mine, base):  # most often
            parts.append(host_zeros(base.numel()))
            continue
        change = mine - base if base.dtype in COUNTERS else mine.double() - base.double()
        parts.append(torch.where(torch.isfinite(change), change, 0).float().flatten())
    return torch.cat(parts) if parts else host_zeros(0)


def _moved(base: Tensor, change: Tensor) -> Tensor:
    """``base`` itself where nothing has changed."""
    change = change.view_as(base)
    if base.dtype in COUNTERS:
        return base + change.round().to(base.dtype)
    return torch.where(change == 0.0, base, (base.double() + change).to(base.dtype))


def _put(value: Tensor, stretch: Stretch, tensor: Tensor) -> None:
    flat = tensor.reshape(-1)
    flat[stretch.begin : stretch.end].copy_(value)
    if flat.data_ptr() != tensor.data_ptr():  # it has no flat view
        tensor.copy_(flat.view_as(tensor))


def _not_just_below_zero(value: Tensor, before: Tensor) -> Tensor:
    """The root of a second moment is taken: what only rounding has made negative is zero."""
    return torch.where((value < 0.0) & (value > -ROUNDING * before), 0.0, value)
