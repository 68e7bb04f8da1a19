"""This peer's rounds: called and joined, begun, decided; and, where it is the coordinator, called and led by itself.

    idle -- Called, join() --> joined -- Begin --> in a round -- Committed --> idle, one epoch on
      ^                          |                     |
      +------ Ended, lost -------+------ Ended, or nobody saw a commit (Inquiry)

Beside it, at the coordinator: Gathering until the plan is made, then Coordinator until the round is decided.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_hivemind.engine.native.protocol.actions import Action, Apply, Called, GiveUp, Note, Send
from lightning_hivemind.engine.native.protocol.coordinator import Coordinator
from lightning_hivemind.engine.native.protocol.gathering import Gathering
from lightning_hivemind.engine.native.protocol.inquiry import Inquiry
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId
from lightning_hivemind.engine.native.protocol.member import Member
from lightning_hivemind.engine.native.protocol.messages import (
    Ask,
    Begin,
    Call,
    Committed,
    Decline,
    Done,
    Ended,
    Join,
    Message,
    News,
    RoundId,
    StillOn,
    Undecided,
)
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.protocol.roster import Roster
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.protocol.standing import Standing

#: ended rounds that are remembered, so that a late message does not revive one
REMEMBERED = 64


@dataclass(kw_only=True, slots=True)
class Joined:
    """The round that this peer goes to.

    ``askers`` have lost its coordinator and want to hear how it ends. ``early`` inputs and results have overtaken the
    plan, ``next_call`` the commit.
    """

    round: RoundId
    coordinator: PeerId
    since: float
    resend_at: float
    offer: Offer | None = None
    askers: set[PeerId] = field(default_factory=set)
    early: list[tuple[int, PeerId]] = field(default_factory=list)
    early_results: list[tuple[int, int, bytes, PeerId]] = field(default_factory=list)
    next_call: tuple[PeerId, Call] | None = None


class Rounds:
    """See the module. Handlers are named after the message that they take."""

    def __init__(
        self,
        settings: Settings,
        me: PeerId,
        incarnation: bytes,
        roster: Roster,
        standing: Standing,
        emit: Callable[[Action], None],
    ) -> None:
        self._settings, self._me, self._incarnation, self._emit = settings, me, incarnation, emit
        self._roster, self._standing = roster, standing
        self._joined: Joined | None = None
        self._member: Member | None = None
        self._inquiry: Inquiry | None = None
        self._gathering: Gathering | None = None
        self._coordinator: Coordinator | None = None
        #: rounds that this peer does not enter again; true: it has promised to take no commit from the coordinator
        self._over: OrderedDict[RoundId, bool] = OrderedDict()
        self._called = 0
        self._failures = 0
        self._hold_until = 0.0
        self._due_since: float | None = None

    # ------------------------------------------------------------------ what one may ask

    def member(self, round_id: RoundId) -> Member | None:
        """This peer's part in that round, if it is in it."""
        return self._member if self._member is not None and self._member.plan.round == round_id else None

    def coordinator(self, round_id: RoundId) -> Coordinator | None:
        found = self._coordinator
        return found if found is not None and found.plan.round == round_id else None

    def inquiry(self, round_id: RoundId) -> Inquiry | None:
        return self._inquiry if self._inquiry is not None and self._inquiry.round == round_id else None

    @property
    def deadline(self) -> float:
        parts = (self._gathering, self._coordinator, self._member, self._inquiry)
        times = [part.deadline for part in parts if part is not None]
        if self._joined is not None:
            times.append(self._joined.resend_at)
        if self._hold_until:
            times.append(self._hold_until)
        if self._due_since is not None:
            times.append(self._due_since + self._settings.matchmaking_s)
        return min(times, default=float("inf"))

    # ------------------------------------------------------------------ what the driver says

    def join(self, round_id: RoundId, offer: Offer) -> None:
        joined = self._joined
        if joined is None or joined.round != round_id or joined.offer is not None:
            self._emit(GiveUp(round=round_id, reason="the round is over"))
        else:
            joined.offer = offer
            self._send(joined.coordinator, Join(round=round_id, offer=offer))

    def input_arrived(self, round_id: RoundId, chunk: int, peer: PeerId, now: float) -> None:
        member = self.member(round_id)
        if member is not None:
            member.heard(peer, now)
            member.input_arrived(chunk, peer)
        elif self._joined is not None and self._joined.round == round_id:
            self._joined.early.append((chunk, peer))

    def result_arrived(
        self, round_id: RoundId, chunk: int, version: int, digest: bytes, owner: PeerId, now: float
    ) -> None:
        member = self.member(round_id)
        if member is not None:
            member.heard(owner, now)
            member.result_arrived(chunk, version, digest, owner)
        elif self._joined is not None and self._joined.round == round_id:
            self._joined.early_results.append((chunk, version, digest, owner))

    def lost(self, peer: PeerId, now: float) -> None:
        if self._gathering is not None:
            self._gathering.drop(peer)
        if self._coordinator is not None:
            self._coordinator.lost(peer, "connection lost")
        if self._inquiry is not None:
            self._inquiry.lost(peer)
        elif self._joined is not None and self._joined.coordinator == peer:
            self._coordinator_lost(now)

    def tick(self, now: float) -> None:
        for part in (self._gathering, self._coordinator, self._member, self._inquiry):
            if part is not None:
                part.tick(now)
        joined = self._joined
        if joined is None or self._inquiry is not None:
            return
        patience_s = self._settings.round_s if self._member is not None else self._settings.matchmaking_s
        if now >= joined.since + 1.25 * patience_s + 2 * self._settings.resend_s:
            self._coordinator_lost(now)
        elif now >= joined.resend_at:
            joined.resend_at = now + self._settings.resend_s
            if joined.offer is not None and self._member is None:
                self._send(joined.coordinator, Join(round=joined.round, offer=joined.offer))

    def suspended(self, now: float) -> None:
        """This process stood still for so long that the others may have gone on without it.

        So it must not decide a round that they may have given up, nor begin one before it has heard of theirs.
        """
        if self._coordinator is not None and not self._coordinator.ended:
            self._coordinator.abort("this peer was suspended")
        self._dismiss("this peer was suspended", now)
        self._hold_until = max(self._hold_until, now + self._settings.resend_s)

    # ------------------------------------------------------------------ coming together

    def on_progress(self, sender: PeerId) -> None:
        """A peer at this head says that it is there: if a round gathers, it is called (again)."""
        if self._gathering is not None:
            self._gathering.call([sender], again=True)

    def on_call(self, sender: PeerId, message: Call, now: float) -> None:
        engaged, head, joined = self._engaged_with(), self._standing.settled, self._joined
        if joined is not None and head is not None and message.head.epoch == head.epoch + 1:
            joined.next_call = (sender, message)  # of the round after this one: the commit is on its way
            self._standing.same(sender, message.head)
        elif head is None or message.round in self._over or not self._standing.same(sender, message.head):
            self._send(sender, Decline(round=message.round, head=self._standing.head))
        elif joined is not None and joined.round == message.round:
            if joined.offer is not None and self._member is None:
                self._send(sender, Join(round=message.round, offer=joined.offer))
        elif engaged not in (None, sender) and (
            self._member is not None or not self._roster.outranks(sender, engaged, head.epoch)
        ):
            self._send(sender, Decline(round=message.round, better=engaged))
        else:
            self.leave("a better coordinator calls", now, better=sender)
            resend_at = now + self._settings.resend_s
            self._joined = Joined(round=message.round, coordinator=sender, since=now, resend_at=resend_at)
            self._emit(Called(round=message.round, coordinator=sender))

    def on_join(self, sender: PeerId, message: Join) -> None:
        leading = self.coordinator(message.round)
        if self._gathering is not None and self._gathering.round == message.round:
            self._gathering.join(sender, message.offer)
        elif leading is not None:
            leading.repeat(sender)
        else:
            self._tell_outcome(sender, message.round)

    def on_decline(self, sender: PeerId, message: Decline, now: float) -> None:
        leading, mine = self.coordinator(message.round), self._standing.head
        if leading is not None:
            leading.lost(sender, "it has left the round")
        elif self._gathering is not None and self._gathering.round == message.round and mine is not None:
            self._gathering.drop(sender)
            # Somebody else has a round at this head, or this head is behind: one beside it would fork the lineage.
            if message.better not in (None, self._me):
                self._yield(message.better, "another round is under way", now)
            elif message.head is not None and message.head != mine and message.head.outweighs(mine):
                self._yield(sender, "others are ahead", now)

    def _yield(self, to: PeerId, reason: str, now: float) -> None:
        self._dismiss(reason, now, better=to)
        self._hold_until = now + self._settings.matchmaking_s
        self._send_progress(to)

    # ------------------------------------------------------------------ in a round

    def on_begin(self, sender: PeerId, message: Begin, now: float) -> None:
        plan, joined, member = message.plan, self._joined, self.member(message.plan.round)
        if member is not None:
            member.replan(plan, now)
        elif joined is None or joined.round != plan.round or not plan.names(self._me, joined.offer):
            if self._standing.history.of_round(plan.round) is None:
                self._send(sender, Decline(round=plan.round))
        elif plan.parent == self._standing.head and len(plan.owners) == self._settings.chunks:
            joined.since = now
            self._member = Member(self._settings, self._me, plan, self._emit, now)
            for chunk, peer in joined.early:
                self._member.input_arrived(chunk, peer)
            for result in joined.early_results:
                self._member.result_arrived(*result)

    def on_done(self, sender: PeerId, message: Done) -> None:
        leading = self.coordinator(message.round)
        if leading is None:
            self._tell_outcome(sender, message.round)
        elif message.version < leading.plan.version:
            leading.repeat(sender)
        else:
            leading.done(sender, message)

    def on_committed(self, sender: PeerId, commit: Commit, now: float) -> None:
        joined = self._joined
        from_coordinator = joined is not None and joined.round == commit.round and joined.coordinator == sender
        if from_coordinator and self._over.get(commit.round, False):
            return
        if commit.parent == self._standing.settled:
            self.commit(commit, now)
        else:
            self._standing.same(sender, commit.head)

    def on_ended(self, sender: PeerId, message: Ended, now: float) -> None:
        joined, inquiry = self._joined, self.inquiry(message.round)
        if joined is None or joined.round != message.round:
            return
        if sender == joined.coordinator or (inquiry is not None and message.aborted):
            self._give_up(message.reason, now, aborted=message.aborted)
            if message.better is not None:
                self._send_progress(message.better)
        elif inquiry is not None:
            inquiry.undecided(sender)

    def on_ask(self, sender: PeerId, message: Ask) -> None:
        joined, head = self._joined, self._standing.head
        if self._standing.history.of_round(message.round) is not None:
            self._tell_outcome(sender, message.round)
        elif head is not None and head.epoch > message.head.epoch:
            self._send(sender, News(head=head, commits=self._standing.history.since(message.head)))
        elif joined is not None and joined.round == message.round and self._inquiry is None:
            joined.askers.add(sender)
            self._send(sender, StillOn(round=message.round))
        else:
            self._remember(message.round, promised=True)
            self._send(sender, Undecided(round=message.round))

    def in_doubt(self, round_id: RoundId) -> bool:
        """Whether this peer waits for the outcome of that round."""
        return self._joined is not None and self._joined.round == round_id

    # ------------------------------------------------------------------ calling a round

    def settle(self, now: float) -> None:
        """What follows from what happened: an inquiry that is over, a group that is complete, a round that is due."""
        if self._inquiry is not None and self._inquiry.over:
            self._give_up("the coordinator is lost, and nobody saw a commit", now, aborted=False)
        if self._gathering is not None:
            self._close(self._gathering, now)
        head = self._standing.settled
        if head is None or self._engaged_with() is not None or not self._roster.enough(head):
            self._due_since = None
        elif now >= self._hold_until:
            self._hold_until = 0.0
            self._due(head, now)

    def _due(self, head: Head, now: float) -> None:
        """A round is due: call it, or see to it that somebody does."""
        candidate = self._roster.candidate(head)
        if candidate == self._me:
            self._due_since = None
            self._called += 1
            parts = f"{self._me} {self._called} ".encode() + self._incarnation
            round_id = hashlib.sha256(parts).digest()[:16]
            self._gathering = Gathering(self._settings, self._me, round_id, head, self._emit, now)
            self._gathering.call([self._me])
        elif self._due_since is None:
            self._due_since = now
        elif now >= self._due_since + self._settings.matchmaking_s:
            self._due_since = now
            self._roster.let_pass(candidate)
            self._send_progress(self._roster.candidate(head))

    def _close(self, gathering: Gathering, now: float) -> None:
        # all of them, wherever they seem to be: who is elsewhere learns of it, and nobody commits beside the others
        gathering.call(self._roster.living())
        if not gathering.over(now):
            return
        plan = gathering.plan()
        if plan is None:
            reason = f"{len(gathering.joined)} peers with {gathering.samples} samples came: too few for a round"
            self._dismiss(reason, now)
            return
        for peer in sorted(gathering.awaited):
            self._send(peer, Ended(round=gathering.round, reason="came too late", aborted=False))
        self._gathering = None
        self._coordinator = Coordinator(self._settings, self._me, plan, self._emit, now)

    # ------------------------------------------------------------------ the end of a round

    def commit(self, commit: Commit, now: float) -> None:
        """It is decided: this peer is one epoch on."""
        member, joined = self.member(commit.round), self._joined
        complete = member is not None and member.digest == commit.digest
        mine = next((one for one in commit.contributions if one.peer == self._me), None)
        if joined is not None and joined.round != commit.round:
            self.leave("the others have committed another round", now)
            joined = None
        self._joined, self._member, self._inquiry, self._coordinator = None, None, None, None
        self._dismiss("the others have committed", now)
        self._failures, self._hold_until = 0, 0.0
        self._standing.advance(commit)
        members = set(member.plan.members) if member is not None else set()
        self._roster.moved(members | {one.peer for one in commit.contributions}, commit.parent, commit.head)
        if mine is not None:
            self._roster.samples = max(0, self._roster.samples - mine.samples)
        self._remember(commit.round, promised=False)
        for asker in sorted(joined.askers) if joined is not None else ():
            self._send(asker, Committed(commit=commit))
        self._emit(Apply(commit=commit, complete=complete, mine=mine))
        if joined is not None and joined.next_call is not None:
            self.on_call(*joined.next_call, now)

    def leave(self, reason: str, now: float, better: PeerId | None = None) -> None:
        """Get out of whatever this peer is in; ``better`` is the coordinator that it goes to instead."""
        if self._coordinator is not None and not self._coordinator.ended:
            self._coordinator.abort(reason)
        self._coordinator = None
        if better != self._me:
            self._dismiss(reason, now, better)
        if self._joined is not None:
            self._send(self._joined.coordinator, Decline(round=self._joined.round, better=better))
            self._give_up(reason, now, aborted=False)

    def _dismiss(self, reason: str, now: float, better: PeerId | None = None) -> None:
        """Give this peer's own attempt at a round up."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            self._emit(Note(what=reason, round=gathering.round))
            gathering.dismiss(reason, better)
            self._roster.begin_anew()
            self._back_off(now)

    def _coordinator_lost(self, now: float) -> None:
        joined, head = self._joined, self._standing.head
        assert joined is not None
        assert head is not None
        if self._member is None:
            self._give_up("the coordinator is lost", now, aborted=False)
            return
        others = self._roster.reachable(set(self._member.plan.members) - {self._me, joined.coordinator})
        self._remember(joined.round, promised=True)
        self._inquiry = Inquiry(self._settings, joined.round, head, others, self._emit, now)

    def _give_up(self, reason: str, now: float, *, aborted: bool) -> None:
        """The round is over for this peer; those who wait for its news of it hear so."""
        joined = self._joined
        assert joined is not None
        self._joined, self._member, self._inquiry = None, None, None
        if self.coordinator(joined.round) is not None:
            self._coordinator = None
        self._remember(joined.round, promised=bool(joined.askers) and not aborted)
        for asker in sorted(joined.askers):
            over = Ended(round=joined.round, reason=reason, aborted=True)
            self._send(asker, over if aborted else Undecided(round=joined.round))
        self._emit(GiveUp(round=joined.round, reason=reason))
        self._back_off(now)

    # ------------------------------------------------------------------ private

    def _engaged_with(self) -> PeerId | None:
        """The coordinator of the round that this peer is in, or calls to."""
        if self._joined is not None:
            return self._joined.coordinator
        return self._me if self._gathering is not None or self._coordinator is not None else None

    def _tell_outcome(self, peer: PeerId, round_id: RoundId) -> None:
        commit = self._standing.history.of_round(round_id)
        if commit is not None:
            self._send(peer, Committed(commit=commit))
        else:
            self._send(peer, Ended(round=round_id, reason="the round is over", aborted=False))

    def _back_off(self, now: float) -> None:
        pause_s = min(self._settings.backoff_s * 2**self._failures, self._settings.max_backoff_s)
        self._failures = min(self._failures + 1, 16)
        self._hold_until = max(self._hold_until, now + pause_s)

    def _remember(self, round_id: RoundId, *, promised: bool) -> None:
        self._over[round_id] = promised or self._over.get(round_id, False)
        self._over.move_to_end(round_id)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _send_progress(self, to: PeerId) -> None:
        assert self._standing.head is not None
        self._send(to, self._roster.progress(self._standing.head))

    def _send(self, to: PeerId, message: Message) -> None:
        self._emit(Send(to=to, message=message))
