"""Where this peer is the coordinator: when a round is due, who is called, and what is told to those who come late."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from lightning_hivemind.engine.native.protocol.actions import Action, Note, Send
from lightning_hivemind.engine.native.protocol.coordinator import Coordinator
from lightning_hivemind.engine.native.protocol.gathering import Gathering
from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId
from lightning_hivemind.engine.native.protocol.messages import Decline, Done, Ended, Join, Message, RoundId
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.protocol.roster import Roster
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.protocol.standing import Standing

#: of a peer of which it is not known, but that it gives nothing
NOTHING = Offer(contribution=None, reduces=False, bandwidth=0.0, trails=True)

#: the pause after a round in vain doubles so often
MOST_IN_VAIN = 3


class Leadership:
    """Idle, then a Gathering until the plan is made, then a Coordinator until the round is decided."""

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
        self._gathering: Gathering | None = None
        self._coordinator: Coordinator | None = None
        #: what each peer that gives nothing has offered last since it does not, and will again; None: it declined
        self._answers: dict[PeerId, Offer | None] = {}
        self._called = 0
        self._failures = 0
        #: calls no round before: it has failed, or others are ahead; and because it stood still
        self._hold_until = self._suspended_until = 0.0
        self._due_since: float | None = None
        #: at which it stood still while it led, last; and how often it has led in vain where it stands, for long
        self._stood_still_at: Head | None = None
        self._in_vain = 0

    # ------------------------------------------------------------------ what one may ask

    @property
    def active(self) -> bool:
        return self._gathering is not None or self._coordinator is not None

    def coordinator(self, round_id: RoundId) -> Coordinator | None:
        """This peer's leadership of that round, if it leads it."""
        found = self._coordinator
        return found if found is not None and found.plan.round == round_id else None

    def gathering(self, round_id: RoundId) -> Gathering | None:
        return self._gathering if self._gathering is not None and self._gathering.round == round_id else None

    @property
    def deadline(self) -> float:
        times = [part.deadline for part in (self._gathering, self._coordinator) if part is not None]
        times += [until for until in (self._hold_until, self._suspended_until) if until]
        if self._due_since is not None:
            times.append(self._due_since + self._settings.matchmaking_s)
        return min(times, default=float("inf"))

    # ------------------------------------------------------------------ what happens

    def tick(self, now: float) -> None:
        for part in (self._gathering, self._coordinator):
            if part is not None:
                part.tick(now)

    def lost(self, peer: PeerId) -> None:
        self._answers.pop(peer, None)
        if self._gathering is not None:
            self._gathering.drop(peer)
        if self._coordinator is not None:
            self._coordinator.lost(peer, "connection lost")

    def suspended(self, now: float) -> None:
        """This process stood still for so long that the others may have gone on without it.

        So it must not decide a round that they may have given up, nor begin one before it has heard of theirs. If that
        happens again before a step is made, it waits until they have let it pass: they may not even have noticed.
        """
        pause_s = self._settings.resend_s
        if self.active:
            if self._stood_still_at == self._standing.head and self._roster.living():
                pause_s = 2 * self._settings.matchmaking_s
            self._stood_still_at = self._standing.head
        if self._coordinator is not None and not self._coordinator.ended:
            self._coordinator.abort("this peer was suspended")
        self.dismiss("this peer was suspended", now)
        self._suspended_until = max(self._suspended_until, now + pause_s)

    def on_progress(self, sender: PeerId) -> None:
        """A peer at this head says that it is there: if a round gathers, it is called (again)."""
        if self._gathering is not None:
            self._gathering.call([sender], again=True)

    def on_join(self, sender: PeerId, message: Join) -> None:
        gathering, leading = self.gathering(message.round), self.coordinator(message.round)
        self._answers[sender] = replace(message.offer, contribution=None, reduces=False, trails=True, last=False)
        if gathering is not None:
            gathering.join(sender, message.offer)
        elif leading is not None:
            leading.repeat(sender)
        else:
            self._standing.tell_outcome(sender, message.round)

    def on_decline(self, sender: PeerId, message: Decline, now: float) -> None:
        gathering, leading = self.gathering(message.round), self.coordinator(message.round)
        self._answers[sender] = None
        if gathering is None and (leading is None or leading.ended or sender not in leading.plan.members):
            return
        to, reason = self._better(sender, message, now)
        if gathering is not None:
            gathering.drop(sender)
            if to is not None:
                self._yield(to, reason, now)
        elif leading is not None and to is not None:
            leading.abort(reason)
        elif leading is not None:
            leading.lost(sender, "it has left the round")

    def _better(self, sender: PeerId, message: Decline, now: float) -> tuple[PeerId | None, str]:
        """Who has a round at this head, or is ahead of it, in words, too: one beside it would fork the lineage."""
        mine, theirs = self._standing.head, message.head
        if theirs is None or mine is None or theirs == mine:
            better = message.better if message.better != self._me else None
            return better, "another round is under way"
        # (where nobody can get: whoever is there will give it up, too)
        ahead = theirs.outweighs(mine) and not self._standing.is_given_up(theirs, sender, now)
        return sender if ahead else None, "others are ahead"

    def on_done(self, sender: PeerId, message: Done, now: float) -> None:
        leading = self.coordinator(message.round)
        if leading is None:
            self._standing.tell_outcome(sender, message.round)
        elif message.version < leading.plan.version:
            leading.repeat(sender)
        else:
            leading.done(sender, message, now)

    # ------------------------------------------------------------------ calling a round

    def settle(self, now: float, *, engaged: bool) -> None:
        """Close a group that is complete; call a round that is due, unless this peer is ``engaged`` in another one."""
        if self._answers:
            self._answers = {peer: one for peer, one in self._answers.items() if self._roster.gives_nothing(peer)}
        if self._gathering is not None:
            self._close(self._gathering, now)
        if now >= self._hold_until:
            self._hold_until = 0.0
        if now >= self._suspended_until:
            self._suspended_until = 0.0
        head = self._standing.settled
        if head is None or engaged or self.active or not self._roster.enough(head):
            self._due_since = None
        elif not self._hold_until and not self._suspended_until:
            self._due(head, now)

    def _due(self, head: Head, now: float) -> None:
        """A round is due: call it, or see to it that somebody does."""
        candidate = self._roster.candidate(head)
        if candidate == self._me:
            self._due_since = None
            self._called += 1
            parts = f"{self._me} {self._called} ".encode() + self._incarnation
            round_id = hashlib.sha256(parts).digest()[:16]
            roster = self._roster
            self._gathering = Gathering(
                self._settings,
                self._me,
                round_id,
                head,
                roster.cuts,
                gives_nothing=roster.gives_nothing,
                expected=lambda peer: self._answers.get(peer, NOTHING) if roster.stands(peer, head) else None,
                emit=self._emit,
                now=now,
            )
            self._gathering.call([self._me])
        elif self._due_since is None:
            self._due_since = now
        elif now >= self._due_since + self._settings.matchmaking_s:
            self._due_since = now
            self._roster.let_pass(candidate)
            if (following := self._roster.candidate(head)) != self._me:
                self._send(following, self._roster.progress(head))

    def _close(self, gathering: Gathering, now: float) -> None:
        # all of them, wherever they seem to be: who is elsewhere learns of it, and nobody commits beside the others
        gathering.call(self._roster.living())
        if not gathering.over(now):
            return
        plan = gathering.plan()
        if plan is None:
            reason = f"{len(gathering.joined)} peers with {gathering.samples} samples came: too few for a round"
            self.dismiss(reason, now)
            if gathering.samples < self._settings.target_samples:
                self._roster.came(gathering.brought)
            return
        for peer in sorted(gathering.awaited.difference(plan.members)):
            self._send(peer, Ended(round=gathering.round, reason="came too late", aborted=False))
        self._gathering = None
        self._coordinator = Coordinator(self._settings, self._me, plan, self._emit, now)

    def _yield(self, to: PeerId, reason: str, now: float) -> None:
        assert self._standing.head is not None
        self.dismiss(reason, now, better=to)
        self._hold_until = now + self._settings.matchmaking_s
        self._send(to, self._roster.progress(self._standing.head))

    # ------------------------------------------------------------------ the end of it

    def dismiss(self, reason: str, now: float, better: PeerId | None = None) -> None:
        """Give this peer's own attempt at a round up, before it has begun."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            self._emit(Note(what=reason, round=gathering.round))
            gathering.dismiss(reason, better)
            self._roster.begin_anew()
            self.back_off(now)

    def resign(self, reason: str) -> None:
        """Abort the round that this peer leads, if it is not decided."""
        if self._coordinator is not None and not self._coordinator.ended:
            self._coordinator.abort(reason)
        self._coordinator = None

    def forget(self, round_id: RoundId) -> None:
        """That round is over for this peer as a member, too."""
        if self.coordinator(round_id) is not None:
            self._coordinator = None

    def committed(self, now: float) -> None:
        """A step is decided: the next round may be called at once."""
        self._coordinator = None
        self.dismiss("the others have committed", now)
        self._failures, self._in_vain, self._hold_until, self._suspended_until = 0, 0, 0.0, 0.0

    def ended(self, coordinator: PeerId, after_s: float, now: float) -> None:
        """A round came to nothing. If that took long, another one calls the next, or this peer does so later.

        The later, the more often it was this peer's: what it lacks may be nobody else's trouble.
        """
        if after_s < self._settings.matchmaking_s:
            return
        if coordinator == self._me:
            self._hold_until = now + 2**self._in_vain * self._settings.matchmaking_s
            self._in_vain = min(self._in_vain + 1, MOST_IN_VAIN)
        elif not self._roster.is_fitter(coordinator):
            self._roster.let_pass(coordinator)

    def elsewhere(self) -> None:
        """This peer stands somewhere else now: what it held back for was where it stood."""
        self._failures, self._in_vain, self._hold_until, self._due_since = 0, 0, 0.0, None

    def back_off(self, now: float) -> None:
        """After a failure: a pause that doubles with each."""
        pause_s = min(self._settings.backoff_s * 2**self._failures, self._settings.max_backoff_s)
        self._failures = min(self._failures + 1, 16)
        self._hold_until = max(self._hold_until, now + pause_s)

    def _send(self, to: PeerId, message: Message) -> None:
        self._emit(Send(to=to, message=message))
