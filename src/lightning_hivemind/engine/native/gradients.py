"""This peer's gradients between two steps: gathered per batch, and given to rounds.

The training thread adds, the rounds' thread gives: one lock. All means are over samples.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_hivemind.engine.native.left_out import LeftOut
from lightning_hivemind.engine.native.low_rank import LowRank
from lightning_hivemind.engine.native.means import Carried, Made, Mean, mean_of
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import MOST_EPOCHS, MOST_SAMPLES, Contribution, PeerId
from lightning_hivemind.engine.native.seam import Parcel
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.sums import BESIDE, PartsSum, Summing, trained_now


class Gradients:
    """See the module.

    Args:
        me: the peer's id.
        parameters: of the optimizer; those that require no gradient are left out. All on one device.
        statistics: what is averaged besides, behind the gradients.
        max_staleness: what was computed with parameters of more epochs ago is dropped.
        summing: with its ``local_step`` what is given is how ``statistics`` have changed, which never gets too old.
        low_rank: what is given and averaged are factors of the flat vector.

    Attributes:
        sizes: elements of what is given, tensor by tensor, first those ``of_gradients``, at the end those of the
            ``moments`` of the optimizer; behind them, for each parameter, whether it has a gradient (``marks``: 1.0 or
            0.0, so that an average of 0.0 means that nobody has one). ``elements`` in all.
        whole: elements of the flat vector.
    """

    def __init__(
        self,
        me: PeerId,
        parameters: Sequence[Tensor],
        statistics: Statistics,
        *,
        max_staleness: int,
        summing: Summing = BESIDE,
        low_rank: LowRank | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._me, self._memory = me, memory or Memory()
        self._max_staleness, self._statistics = max_staleness, statistics
        self._lock, self._local = threading.RLock(), summing.local_step is not None
        self.parameters = [p for p in parameters if p.requires_grad and not self._local]
        sizes = [*(p.numel() for p in self.parameters), *statistics.sizes]
        self.marks, self._low_rank = len(self.parameters), low_rank
        self.whole = sum(sizes) + self.marks
        self._sum = summing.make(self.parameters, self._memory, self.whole)
        self.sizes = sizes if low_rank is None else low_rank.sizes[:-1]
        self.elements, self.moments = sum(self.sizes) + self.marks, statistics.moments
        self.of_gradients = len(self.sizes) - len(statistics.sizes)
        #: what a round has now, what is handed to another peer, what came back from either
        self._given: Made | None = None
        self._handed: Made | None = None
        self._back: Mean | None = None
        #: has this peer gone, since, where what it hands over cannot come back to; a batch; is that of another lineage
        self._void = self._computing = self._batch_is_void = False
        #: whether the training thread is with a batch, or anywhere else where it does not gather
        self.away = False
        self._carried = Carried(self.marks)
        self._number, self._head_epoch = time.time_ns() // 1000, 0  # grows over restarts, too
        self._left_out = LeftOut(self._memory, self.parameters if low_rank is None else ())

    # ------------------------------------------------------------------ the training thread

    @property
    def samples(self) -> int:
        """Whose gradients are here and in no commit."""
        with self._lock:
            given = self._given.contribution.samples if self._given is not None else 0
            back = self._back.samples if self._back is not None else 0
            return self._sum.samples + given + back + self._carried.samples

    @property
    def ready(self) -> int:
        """Samples that :meth:`give` can give: not of a sum to which a batch is being added, or that nobody gathers."""
        with self._lock:
            cannot = self._sum.busy or (self._sum.elsewhere and self.away)
            return self.samples - (self._sum.samples if cannot else 0)

    def is_far_ahead(self, share: float) -> bool:
        """With ``local_step``: since it gave to the round under way it has its ``share`` of the next."""
        with self._lock:
            given = 0 if self._given is None else self._given.contribution.samples
            return self._local and given > 0 and self.samples - given >= share

    def weight(self, samples: int) -> float:
        """What to multiply the loss of a batch of ``samples`` by, before its backward pass."""
        with self._lock:
            return self._sum.weight(samples)

    def rescale(self, factor: float) -> None:
        """See :meth:`~lightning_hivemind.engine.base.Engine.rescale`; between two batches."""
        with self._lock:
            self._sum.rescale(factor)

    def begin_batch(self) -> None:
        """``param.grad`` belongs to a batch until :meth:`add`."""
        with self._lock:
            self._sum.begin_batch()
            self._computing, self._batch_is_void = True, False

    @torch.no_grad()
    def add(self, samples: int, epoch: int, scale: float = 1.0) -> int:
        """Take in ``param.grad``, the mean of a batch of ``samples``, computed with the parameters of ``epoch``.

        Returns how many samples are too old to count, and dropped. No gradient counts as zeros, if there is one in
        another batch. ``scale``: what sums in place are still multiplied by.
        """
        with self._lock:
            void, self._computing, self._batch_is_void = self._batch_is_void, False, False
            if lost := samples if void and not self._sum.busy else self._sum.add(samples, epoch, scale):
                self._statistics.forget()
            return lost + self._prune()

    def is_stale(self) -> bool:
        """Whether ranks have something in parts that is to be gathered before it can be given."""
        return self._sum.elsewhere

    def gather(self) -> None:
        """What ranks have summed, so that it can be given. (With ``local_step`` who is told of steps gathers.)"""
        if isinstance(self._sum, PartsSum) and self._sum.elsewhere:
            self._sum.gather(self._lock)

    def end_batch(self) -> None:
        """The batch that was begun, if it was not added, is over: its step was left out, say."""
        with self._lock:
            self._sum.end_batch()
            self._computing = False

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """``param.grad`` is free for an average; afterwards the next sum begins there."""
        with self._lock:
            self._back = self._take_all()
            self._sum.clear()
            self._sum.lent = True
        try:
            yield
        finally:
            with self._lock:
                self._sum.lent = False
                self._sum.clear()

    def discard(self) -> int:
        """Forget what no round has, and the batch that is being computed; returns the samples that are lost."""
        with self._lock:
            self._sum.busy = False
            return self._forget()

    def replaced(self) -> int:
        """The parameters are another peer's: with ``local_step`` what they had become is lost. Returns the samples."""
        with self._lock:
            if self._given is not None and self._local:  # which may still be in a step
                self._given = replace(self._given, own=None)
            return self._forget() if self._local else 0

    # ------------------------------------------------------------------ the rounds' thread

    @torch.no_grad()
    def give(self) -> tuple[Contribution, Tensor] | None:
        """Fix what this peer gives to a round: float32 CPU (elements,), never changed again; None if nothing.

        What is added from now on is for the next round.
        """
        with self._lock:
            assert self._given is None, "one round at a time"
            found = self._collect()
            if found is None:
                return None
            self._given, values = found
            return self._given.contribution, values

    @torch.no_grad()
    def hand_over(self, steps: int) -> tuple[int, Parcel | None]:
        """As :meth:`give`, but to another peer, which gives it to a round; it will have it after so many more steps.

        Returns the samples that are too old for that, and dropped; and None if there is nothing, or if it cannot be.
        """
        with self._lock:
            assert self._handed is None, "one peer at a time"
            if not self._may_hand_over(steps):
                return 0, None
            lost = self._prune(steps)
            found = self._collect()
            if found is None:
                return lost, None
            (self._handed, values), self._void = found, False
            samples, epoch = self._handed.contribution.samples, self._handed.epoch
            return lost, Parcel(values, samples, epoch, min(epoch + self._max_staleness, MOST_EPOCHS))

    def make_fresh(self, steps: int, in_all: int) -> int:
        """Drop what is too old ``in_all`` steps from now, of which handing it over takes ``steps``; returns samples."""
        with self._lock:
            return self._prune(in_all) if self._may_hand_over(steps) else 0

    def handed_over(self, *, back: bool) -> int:
        """It is that peer's now, or was lost; or it is ``back``. Returns the samples that are too old, and dropped."""
        with self._lock:
            handed, self._handed = self._handed, None
            if handed is None or not back:
                return 0
            if self._void:
                return handed.contribution.samples
            self._recover(handed)
            return self._prune()

    def carry(self, parcel: Parcel) -> bool:
        """Give another peer's gradient, too: as from :meth:`hand_over`. False if it is too old, or cannot be."""
        with self._lock:
            steps = 0 if self._given is None else 1  # that round goes without it
            # as old as what this peer would drop then, if it were its own
            epoch = min(parcel.until - self._max_staleness, self._head_epoch + 1)
            fits = self.can_be_carried and not self._too_old(epoch, steps)
            fits &= parcel.epoch <= self._head_epoch + 1 and parcel.samples + self.samples <= MOST_SAMPLES
            if fits:
                self._carried.add(Mean(parcel.values, parcel.samples, epoch))
            return fits

    def too_old(self, until: int) -> bool:
        """Whether what may be in steps ``until`` that epoch can be in none any more."""
        with self._lock:
            return until < self._head_epoch

    def returned(self) -> int:
        """The round came to nothing: the next one gets it, with what came since. Returns the samples that are lost."""
        with self._lock:
            if (given := self._given) is not None:
                self._recover(given)  # first: it may find no memory
            self._given = None
            return given.contribution.samples if given is not None and given.is_void else 0

    def refused(self) -> int:
        """What was given cannot be used: it is dropped, and not given again. Returns its samples."""
        with self._lock:
            given, self._given = self._given, None
            return given.contribution.samples if given is not None else 0

    def counted(self, listed: Collection[Contribution]) -> Tensor | None:
        """With ``local_step``: the changes of this peer that are in a commit which lists these; None if none are."""
        with self._lock:
            mean = self._given.own if self._given is not None else self._back
            mine = mean is not None and mean.is_in([one.number for one in listed])
            return mean.values if self._local and mean is not None and mine else None

    @torch.no_grad()
    def committed(self, listed: Collection[Contribution], epoch: int, left_out: Tensor | None = None) -> int:
        """Commits have led to ``epoch``; ``listed`` are the contributions of this peer that are in them.

        ``left_out`` is what the last one has left of them, if it is known.
        Returns the samples that are too old now, and dropped.
        """
        counted = {one.number for one in listed}
        with self._lock:
            given, back = self._given, None
            waiting = [mean for mean in (given.own if given is not None else None, self._back) if mean is not None]
            for mean in waiting:
                if not mean.is_in(counted):  # first: it may find no memory
                    back = mean if back is None else self._merged(back, mean)
            self._given, self._back = None, back
            self._head_epoch, dropped = epoch, 0
            self._left_out.committed(left_out, listed=bool(listed))
            if given is not None:
                self._carried.put_back(given.carried)
                dropped = given.contribution.samples if given.is_void and given.contribution not in listed else 0
            self._carried.drop(lambda mean: mean.is_in(counted))
            for mean in waiting:
                if mean.is_in(counted):
                    dropped += mean.samples - sum(mean.given.get(number, 0) for number in counted)
                    if self._low_rank is not None:
                        self._low_rank.counted(counted)
            return dropped + self._prune()

    def stands_at(self, epoch: int) -> None:
        """This peer is at ``epoch`` with what it has: it was nowhere, or has come back to its own state."""
        with self._lock:
            self._head_epoch = epoch
            if self._low_rank is not None:
                self._low_rank.stands_at(epoch)

    def decided(self, average: Tensor, epoch: int) -> None:
        """The step from ``epoch``, by ``average``, was decided, and will be unpacked and made here."""
        if self._low_rank is not None:
            self._low_rank.learn(average, epoch)

    def moved(self, epoch: int) -> int:
        """To ``epoch`` by a way on which contributions cannot be followed: none is kept. Returns the lost samples."""
        with self._lock:
            self._head_epoch = epoch
            lost, self._given = self.samples, None
            self._forget()
            self._left_out.forget()
            self._carried.take()
            self._void, self._batch_is_void = True, self._computing
            return lost

    # ------------------------------------------------------------------ private

    @property
    def can_be_carried(self) -> bool:
        """Whether the values of several peers have a mean that is one peer's: not factors, nor changes since a step."""
        return self._low_rank is None and not self._local

    @property
    def was_given(self) -> bool:
        """Whether something here was in a round before: it may be in a commit, which only this peer can find out."""
        with self._lock:
            return self._carried.was_given or (self._back is not None and bool(self._back.given))

    def _may_hand_over(self, steps: int) -> bool:
        return self.can_be_carried and steps <= self._max_staleness and not self.was_given

    def _collect(self) -> tuple[Made, Tensor] | None:
        """All that is here and in no commit, as a contribution of its own; None if there is nothing."""
        if self._local and (self._statistics.epoch != self._head_epoch or self._sum.elsewhere):
            return None  # the step to there is still to be made here: it may have these changes already
        own, self._number = self._take_all(), self._number + 1
        self._back, carried = own, self._carried.take()
        parts = [*([own] if own is not None else []), *carried]
        if not parts:
            return None
        samples = sum(one.samples for one in parts)
        try:
            values: Tensor | None = mean_of(parts, self.marks, self._memory)
        except Exception:  # no memory
            self._carried.put_back(carried)
            raise
        if self._low_rank is not None and values is not None:
            self._low_rank.mark(values[values.numel() - self.marks :], trained_now(self.parameters))
            values = self._low_rank.pack(values, self._number, samples, self._head_epoch)
        if values is None:
            return None
        values = self._left_out.added_to(values, samples)
        number, self._back = self._number, None
        carried = tuple(one.gave(number) for one in carried)
        contribution = Contribution(peer=self._me, number=number, samples=samples)
        return Made(contribution, own.gave(number) if own is not None else None, carried), values

    def _forget(self) -> int:
        lost, self._back = self._sum.samples + (self._back.samples if self._back is not None else 0), None
        self._clear()
        return lost

    def _clear(self) -> None:
        """What was summed is in no contribution, nor is what has changed with it."""
        self._sum.clear()
        self._statistics.forget()

    def _recover(self, given: Made) -> None:
        """For the next round, with what waits for it already."""
        if given.own is not None:
            self._back = given.own if self._back is None else self._merged(self._back, given.own)
        self._carried.put_back(given.carried)

    def _take_all(self) -> Mean | None:
        """What came back from a round, with what was summed since, of which another sum begins."""
        total = self._sum
        if self._local and self._back is not None and not total.samples:
            return replace(self._back, values=self._statistics.changes(self._head_epoch))
        if not total.samples or total.busy or total.elsewhere:
            return self._back
        room = None if self._back is None or self._local else self._memory.floats(self.whole)  # there may be none
        samples, epoch = total.samples, total.epoch
        with self._statistics.taking(self._head_epoch) as changes:
            values = total.take()
            values[total.elements : self.whole - self.marks] = changes
        mean = Mean(values, samples, epoch)
        return mean if self._back is None else self._back.followed_by(mean, total.elements, self.marks, room)

    def _merged(self, older: Mean, newer: Mean) -> Mean:
        room = None if self._local else self._memory.floats(self.whole)
        return older.followed_by(newer, self._sum.elements, self.marks, room)

    def _prune(self, steps: int = 0) -> int:
        """Drop what is too old, or will be after so many steps; returns the samples."""
        dropped = self._carried.drop(lambda one: self._too_old(one.epoch, steps))
        if self._back is not None and self._too_old(self._back.epoch, steps):
            dropped, self._back = dropped + self._back.samples, None
        if self._sum.samples and self._too_old(self._sum.epoch, steps):
            dropped += self._sum.samples
            self._clear()
        return dropped

    def _too_old(self, epoch: int, steps: int = 0) -> bool:
        return not self._local and epoch < self._head_epoch + steps - self._max_staleness
