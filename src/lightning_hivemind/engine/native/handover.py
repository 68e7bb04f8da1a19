"""What passes between the thread of the rounds and the training thread, and who waits for whom.

The rounds' thread never waits: it takes what is there. The training thread waits only between two batches, and only
while a round that it belongs to is due or under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.pace import Pace
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head, PeerId
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.seam import Given, Outcome, Parcel
from lightning_hivemind.engine.native.spill import most_on_disk, on_disk
from lightning_hivemind.engine.native.steps import Handed, Received, Step
from lightning_hivemind.engine.native.trail import Decided
from lightning_hivemind.errors import SwarmError

#: memory for averages that wait for the training thread; more of them wait on disk
WAITING_BYTES = 1 << 30
MOST_WAITING = 64
#: of its line, for who has not done a batch yet, or fetches a state: it reduces where nobody else can
HARDLY = 1e-6
#: of this peer's own, with a state after each
MOST_FAILURES = 3


class Handover:
    """Implements :class:`.seam.Training`; see the module. All times are of ``time.monotonic``.

    Args:
        last_step: the epoch after which this peer's own run ends; -1 if that is not known.

    Attributes:
        owes: the parameters here are not those of a head from which the steps that are here lead on: a state must be
            fetched. In rounds meanwhile this peer gives nothing, and keeps what they bring.
        pace: for whoever has the lock of ``changed``.
        stops_at: the epoch after which all stop, once that was decided in a step; whether or not it is made here.
    """

    def __init__(
        self,
        me: PeerId,
        gradients: Gradients,
        pace: Pace,
        *,
        reduces: bool,
        gives: bool,
        last_step: Callable[[], int] = lambda: -1,
    ) -> None:
        self._me, self._gradients, self.pace, self._reduces, self._gives = me, gradients, pace, reduces, gives
        self._last_step = last_step
        self._most_waiting = max(2, min(MOST_WAITING, WAITING_BYTES // max(1, 4 * gradients.elements)))
        self.changed = threading.Condition()
        self._steps: deque[Step] = deque()
        #: steps with samples of this peer, until they are made here
        self._decided: list[Decided] = []
        self._head: Head | None = None
        #: samples; those doomed would be too old once this peer's line is free, and are told then
        self._lost = self._refused = self._doomed = 0
        #: epochs whose round came to nothing, and why it did last
        self._untold: dict[int, str] = {}
        #: why its own part in rounds went wrong, since it was in a commit
        self._failures: list[str] = []
        self._began = 0.0
        #: since when no batch could begin for rounds
        self._since: float | None = None
        self.owes = self.under_way = self.stop_wanted = self.hands_over = False
        #: what became of what it handed to other peers, and what others have handed to it
        self._handed: list[Handed | Received] = []
        self.stops_at: int | None = None

    # ------------------------------------------------------------------ the rounds' thread

    @property
    def samples(self) -> int:
        """Of this peer, for the next commit."""
        return self._gradients.ready if self.gives else 0

    @property
    def gives(self) -> bool:
        """Whether this peer gives to rounds what it has, or some of it."""
        return self._gives and not self.owes and (not self.hands_over or self._gradients.was_given)

    def called(self, now: float) -> float:
        """A round calls: :meth:`ready_at`, for the first time."""
        with self.changed:
            self.pace.called(now)
        return self.ready_at(now)

    def ready_at(self, now: float) -> float:
        """When this peer should join a round that has called it: now, or soon, when its batch will be finished.

        If now, the training thread begins no batch before the round is over.
        """
        with self.changed:
            at = now if self.owes or self.hands_over else self.pace.join_at(now)
            if at <= now:
                self._join(now)
            return at

    def give(self) -> Given:
        with self.changed:
            self._began = time.monotonic()
            self._join(self._began)
        contribution, values = (self._gradients.give() if self.gives else None) or (None, None)
        spare = HARDLY if self.owes or (self._gives and self.pace.starts) else 1.0
        epoch = 0 if self._head is None else self._head.epoch
        offer = Offer(
            contribution=contribution,
            reduces=self._reduces,
            bandwidth=spare,
            stop=self.stop_wanted,
            last=epoch + 1 == self._last_step(),
        )
        return Given(offer=offer, values=values)

    def returned(self, reason: str, *, begun: bool) -> None:
        lost = self._gradients.returned()
        with self.changed:
            self.under_way, self._lost = False, self._lost + lost
            if begun:
                self._untold[self._head.epoch if self._head is not None else 0] = reason
            self.changed.notify_all()

    def committed(
        self, commit: Commit, average: Tensor | None, left_out: Tensor | None, *, coming: bool = False
    ) -> None:
        now = time.monotonic()
        listed = [one for one in commit.contributions if one.peer == self._me]
        counted = self._gradients.counted(listed)
        lost = self._gradients.committed(listed, commit.head.epoch, left_out)
        mine = sum(one.samples for one in listed)
        with self.changed:
            began = self._began if self.under_way else now
            others = len(commit.contributions) - len(listed)
            self.pace.step(commit.samples - mine, now, mine=mine, others=others)
            follows = self._head in (None, commit.parent)  # else a step was lost on the way to here
            self._head, self.under_way = commit.head, False
            self._lost += lost
            if (listed or not self._gives) and (average is not None or coming):
                self._failures.clear()
            self._note(commit, mine)
            if (average is None and not coming) or not follows:
                self._steps.clear()
                self.owes = True
            else:
                self._learn(average, commit)
                self._keep(Step(commit, average, mine, counted, began))
            self._since = self._since if self.comes else None
            self.changed.notify_all()

    def arrived(self, round_id: bytes, average: Tensor | None) -> None:
        with self.changed:
            place = next((n for n, step in enumerate(self._steps) if step.commit.round == round_id), None)
            if place is None:
                return  # a state was taken meanwhile
            if average is None:
                self._steps.clear()
                self.owes = True
            else:
                self._learn(average, self._steps[place].commit)
                self._steps[place] = replace(self._steps[place], average=average)
            self._since = self._since if self.comes else None
            self.changed.notify_all()

    def _learn(self, average: Tensor | None, commit: Commit) -> None:
        if average is not None and self._gives and not self.owes and len(self._steps) < self._most_waiting:
            self._gradients.decided(average, commit.parent.epoch)

    @property
    def carries(self) -> bool:
        return self.gives and self._gradients.can_be_carried and self.stops_at is None

    @property
    def can_hand_over(self) -> bool:
        with self.changed:
            return self._gives and self._gradients.can_be_carried and not self.pace.stands_still(time.monotonic())

    def hand_over(self, takes_s: float) -> Parcel | None:
        if not self._gives or self.owes:
            return None
        with self.changed:
            steps = self.pace.steps_within(takes_s, time.monotonic())
            self.pace.wanted |= self._gradients.is_stale()  # for the next time
        lost, parcel = self._gradients.hand_over(steps)
        if lost:
            with self.changed:
                self._handed.append(Handed("", lost, Outcome.TOO_OLD, 0.0))
        return parcel

    def hands_over_in(self, after_s: float, takes_s: float) -> None:
        now = time.monotonic()
        with self.changed:
            steps, in_all = (self.pace.steps_within(one, now) for one in (takes_s, after_s + takes_s))
        self._doomed += self._gradients.make_fresh(steps, in_all)

    def handed_over(self, to: PeerId, parcel: Parcel, outcome: Outcome, duration_s: float) -> None:
        lost = self._gradients.handed_over(back=outcome is Outcome.BACK)
        with self.changed:
            self._lost += lost
            if self._doomed:
                self._handed.append(Handed("", self._doomed, Outcome.TOO_OLD, 0.0))
                self._doomed = 0
            if outcome is not Outcome.BACK:
                self._handed.append(Handed(to, parcel.samples, outcome, duration_s))
            if outcome is Outcome.TAKEN:
                self._failures.clear()

    def carry(self, of: PeerId, parcel: Parcel) -> bool:
        if carried := self._gradients.carry(parcel):
            with self.changed:
                self._handed.append(Received(of, parcel.samples))
        return carried

    def too_old(self, until: int) -> bool:
        return self._gradients.too_old(until)

    def behind(self, head: Head, commits: tuple[Commit, ...]) -> None:
        listed = {c: [one for one in c.contributions if one.peer == self._me] for c in commits}
        given: list[Contribution] = [one for found in listed.values() for one in found]
        lost = self._gradients.committed(given, head.epoch) if commits else self._gradients.moved(head.epoch)
        with self.changed:
            self._head, self._lost, self.under_way, self._since = head, self._lost + lost, False, None
            self.owes = True
            self._steps.clear()
            for commit, found in listed.items():
                self._note(commit, sum(one.samples for one in found))
            self.changed.notify_all()

    def refused(self) -> None:
        with self.changed:
            self._refused += self._gradients.refused()

    def failed(self, reason: str) -> None:
        with self.changed:
            self._failures.append(reason)
            if self.comes:  # it does not any more
                self._steps.clear()
        self.owe()
        self.returned(reason, begun=True)

    def adopted(self, head: Head) -> None:
        self._gradients.stands_at(head.epoch)
        with self.changed:
            self._head, self.under_way, self._since, self.owes = head, False, None, False
            self._steps.clear()
            self.changed.notify_all()

    # ------------------------------------------------------------------ the training thread

    def begin_batch(self, head: Head, limit_s: float) -> bool:
        """A batch is begun; False if there is something to be done first, or a round to wait for, so long at most."""
        now = time.monotonic()
        with self.changed:
            waits = self.waits and self._since is not None and now < self._since + limit_s
            if self.ready(head) or waits:
                return False
            self._since = now if self.waits else None
            self.pace.begin_batch(now)
            return True

    @property
    def waits_since(self) -> float | None:
        """Since when no batch could begin for a round that is under way."""
        return self._since if self.waits else None

    @property
    def waits(self) -> bool:
        """Whether a step of this peer is decided now, or its average is coming."""
        return self.under_way or self.comes

    @property
    def comes(self) -> bool:
        """Whether the average of a step that is decided is still coming."""
        return any(step.average is None for step in tuple(self._steps))  # which the other thread may change meanwhile

    def expects(self, head: Head) -> bool:
        """Whether the average that leads on from ``head`` is still coming."""
        with self.changed:
            return any(step.commit.parent == head and step.average is None for step in self._steps)

    def end_batch(self) -> None:
        with self.changed:
            self.pace.end_batch(time.monotonic())

    def hold_until(self) -> float:
        """How long not to begin another batch: see :meth:`.Pace.hold_until`."""
        with self.changed:
            return self.pace.hold_until(self.samples, time.monotonic())

    def next_step(self, head: Head) -> Step | None:
        """The step that leads on from ``head``, if it is here."""
        with self.changed:
            self._decided = [one for one in self._decided if one.epoch > head.epoch]
            while self._steps and self._steps[0].commit.parent.epoch < head.epoch:
                self._steps.popleft()  # a state that was fetched has them already
            if self._steps and self._steps[0].commit.parent == head and self._steps[0].average is not None:
                return self._steps.popleft()
            return None

    def ready(self, head: Head) -> bool:
        """Whether there is something to do without waiting: a step that leads on from ``head``, or a debt."""
        return self.owes or any(one.commit.parent == head and one.average is not None for one in tuple(self._steps))

    def leads_on(self, head: Head) -> bool:
        """Whether a state of ``head`` is the swarm's, as far as is known here, or the steps from it on are here."""
        with self.changed:
            newer = self._head is None or head == self._head or head.outweighs(self._head)
            return newer or any(step.commit.parent == head for step in self._steps)

    def is_at(self, head: Head) -> bool:
        """Whether no step is decided beyond ``head``."""
        with self.changed:
            return head == self._head

    def owe(self) -> None:
        """The parameters here are not the swarm's."""
        with self.changed:
            self.owes = True
            self.changed.notify_all()

    def replaced(self) -> None:
        """The parameters are another peer's now."""
        lost = self._gradients.replaced()
        with self.changed:
            self._lost += lost

    def settle(self, head: Head) -> bool:
        """After a state was fetched and all steps that lead on are made: is ``head`` where the swarm is?"""
        with self.changed:
            if self._head == head:
                self.owes = False
                self.pace.join()
            return not self.owes

    def _join(self, now: float) -> None:
        """In a round; those that come to nothing one after another count as one."""
        self._since = now if self._since is None else self._since
        self.under_way = True

    def _keep(self, step: Step) -> None:
        """In memory; or, while a state takes longer to come than so many steps, on disk."""
        waiting = len(self._steps)
        if waiting >= self._most_waiting:
            spilled = on_disk(step.average) if step.average is not None and waiting < most_on_disk() else None
            if spilled is not None:
                step = replace(step, average=spilled)
            else:
                self._steps.popleft()  # a later state may lead on to the others
                self.owes = True
        self._steps.append(step)

    def _note(self, commit: Commit, mine: int) -> None:
        if mine:
            self._decided.append(Decided(commit, mine))
        if commit.stop and self.stops_at is None:
            self.stops_at = commit.head.epoch

    def take_decided(self) -> list[Decided]:
        """Steps with samples of this peer that were decided and not made here, since this was asked last."""
        with self.changed:
            decided, self._decided = self._decided, []
            return decided

    def take_lost(self) -> tuple[int, int]:
        """Samples that were dropped since this was asked last, and those that others could not use."""
        with self.changed:
            lost, refused = self._lost, self._refused
            self._lost = self._refused = 0
            return lost, refused

    def take_handed(self) -> list[Handed | Received]:
        """What became of gradients that were handed to other peers or to this one, since this was asked last."""
        with self.changed:
            handed, self._handed = self._handed, []
            return handed

    def check(self) -> None:
        """Raises SwarmError if this peer's own part in rounds goes wrong again and again."""
        with self.changed:
            if len(self._failures) >= MOST_FAILURES:
                raise SwarmError(
                    f"this peer's part in a round failed {len(self._failures)} times in a row, and would again:"
                    f" {self._failures[-1]} (the log has all of it). Parameters are those of the last global step."
                )

    def take_untold(self) -> dict[int, str]:
        """Epochs whose round came to nothing since this was asked last, and why; another attempt may have led on."""
        with self.changed:
            untold, self._untold = self._untold, {}
            return untold
