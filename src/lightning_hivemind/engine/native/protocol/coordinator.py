"""The coordinator's second half: keep the plan true while peers are lost, and decide how the round ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lightning_hivemind.engine.native.protocol.actions import Action, Note, Send
from lightning_hivemind.engine.native.protocol.lineage import Commit, PeerId
from lightning_hivemind.engine.native.protocol.messages import Accuse, Begin, Committed, Current, Done, Ended
from lightning_hivemind.engine.native.protocol.plan import Plan
from lightning_hivemind.engine.native.protocol.settings import Settings


class Coordinator:
    """From the plan to the decision. Only this object, at this peer, ever decides that the round is committed."""

    def __init__(self, settings: Settings, me: PeerId, plan: Plan, emit: Callable[[Action], None], now: float) -> None:
        self._settings, self._me, self._emit = settings, me, emit
        self.plan = plan
        #: of this version: who has all results, and their digest
        self._done: dict[PeerId, bytes] = {}
        #: of this version: who says what of whom
        self._accusations: dict[tuple[PeerId, PeerId], str] = {}
        self._judge_at = 0.0
        self._everybody = plan.members
        #: who gets the results, and is not waited for
        self._trailing = set(plan.trailing)
        #: when half of those that are waited for were done, and the others may be too, without being late
        self._in_time_until = float("inf")
        #: when those that are not done yet will be among the trailing
        self._late_at = float("inf")
        self._in_time: set[PeerId] = set()
        self._began = now
        self._deadline, self._resend_at = now + settings.round_s, now + 2 * settings.resend_s
        self.commit: Commit | None = None
        self.ended = False
        self._publish()

    # ------------------------------------------------------------------ what happens

    def done(self, peer: PeerId, message: Done, now: float) -> None:
        """It has all results: so they all exist. Half of the members wait for the others as long again as they took.

        That all results are at so many is enough: the others, this one perhaps among them, get theirs from who reduced
        them, after the commit.
        """
        if self.ended or peer not in self.plan.members or message.version != self.plan.version:
            return
        self._done[peer] = message.digest
        if now <= self._in_time_until:
            self._in_time.add(peer)
        self._decide()
        awaited = set(self.plan.members) - self._trailing
        enough = not self.plan.last and 2 * len(awaited & set(self._done)) >= len(awaited)
        if enough and self._late_at == float("inf"):
            self._in_time_until = now + max(self._settings.late_s, now - self._began)
            self._late_at = now + max(self._settings.patience_s, now - self._began)

    def lost(self, peer: PeerId, reason: str) -> None:
        """It is dead, unreachable, or has left."""
        if peer in self.plan.members and not self.ended:
            self._take_out(lost=frozenset({peer}), refused=frozenset(), reason=reason)

    def accused(self, accuser: PeerId, message: Accuse, now: float) -> None:
        """Somebody does not deliver. Who is to blame is judged a moment later, when others have said what they see."""
        if self.ended or accuser not in self.plan.members:
            return
        peer = message.peer
        if message.refused:
            if peer in self.plan.contributors:
                self._take_out(lost=frozenset(), refused=frozenset({peer}), reason=message.reason)
        elif message.version == self.plan.version and peer in self.plan.members and peer != accuser:
            if not self._accusations:
                self._judge_at = now + self._settings.resend_s
            self._accusations[accuser, peer] = message.reason

    def _judge(self) -> None:
        """Take out who is in most of the accusations, on either side: the link at fault is one of its own.

        Between equals: not this peer, which all others reach; not one that has all results; not the accuser.
        """
        sides: Counter[PeerId] = Counter(peer for pair in self._accusations for peer in pair)
        accused = {peer for _, peer in self._accusations}
        guilty = max(sides, key=lambda one: (one != self._me, sides[one], one not in self._done, one in accused, one))
        reasons = sorted(f"{reason} (says {accuser})" for (accuser, _), reason in self._accusations.items())
        self._take_out(lost=frozenset({guilty}), refused=frozenset(), reason=reasons[0])

    def repeat(self, peer: PeerId) -> None:
        """``peer`` seems not to know where the round is."""
        if self.commit is not None:
            self._emit(Send(to=peer, message=Committed(commit=self.commit)))
        elif not self.ended and peer in self.plan.members:
            self._emit(Send(to=peer, message=Begin(plan=self.plan)))
        else:
            self._emit(
                Send(
                    to=peer, message=Ended(round=self.plan.round, reason="it went on without this peer", aborted=False)
                )
            )

    def tick(self, now: float) -> None:
        if self.ended:
            return
        if self._accusations and now >= self._judge_at:
            self._judge()
        elif now >= self._late_at:
            self._trailing.update(peer for peer in self.plan.members if peer not in self._done)
            self._decide()
        elif now >= self._deadline:
            self._out_of_time()
        elif now >= self._resend_at:
            self._resend_at = now + 2 * self._settings.resend_s
            for peer in self.plan.members:
                if peer not in self._done:  # it may have an older plan, or have started again since
                    self._emit(Send(to=peer, message=Current(round=self.plan.round, version=self.plan.version)))

    @property
    def deadline(self) -> float:
        times = (self._deadline, self._resend_at, self._late_at)
        return min(*times, self._judge_at) if self._accusations else min(times)

    # ------------------------------------------------------------------ what is decided

    def _out_of_time(self) -> None:
        """Go on without those that are not done; all results are there, if one peer has them."""
        late = frozenset(self.plan.members) - self._trailing - set(self._done)
        if not self._done or self._me in late:
            self.abort(f"not finished in {self._settings.round_s:.1f} s (allreduce_timeout or averaging_timeout)")
        else:
            self._decide(late)

    def _take_out(self, *, lost: frozenset[PeerId], refused: frozenset[PeerId], reason: str) -> None:
        if self._me in lost:
            self.abort(reason)
            return
        if self._agreed(lost):
            # whoever was lost has given everything, and all the others have the results
            self._decide(lost)
            return
        for peer in sorted(lost | refused):
            self._emit(Note(what=reason, peer=peer, round=self.plan.round))
        self.plan = self.plan.without(lost, refused)
        self._done.clear()
        self._in_time_until = self._late_at = float("inf")
        self._in_time.clear()
        self._accusations.clear()
        for peer in sorted(lost):
            self._emit(Send(to=peer, message=Ended(round=self.plan.round, reason=reason, aborted=False)))
        if not self.plan.contributions:
            self.abort("nobody is left who contributes")
        elif len(self.plan.members) < self._settings.min_group_size:
            self.abort(f"only {len(self.plan.members)} peers are left (min_group_size)")
        else:
            self._publish()

    def _agreed(self, without: frozenset[PeerId]) -> bool:
        return bool(self._done) and set(self._done) >= set(self.plan.members) - self._trailing - without

    def _decide(self, lost: frozenset[PeerId] = frozenset()) -> None:
        if self.ended or not self._agreed(lost):
            return
        digests = set(self._done.values())
        if len(digests) != 1:
            self.abort("the members did not receive the same bytes")
            return
        self.ended = True
        self.commit = Commit(
            round=self.plan.round,
            parent=self.plan.parent,
            contributions=self.plan.contributions,
            digest=digests.pop(),
            stop=self.plan.stop,
        )
        late = set(self.plan.members) - self._in_time - set(self.plan.trailing)
        for peer in self._everybody:  # also those that were taken out: they learn what they have missed
            self._emit(Send(to=peer, message=Committed(commit=self.commit, late=peer in late)))

    def abort(self, reason: str) -> None:
        """End the round; nothing of it is used anywhere."""
        self.ended = True
        for peer in self._everybody:
            self._emit(Send(to=peer, message=Ended(round=self.plan.round, reason=reason, aborted=True)))

    def _publish(self) -> None:
        for peer in self.plan.members:
            self._emit(Send(to=peer, message=Begin(plan=self.plan)))
