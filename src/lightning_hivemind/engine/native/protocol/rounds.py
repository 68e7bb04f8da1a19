"""This peer's rounds: called and joined, begun, decided.

    idle -- Called, join() --> joined -- Begin --> in a round -- Committed --> idle, one epoch on
      ^                          |                     |
      +------ Ended, lost -------+------ Ended, or nobody saw a commit (Inquiry)

Where this peer is the coordinator, ``leadership`` has the other side of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from lightning_hivemind.engine.native.protocol.actions import Action, Apply, Called, GiveUp, Send, TellGone
from lightning_hivemind.engine.native.protocol.inquiry import Inquiry
from lightning_hivemind.engine.native.protocol.joined import Joined
from lightning_hivemind.engine.native.protocol.leadership import Leadership
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId, can_be_summed
from lightning_hivemind.engine.native.protocol.member import Member
from lightning_hivemind.engine.native.protocol.messages import (
    Ask,
    Begin,
    Call,
    Committed,
    Current,
    Decline,
    Ended,
    Join,
    Message,
    Missing,
    RoundId,
    StillOn,
    Undecided,
)
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.protocol.roster import Roster
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.protocol.standing import Standing
from lightning_hivemind.engine.native.protocol.trailing import Trailing

#: ended rounds that are remembered, so that a late message does not revive one
REMEMBERED = 64


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
        self._settings, self._me, self._emit = settings, me, emit
        self._roster, self._standing = roster, standing
        self.leadership = Leadership(settings, me, incarnation, roster, standing, emit)
        self.trailing = Trailing(settings, emit)
        self._joined: Joined | None = None
        self._member: Member | None = None
        self._inquiry: Inquiry | None = None
        #: rounds that this peer does not enter again; true: it has promised to take no commit from the coordinator
        self._over: OrderedDict[RoundId, bool] = OrderedDict()
        #: when this process went on that had stood still
        self._woke = float("-inf")

    # ------------------------------------------------------------------ what one may ask

    def member(self, round_id: RoundId) -> Member | None:
        """This peer's part in that round, if it is in it."""
        member = self._member  # (a connection's thread may ask)
        return member if member is not None and member.plan.round == round_id else None

    def inquiry(self, round_id: RoundId) -> Inquiry | None:
        return self._inquiry if self._inquiry is not None and self._inquiry.round == round_id else None

    @property
    def deadline(self) -> float:
        times = [part.deadline for part in (self._member, self._inquiry) if part is not None]
        if self._joined is not None and self._inquiry is None:  # else :meth:`tick` would be due at once, for ever
            times.append(self._joined.resend_at)
        return min([self.leadership.deadline, self.trailing.deadline, *times])

    # ------------------------------------------------------------------ what the driver says

    def join(self, round_id: RoundId, offer: Offer) -> None:
        joined = self._joined
        if joined is None or joined.round != round_id or joined.offer is not None:
            self._emit(GiveUp(round=round_id, reason="the round is over"))
        else:
            joined.offer = offer = replace(offer, cut=self._roster.out_of_reach, trails=self._roster.slow)
            self._send(joined.coordinator, Join(round=round_id, offer=offer))

    def heard(self, round_id: RoundId, peer: PeerId, now: float) -> None:
        if (member := self.member(round_id)) is not None:
            member.heard(peer, now)
        self.trailing.heard(round_id, peer, now)

    def input_arrived(self, round_id: RoundId, chunk: int, peer: PeerId, now: float) -> None:
        member = self.member(round_id)
        if member is not None:
            member.heard(peer, now)
            member.input_arrived(chunk, peer)
        elif self.in_doubt(round_id) and 0 <= chunk < self._settings.chunks:
            assert self._joined is not None
            self._joined.early.add((chunk, peer))

    def result_arrived(
        self, round_id: RoundId, chunk: int, version: int, digest: bytes, owner: PeerId, now: float
    ) -> None:
        member = self.member(round_id)
        if member is not None:
            member.heard(owner, now)
            member.result_arrived(chunk, version, digest, owner)
        elif self.in_doubt(round_id) and 0 <= chunk < self._settings.chunks:
            assert self._joined is not None
            self._joined.early_results[chunk] = (version, digest, owner)
        else:
            self.trailing.result_arrived(round_id, chunk, version, digest, owner, now)

    def lost(self, peer: PeerId, now: float) -> None:
        self.leadership.lost(peer)
        self.trailing.lost(peer)
        if self._inquiry is not None:
            self._inquiry.lost(peer)
        elif self._joined is not None and self._joined.coordinator == peer:
            self._coordinator_lost(now)

    def tick(self, now: float) -> None:
        self.leadership.tick(now)
        self.trailing.tick(now)
        for part in (self._member, self._inquiry):
            if part is not None:
                part.tick(now)
        joined = self._joined
        if joined is None or self._inquiry is not None:
            return
        # a little longer than the coordinator itself takes
        patience_s = self._settings.round_s if self._member is not None else self._settings.matchmaking_s
        patience_s = 1.25 * patience_s + 2 * self._settings.resend_s
        if now >= joined.since + patience_s:
            if self._member is None and (waited_s := self._awake_s(joined.since, now)) >= patience_s:
                self._roster.shun(joined.coordinator, waited_s, now)
            self._coordinator_lost(now)
        elif now >= joined.resend_at:
            joined.resend_at = now + self._settings.resend_s
            if self._member is None and joined.offer is not None:
                self._send(joined.coordinator, Join(round=joined.round, offer=joined.offer))
            elif joined.coordinator != self._me and now >= joined.heard_at + 4 * self._settings.resend_s:
                # it would have said twice that the round goes on: it may have started again, and know of none
                joined.heard_at = now
                self._ask(joined)

    def suspended(self, now: float) -> None:
        """This process stood still until now."""
        self._woke = now
        self.leadership.suspended(now)

    # ------------------------------------------------------------------ coming together

    def on_call(self, sender: PeerId, message: Call, now: float) -> None:
        engaged, head, joined = self._engaged_with(), self._standing.settled, self._joined
        if joined is not None and head is not None and message.head.epoch == head.epoch + 1:
            joined.next_call = (sender, message)  # of the round after this one: the commit is on its way
            self._standing.same(sender, message.head)
        elif head is None or message.round in self._over or not self._standing.same(sender, message.head):
            self._send(sender, Decline(round=message.round, head=self._standing.head))
        elif self.trailing.full or self._roster.shuns(sender, now):
            self._send(sender, Decline(round=message.round))
        elif joined is not None and joined.round == message.round:
            if joined.offer is not None and self._member is None:
                self._send(sender, Join(round=message.round, offer=joined.offer))
        elif joined is not None and self._member is not None and engaged == sender:
            # of an attempt before this round, or after it: the coordinator knows whether this one is over
            joined.next_call = (sender, message)
            if joined.offer is not None:
                self._send(sender, Join(round=joined.round, offer=joined.offer))
        elif engaged not in (None, sender) and (
            self._member is not None or not self._roster.outranks(sender, engaged, head.epoch)
        ):
            self._send(sender, Decline(round=message.round, better=engaged))
        else:
            since = joined.since if joined is not None and engaged == sender else now
            self.leave("a better coordinator calls", now, better=sender)
            resend_at = now + self._settings.resend_s
            self._joined = Joined(
                round=message.round, coordinator=sender, since=since, heard_at=now, resend_at=resend_at
            )
            self._emit(Called(round=message.round, coordinator=sender))

    # ------------------------------------------------------------------ in a round

    def on_begin(self, sender: PeerId, message: Begin, now: float) -> None:
        plan, joined, member = message.plan, self._joined, self.member(message.plan.round)
        if not plan.fits(self._settings.chunks, sender):
            return
        if member is not None:
            if joined is not None and sender == joined.coordinator:
                joined.heard_at = now
                member.replan(plan, now)
        elif (joined := self._joined_to(sender, plan.round)) is None or not plan.names(self._me, joined.offer):
            self._decline(sender, plan.round)
        elif plan.parent == self._standing.head:
            joined.since = joined.heard_at = now
            self._member = Member(self._settings, self._me, plan, self._emit, now)
            for chunk, peer in sorted(joined.early):
                self._member.input_arrived(chunk, peer)
            for chunk, result in joined.early_results.items():
                self._member.result_arrived(chunk, *result)

    def on_current(self, sender: PeerId, message: Current, now: float) -> None:
        joined, member = self._joined, self.member(message.round)
        if joined is None or joined.round != message.round or joined.offer is None:
            self._decline(sender, message.round)
        elif sender == joined.coordinator:
            joined.heard_at = now
            if member is not None and member.plan.version < message.version:
                self._send(sender, Join(round=joined.round, offer=joined.offer))  # it answers with the plan

    def on_missing(self, sender: PeerId, message: Missing, now: float) -> None:
        if (member := self.member(message.round)) is not None:
            member.asked_again(message, sender, now)
        elif self._standing.history.of_round(message.round) is not None:
            gone = Ended(round=message.round, reason="its results are not kept", aborted=False)
            self._emit(TellGone(to=sender, ended=gone))

    def on_committed(self, sender: PeerId, message: Committed, now: float) -> None:
        if not can_be_summed((commit := message.commit).contributions):
            return  # nobody decides that
        promised, inquiry, joined = self._over.get(commit.round, False), self.inquiry(commit.round), self._joined
        if promised and (inquiry is None or (joined is not None and joined.coordinator == sender)):
            return  # this peer said that it would take none; if others have it, their news leads there
        if commit.parent == self._standing.settled:
            self.commit(commit, now, late=message.late)
        else:
            self._standing.same(sender, commit.head)

    def on_ended(self, sender: PeerId, message: Ended, now: float) -> None:
        joined, inquiry = self._joined, self.inquiry(message.round)
        self.trailing.gone(message.round, sender, now)
        if joined is None or joined.round != message.round:
            return
        if sender == joined.coordinator or (inquiry is not None and message.aborted):
            if message.aborted:
                self.leadership.ended(joined.coordinator, self._awake_s(joined.since, now), now)
            self._give_up(message.reason, now, aborted=message.aborted)
            if message.better is not None:
                assert self._standing.head is not None
                self._send(message.better, self._roster.progress(self._standing.head))
        elif inquiry is not None:
            inquiry.undecided(sender)

    def on_ask(self, sender: PeerId, message: Ask) -> None:
        joined, head, leading = self._joined, self._standing.head, self.leadership.coordinator(message.round)
        if self._standing.history.of_round(message.round) is not None:
            self._standing.tell_outcome(sender, message.round)
        elif leading is not None and sender not in leading.plan.members:
            leading.repeat(sender)  # it has not heard that it was taken out
        elif head is not None and head.outweighs(message.head):
            self._standing.same(sender, message.head)  # tells it the news
        elif joined is not None and joined.round == message.round and self._inquiry is None:
            joined.askers.add(sender)
            self._send(sender, StillOn(round=message.round))
        else:
            self._remember(message.round, promised=True)
            self._send(sender, Undecided(round=message.round))

    def on_undecided(self, sender: PeerId, message: Undecided, now: float) -> None:
        if (inquiry := self.inquiry(message.round)) is not None:
            inquiry.undecided(sender)
        elif self._joined_to(sender, message.round) is not None:
            self._coordinator_lost(now)  # it has started again

    def on_still_on(self, sender: PeerId, message: StillOn, now: float) -> None:
        if (inquiry := self.inquiry(message.round)) is not None:
            inquiry.still_on(sender)
        elif (joined := self._joined_to(sender, message.round)) is not None:
            joined.heard_at = now

    def in_doubt(self, round_id: RoundId) -> bool:
        """Whether this peer waits for the outcome of that round."""
        return self._joined is not None and self._joined.round == round_id

    # ------------------------------------------------------------------ calling a round

    def settle(self, now: float) -> None:
        """What follows from what happened."""
        if self._inquiry is not None and self._inquiry.over:
            self._give_up("the coordinator is lost, and nobody saw a commit", now, aborted=False)
        self.leadership.settle(now, engaged=self._joined is not None or self.trailing.full)

    # ------------------------------------------------------------------ the end of a round

    def commit(self, commit: Commit, now: float, *, late: bool = False) -> None:
        """It is decided: this peer is one epoch on."""
        member, joined = self.member(commit.round), self._joined
        complete = member is not None and member.digest == commit.digest
        coming = self.trailing.committed(commit, member, now, late=late)
        self._roster.receives_slowly = self.trailing.expected
        mine = next((one for one in commit.contributions if one.peer == self._me), None)
        if joined is not None and joined.round != commit.round:
            self.leave("the others have committed another round", now, head=commit.head)
            joined = None
        led = self.leadership.coordinator(commit.round) is not None
        self._joined, self._member, self._inquiry = None, None, None
        self.leadership.committed(now)
        self._standing.advance(commit)
        gave = {one.peer for one in commit.contributions}
        members = gave.union(member.plan.members if member is not None else ())
        silent = set(member.plan.trailing if member is not None else ()) - gave
        for peer in self._roster.living() if led else ():
            if peer not in members and self._roster.stands(peer, commit.parent):
                # else it hears of this step when it is called for the next one, too late to be in that
                self._send(peer, Committed(commit=commit))
        self._roster.moved(members, commit.parent, commit.head, now, silent=silent)
        if mine is not None:
            self._roster.samples = max(0, self._roster.samples - mine.samples)
        self._remember(commit.round, promised=False)
        for asker in sorted(joined.askers) if joined is not None else ():
            self._send(asker, Committed(commit=commit))
        self._emit(Apply(commit=commit, complete=complete, coming=coming, mine=mine))
        if joined is not None and joined.next_call is not None:
            self.on_call(*joined.next_call, now)

    def leave(self, reason: str, now: float, better: PeerId | None = None, head: Head | None = None) -> None:
        """Get out of whatever this peer is in; it goes to ``better``, another coordinator, or to ``head`` instead."""
        self.leadership.resign(reason)
        if better != self._me:
            self.leadership.dismiss(reason, now, better)
        if self._joined is not None:
            self._send(self._joined.coordinator, Decline(round=self._joined.round, head=head, better=better))
            self._give_up(reason, now, aborted=False)

    def _coordinator_lost(self, now: float) -> None:
        joined, head = self._joined, self._standing.head
        assert joined is not None
        assert head is not None
        self.leadership.ended(joined.coordinator, self._awake_s(joined.since, now), now)
        if self._member is None:
            self._give_up("the coordinator is lost", now, aborted=False)
            return
        members = set(self._member.plan.members) - {self._me, joined.coordinator}
        others = filter(self._roster.reaches, members)
        self._remember(joined.round, promised=True)
        self._inquiry = Inquiry(self._settings, joined.round, head, others, self._emit, now)

    def _give_up(self, reason: str, now: float, *, aborted: bool) -> None:
        """The round is over for this peer; those who wait for its news of it hear so."""
        joined = self._joined
        assert joined is not None
        self._joined, self._member, self._inquiry = None, None, None
        self.leadership.forget(joined.round)
        self._remember(joined.round, promised=bool(joined.askers) and not aborted)
        for asker in sorted(joined.askers):
            over = Ended(round=joined.round, reason=reason, aborted=True)
            self._send(asker, over if aborted else Undecided(round=joined.round))
        self._emit(GiveUp(round=joined.round, reason=reason))
        self.leadership.back_off(now)
        if joined.next_call is not None:
            self.on_call(*joined.next_call, now)

    # ------------------------------------------------------------------ private

    def _joined_to(self, coordinator: PeerId, round_id: RoundId) -> Joined | None:
        """What this peer has joined, if it is that round of that coordinator."""
        joined = self._joined
        return joined if joined is not None and (joined.round, joined.coordinator) == (round_id, coordinator) else None

    def _engaged_with(self) -> PeerId | None:
        """The coordinator of the round that this peer is in, or calls to."""
        if self._joined is not None:
            return self._joined.coordinator
        return self._me if self.leadership.active else None

    def _awake_s(self, since: float, now: float) -> float:
        """For how long it has been so while this process did not stand still: what others did meanwhile is no fault."""
        return now - max(since, self._woke)

    def _decline(self, coordinator: PeerId, round_id: RoundId) -> None:
        """This peer is not in that round, unless that is decided: it may be in another one, or have been."""
        if self._standing.history.of_round(round_id) is None:
            self._send(coordinator, Decline(round=round_id, head=self._standing.head, better=self._engaged_with()))

    def _remember(self, round_id: RoundId, *, promised: bool) -> None:
        self._over[round_id] = promised or self._over.get(round_id, False)
        self._over.move_to_end(round_id)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _ask(self, joined: Joined) -> None:
        assert self._standing.head is not None
        self._send(joined.coordinator, Ask(round=joined.round, head=self._standing.head))

    def _send(self, to: PeerId, message: Message) -> None:
        self._emit(Send(to=to, message=message))
