"""Rounds that were committed before this peer had all of their results: those still come, from who reduced them.

So the others need not wait for a slow line, or for a peer that was busy at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.actions import Action, Arrived
from lightning_hivemind.engine.native.protocol.lineage import Commit, PeerId
from lightning_hivemind.engine.native.protocol.member import Member
from lightning_hivemind.engine.native.protocol.messages import RoundId
from lightning_hivemind.engine.native.protocol.settings import Settings

#: rounds that a peer may be behind with results: who is further behind comes to no other round
MOST = 2
#: after being late, a peer says in so many rounds that it need not be waited for
REMEMBERED = 16


@dataclass(slots=True)
class _Late:
    commit: Commit
    member: Member
    since: float
    ask_at: float


class Trailing:
    """See the module. ``emit`` takes what is to be done."""

    def __init__(self, settings: Settings, emit: Callable[[Action], None]) -> None:
        self._settings, self._emit = settings, emit
        self._rounds: dict[RoundId, _Late] = {}
        self._left = 0

    @property
    def expected(self) -> bool:
        """Whether this peer was late with one of the last rounds, and will be so again."""
        return self._left > 0

    @property
    def full(self) -> bool:
        return len(self._rounds) >= MOST

    def committed(self, commit: Commit, member: Member | None, now: float, *, late: bool) -> bool:
        """A round of this peer (as this ``member``) is decided. Whether results of it are still to come.

        ``late``: others have waited for it.
        """
        complete = member is not None and member.digest == commit.digest
        self._left = REMEMBERED if late else max(0, self._left - 1)
        # (what is lacking may be of a plan that never got here)
        if member is not None and member.owed() and member.plan.contributions == commit.contributions:
            self._rounds[commit.round] = _Late(commit, member, now, now + self._settings.resend_s)
            return True
        if not complete:
            self.clear()
        return False

    def heard(self, round_id: RoundId, peer: PeerId, now: float) -> None:
        """A part of a chunk of ``peer`` has arrived; what it sends of the rounds after this one waits behind it."""
        for late in tuple(self._rounds.values()) if round_id in self._rounds else ():  # (in connections' threads)
            late.member.heard(peer, now)

    def result_arrived(
        self, round_id: RoundId, chunk: int, version: int, digest: bytes, owner: PeerId, now: float
    ) -> None:
        late = self._rounds.get(round_id)
        if late is None:
            return
        self.heard(round_id, owner, now)
        if late.member.take(chunk, version, digest, owner) and (found := late.member.digest) is not None:
            if found == late.commit.digest:
                del self._rounds[round_id]
                if now - late.since > self._settings.late_s:
                    self._left = REMEMBERED
                self._emit(Arrived(round=round_id, complete=True))
            else:
                self.clear()

    def gone(self, round_id: RoundId, peer: PeerId, now: float) -> None:
        """``peer`` has sent all that it had of that round, and keeps nothing: so it answers who asks.

        If something has come since it was asked, that has overtaken what comes over another of its connections.
        """
        late = self._rounds.get(round_id)
        if late is None or peer not in late.member.owed():
            return
        if now - late.member.heard_at(peer) >= self._settings.resend_s:
            self.clear()

    def lost(self, peer: PeerId) -> None:
        if any(peer in late.member.owed() for late in self._rounds.values()):
            self.clear()

    def tick(self, now: float) -> None:
        """Ask again for what is owed, and give up what does not come."""
        for late in self._rounds.values():
            owed = late.member.owed()
            silent_s = {peer: now - max(late.since, late.member.heard_at(peer)) for peer in owed}
            silent = max(silent_s.values(), default=0.0) >= self._settings.stall_s
            if silent or now >= late.since + self._settings.round_s:
                self.clear()
                return
            if now >= late.ask_at:
                late.ask_at = now + self._settings.resend_s
                for peer in (one for one, quiet_s in silent_s.items() if quiet_s >= self._settings.resend_s):
                    late.member.ask(peer, inputs=False, chunks=owed[peer][1])

    @property
    def deadline(self) -> float:
        return min((late.ask_at for late in self._rounds.values()), default=float("inf"))

    def clear(self) -> None:
        """This peer takes a state: of no use without one of these steps are the others."""
        rounds, self._rounds = self._rounds, {}
        self._left = REMEMBERED if rounds else self._left
        for round_id in rounds:
            self._emit(Arrived(round=round_id, complete=False))
