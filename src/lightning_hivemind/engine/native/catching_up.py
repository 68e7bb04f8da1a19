"""Getting from whatever state this peer has to the swarm's: a donor's state. Later steps follow it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection
from functools import partial

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.base import PeerTraining
from lightning_hivemind.engine.native.agreement import Agreement
from lightning_hivemind.engine.native.errands import Errands
from lightning_hivemind.engine.native.parts import Parts
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.reports import Reports
from lightning_hivemind.engine.native.state.moment import PATIENCE_S, await_step
from lightning_hivemind.engine.native.state.relay import Relay
from lightning_hivemind.engine.native.state.snapshot import Description, MisfitError, Snapshot
from lightning_hivemind.engine.native.stepper import Stepper
from lightning_hivemind.engine.native.whereabouts import Whereabouts
from lightning_hivemind.engine.swarm_records import SwarmRecords
from lightning_hivemind.errors import StateError
from lightning_hivemind.events import EventBus, FallingBehind, StateLoaded, StateUnavailable, StepsUndone, Waiting

REPORT_S = 5.0
PAUSE_S = 0.5
#: so long nobody must have had the swarm's state before it is given up: records are seconds late
NOBODY_S = 15.0
#: that who joins takes part in no round, at most
NOWHERE_S = 3.0
#: so long this peer may not have looked who has the state: nobody knows what was so meanwhile, or it stood still
UNSEEN_S = 3.0
#: before donors that are no further than this peer are asked again; doubled up to PAUSE_S
NO_NEWS_S = 0.05
#: a state was no use that fewer steps followed; so many in a row, in so long, are told, then twice as many, and so on
STEPS_OF_USE, IN_A_ROW, LONG_S = 3, 3, 10.0


class CatchingUp:
    """See the module. Runs in the training thread, which has nothing better to do without the swarm's parameters."""

    def __init__(
        self,
        arguments: Arguments,
        parts: Parts,
        records: SwarmRecords,
        whereabouts: Whereabouts,
        training: PeerTraining,
        stepper: Stepper,
        events: EventBus,
    ) -> None:
        self._a, self._parts, self._records, self._training = arguments, parts, records, training
        self._stepper, self._events, self._whereabouts = stepper, events, whereabouts
        #: head and digest of the state that was installed last
        self._fetched: tuple[Head, bytes] | None = None
        self._no_news_s = NO_NEWS_S
        #: where this peer stands, and since when nobody has had the state of that
        self._stands: Head | None = None
        self._nobody_since, self._looked_at = math.inf, -math.inf
        #: its own: all whose scripts set the same seed would ask the same peer
        self._chance = random.Random()
        #: since when this peer has waited for a state, and when that was said last
        self._since: float | None = None
        self._said = math.inf
        #: states in a row that were no use, since when, how many are told; how many were overtaken before that
        self._no_use, self._no_use_since, self._told_of, self._overtaken = 0, 0.0, IN_A_ROW, 0
        self._needed_at = Head.nowhere()
        #: where it will stand that has not begun to take part in rounds
        self._joins: Head | None = None
        #: why there was none, when to say so again if it is still so, and after how long
        self._problem, self._say_at, self._quiet_s = "", 0.0, PAUSE_S
        self.errands = Errands()
        self._relay = Relay(
            parts.downloads,
            self._donors,
            lambda: parts.driver.status.head,
            stepper.read,
            training.should_abort,
            arguments.load_state_timeout,
        )

    def heads(self, stands: Head) -> list[Head]:
        """Where the others stand. Who joins a run with nothing but initial values (``stands``) waits for its founder.

        That may take long to begin: it is announced before Lightning's sanity check.

        Raises:
            StateError: it did not begin within ``load_state_timeout``.
        """
        began = said = time.monotonic()
        while True:
            heads = [head for head in self._whereabouts.first_look() if head != Head.nowhere()]
            joins = self._a.initial_peers and not self._a.auxiliary and not stands.epoch
            if heads or not joins or not (founders := self._records.founders) or self._training.should_abort():
                return heads
            now, limit_s = time.monotonic(), self._a.load_state_timeout
            if now - began > limit_s:
                raise StateError(
                    f"peer {min(founders)}, which founds run_id={self._a.run_id!r}, has not begun to train for"
                    f" {limit_s:.0f} s (load_state_timeout). See what it does; nothing was changed here."
                )
            if now - said >= REPORT_S:
                said = now
                what = f"peer {min(founders)}, which founds the run, to begin"
                self._events.emit(Waiting(what=what, elapsed_s=now - began, limit_s=limit_s))
            time.sleep(PAUSE_S)

    def join(self, head: Head) -> None:
        """This peer has just started, and others stand at ``head``: what they are asked for is theirs.

        It takes part in rounds, and so keeps their averages, from when a state is described: the donor waits for a
        round that would send as much to it at the same time. (If none is described soon, it does so without.)
        """
        self._joins = head
        if self._a.auxiliary:  # needs no state
            self._take_part()
        self._parts.handover.owe()

    def _take_part(self, head: Head | None = None) -> None:
        """In rounds from now on, if this peer does not yet: at ``head``, or where the others stood."""
        if self._joins is not None:
            head, self._joins = head or self._joins, None
            self._parts.driver.follow(head)

    def run(self, head: Head, preferred: Collection[str] = ()) -> Head:
        """Fetch and install a state; returns where this peer stands then: where it stood (``head``) if nobody has one.

        ``preferred``: who has the state that this peer should have, if not all do.

        Raises:
            StateError: what all donors offer does not fit, for as long as ``load_state_timeout``, or until they leave.
        """
        began = time.monotonic()
        self._look()  # since the last call there were batches: this process did not stand still
        problem, misfits = "no peer shares its state (who validates with averaged weights does so afterwards)", False
        tried = self._since is not None
        if self._since is None:
            if not preferred:
                self._needs_another(head, began)
            self._since = self._said = began
            self._problem = ""  # (what was wrong with an earlier one is said again)
        while not self._stops():
            left_s = self._since + self._a.load_state_timeout - time.monotonic()
            donors = self._donors(preferred)
            if not donors:
                break
            if tried and left_s <= 0:  # (at least once, however busy the machine is)
                raise StateError(
                    f"this peer could not download the swarm's state in {self._a.load_state_timeout:.0f} s"
                    f" (load_state_timeout): {problem} Nothing was changed here."
                )
            if self._other_trainers and self._nobody_has_it():
                return self._go_on(head, "who had it has gone, and nobody that lives has it", gives_up=True)
            tried = True
            if set(self._records.auxiliaries).issuperset(donors):
                self._take_part()  # they fetch it first, and rounds go on meanwhile
            try:
                found, news = self._fetch(preferred, max(0.0, left_s), None if preferred else head)
                misfits = False
            except StateError as failure:
                found, news, problem, misfits = None, False, str(failure), isinstance(failure, MisfitError)
            self._take_part()
            if found is not None:
                self._took(found, began, news=news)
                return found
            self._say(head, problem)
            time.sleep(PAUSE_S)
        if self._training.should_abort():
            return head
        self._take_part()
        if misfits and not head.samples:  # (who has trained goes on from what it has)
            raise StateError(f"the others have gone, and their state does not fit here: {problem} Nothing was changed.")
        return self._without(head)

    def settled(self) -> None:
        """This peer is where the swarm is: for a state that it needs later it waits anew."""
        self._stands = self._since = None

    def _took(self, found: Head, began: float, *, news: bool) -> None:
        """A state is installed; ``news``: it is another one than was here."""
        if self._parts.handover.settle(found):
            self.settled()
        if news:
            self._since = None
            self._no_news_s = NO_NEWS_S
            self._events.emit(StateLoaded(epoch=found.epoch, duration_s=time.monotonic() - began))
        else:  # the swarm is a step ahead of its donors' parameters
            time.sleep(self._no_news_s)
            self._no_news_s = min(2 * self._no_news_s, PAUSE_S)

    def _needs_another(self, head: Head, now: float) -> None:
        """Who stands at ``head`` has missed a step. Was the last state of any use?"""
        self._needed_at = head
        made = math.inf if self._fetched is None else head.epoch - self._fetched[0].epoch
        if 0 <= made < STEPS_OF_USE:
            self._no_use += 1
        else:
            self._no_use, self._no_use_since, self._told_of = 0, now, IN_A_ROW
            self._overtaken = self._parts.downloads.overtaken

    def _tell_of_line(self, now: float) -> None:
        """Say so if state after state is no use, once it was here or before."""
        states = self._no_use + self._parts.downloads.overtaken - self._overtaken
        lasts_s = now - self._no_use_since
        if states >= self._told_of and lasts_s >= LONG_S:
            self._told_of = 2 * states
            self._events.emit(FallingBehind(epoch=self._needed_at.epoch, states=states, duration_s=lasts_s))

    def _say(self, head: Head, problem: str) -> None:
        """Why no state has come: once, and less and less often as long as it is the same."""
        now = time.monotonic()
        if problem != self._problem:
            self._problem, self._say_at, self._quiet_s = problem, now, PAUSE_S
        if now >= self._say_at:
            self._quiet_s *= 2
            self._say_at = now + self._quiet_s
            reason = problem.rstrip(".")
            self._events.emit(StateUnavailable(epoch=head.epoch, reason=reason, action="trying again"))

    def _without(self, head: Head) -> Head:
        """No state has come: go on from this peer's own, unless that would part it from the swarm."""
        reason = "nobody is there"
        if self._out_of_reach - set(self._records.auxiliaries):
            reason = "all that train are clients, as this peer is" if self._a.client_mode else "no connection to any"
            swarm = self._parts.driver.status.head
            if swarm is not None and swarm.epoch > head.epoch:
                raise StateError(
                    f"this peer is at epoch {head.epoch}, the swarm at {swarm.epoch}, and nobody can give it the"
                    f" swarm's state: {reason}. At least one peer, if only a helper (auxiliary=True), must be reachable"
                    " (not in client_mode). Nothing was changed here."
                )
        return self._go_on(head, reason, gives_up=self._nobody_has_it())

    def _go_on(self, head: Head, reason: str, *, gives_up: bool = False) -> Head:
        self._since = None
        action = "going on from this peer's own state"
        self._events.emit(StateUnavailable(epoch=head.epoch, reason=reason, action=action))
        self._parts.driver.adopt(head, gives_up=gives_up)
        return head

    def _stops(self) -> bool:
        """Whether this process is being stopped. Says every few seconds what is waited for.

        Who joins is a member of rounds after a while, whatever its donors wait for.
        """
        now, unseen_s = time.monotonic(), self._look()
        self._tell_of_line(now)
        if self._since is not None and unseen_s > UNSEEN_S:
            self._since += unseen_s  # what it stood still for is no time in which it waited
        if self._since is not None and now - self._since >= NOWHERE_S:
            self._take_part()
        if self._since is not None and now - self._said >= REPORT_S:
            self._said = now
            what, limit_s = f"the swarm's state ({self._parts.downloads.share:.0%} is here)", self._a.load_state_timeout
            self._events.emit(Waiting(what=what, elapsed_s=now - self._since, limit_s=limit_s))
        return self._training.should_abort()

    def stay(self, head: Head) -> Head:
        """``head``; but a helper, which has no state, does not stay where no trainer has one: it goes back to nowhere.

        Else it would call all that come to where nobody can get.
        """
        if not self._a.auxiliary or head == Head.nowhere() or not self._nobody_has_it():
            return head
        reason = "no trainer that lives has it"
        self._events.emit(StateUnavailable(epoch=head.epoch, reason=reason, action="helping whoever comes next"))
        self._parts.driver.adopt(Head.nowhere(), gives_up=True)  # another helper may still be there
        return Head.nowhere()

    def _nobody_has_it(self) -> bool:
        """Whether for long all that train and live have been without the state of where this peer stands."""
        self._look()
        return self._looked_at - self._nobody_since > NOBODY_S

    def _look(self) -> float:
        """Who has it; returns how long ago that was done before."""
        head, now = self._parts.driver.status.head, time.monotonic()
        unseen_s, self._looked_at = now - self._looked_at, now
        somebody = not self._other_trainers <= self._whereabouts.without
        if somebody or head != self._stands or unseen_s > UNSEEN_S:
            self._stands, self._nobody_since = head, now
        return unseen_s

    @property
    def _other_trainers(self) -> set[str]:
        """That live, whether or not they can be reached from here."""
        status = self._parts.driver.status
        return {*status.living, *status.cut} - set(self._records.auxiliaries)

    def agree(self, head: Head, agreement: Agreement, reports: Reports) -> Head:
        """If this peer's parameters are not what the others have: take theirs. Returns where it stands then."""
        found = agreement.difference()
        if found is None:
            return head
        reports.differed(found)
        self._parts.handover.owe()
        began = time.monotonic()
        head = self.run(head, found.peers)
        agreement.took(time.monotonic() - began)
        return head

    def give(self, known: Snapshot | None, running: Callable[[], bool]) -> Snapshot | None:
        """For a peer that joins; in the donor's thread, while this peer is ``running``."""
        parts, stepper = self._parts, self._stepper
        if self._a.auxiliary:  # one of those that whoever asks cannot reach
            return self._relay.copy(known)
        if parts.driver.status.head is None or not stepper.is_untouched():
            return None
        memory, size = stepper.room_for_copy(known), stepper.bytes_to_send(known)
        if not await_step(parts.donor, parts.driver, parts.handover, lambda: stepper.head, running, size):
            return None
        return stepper.snapshot(known, memory, partial(self.errands.ask, timeout_s=PATIENCE_S))

    def _donors(self, preferred: Collection[str] = ()) -> list[str]:
        """The other peers that can be asked: those that train; where all are out of reach, those that help.

        Each time in another order, but who can be spoken to before who may be dead, and last who says that it has none.
        """
        helpers, out_of_reach = set(self._records.auxiliaries), self._out_of_reach
        living = self._parts.driver.status.living
        found = [peer for peer in living if peer not in helpers | out_of_reach]
        found = found or sorted(set(self._records.trainers) - helpers - out_of_reach)
        if not found and out_of_reach - helpers:
            found = [peer for peer in living if peer in helpers - out_of_reach]
        found = [peer for peer in found if peer in preferred] or found
        self._chance.shuffle(found)
        without, connected = self._whereabouts.without, self._parts.connected()
        return sorted(found, key=lambda peer: (peer in without, peer not in connected))

    @property
    def _out_of_reach(self) -> frozenset[str]:
        """Two peers that both accept no connections have none, nor may others."""
        status = self._parts.driver.status
        return frozenset(status.cut) | (status.clients if self._a.client_mode else frozenset())

    def _fetch(self, preferred: Collection[str], timeout_s: float, here: Head | None) -> tuple[Head | None, bool]:
        """The head of the donors' state, and whether it was installed: not if this peer stands ``here`` with it."""
        known = self._fetched if self._fetched is not None and self._fetched[0] == here else None

        def read(data: memoryview) -> Description:
            description = self._stepper.read(data)
            head = description.head
            if here is None or head in (here, self._joins, self._parts.driver.status.head) or head.outweighs(here):
                self._take_part(head)
                return description
            raise StateError(f"its state, of {head.samples} samples, is older than that of this peer.")

        leads_on, donors = self._parts.handover.leads_on, partial(self._donors, preferred)
        found = self._parts.downloads.fetch(donors, read, timeout_s, self._stops, enough=leads_on, known=known)
        if found is None:
            return None, False
        description, memory = found
        state = description.head, description.digest
        if state != known:
            undone = self._stepper.adopt(description, memory, self._parts.handover.take_decided())
            self._parts.downloads.memory.give_back(memory)
            self._parts.handover.replaced()
            if undone is not None:
                first, last, samples = undone.first, undone.last, undone.samples
                self._events.emit(StepsUndone(epoch=description.head.epoch, first=first, last=last, samples=samples))
            self._fetched = state
        return description.head, state != known
