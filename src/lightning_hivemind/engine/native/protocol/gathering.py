"""The coordinator's first half: call peers to a round, and close the group as soon as all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_hivemind.engine.native.protocol.actions import Action, Send
from lightning_hivemind.engine.native.protocol.lineage import MOST_SAMPLES, Head, PeerId
from lightning_hivemind.engine.native.protocol.messages import Call, Ended, RoundId
from lightning_hivemind.engine.native.protocol.plan import Offer, Plan, make_plan, reducers_of, slow_lines
from lightning_hivemind.engine.native.protocol.settings import Settings


class Gathering:
    """From the first call until the plan is made, or the attempt is given up."""

    def __init__(
        self,
        settings: Settings,
        me: PeerId,
        round_id: RoundId,
        head: Head,
        cuts: int,
        may_miss: Callable[[PeerId], bool],
        emit: Callable[[Action], None],
        now: float,
    ) -> None:
        self._settings, self._me, self._cuts, self._emit = settings, me, cuts, emit
        self._may_miss = may_miss
        #: when those that may miss it, if nobody else is missing, are not waited for any more
        self._late_at = float("inf")
        self.round, self.head = round_id, head
        #: who was called and has not answered yet
        self.awaited: set[PeerId] = set()
        self.joined: dict[PeerId, Offer] = {}
        self._declined: set[PeerId] = set()
        self._started, self._resend_at = now, now + settings.resend_s

    def call(self, peers: Iterable[PeerId], *, again: bool = False) -> None:
        """Ask these, too, unless they have been asked; ``again``: also those that did not want to come."""
        for peer in peers:
            if peer not in self.awaited and peer not in self.joined and (again or peer not in self._declined):
                self.awaited.add(peer)
                self._call(peer)

    def join(self, peer: PeerId, offer: Offer) -> None:
        """It comes. (A repeated answer changes nothing: what it offered first is what it sends.)"""
        mine = offer.contribution
        if mine is not None and (mine.peer != peer or mine.samples > MOST_SAMPLES):
            self.drop(peer)  # in another's name, or nonsense
            return
        self.awaited.discard(peer)
        self._declined.discard(peer)
        self.joined.setdefault(peer, offer)

    def drop(self, peer: PeerId) -> None:
        """It does not come, or is lost."""
        self.awaited.discard(peer)
        self.joined.pop(peer, None)
        self._declined.add(peer)

    def tick(self, now: float) -> None:
        if now >= self._resend_at:
            self._resend_at = now + self._settings.resend_s
            for peer in sorted(self.awaited):
                self._call(peer)

    def over(self, now: float) -> bool:
        """Nobody is awaited any more, or not any longer: who has nothing to give, as long again as the others took."""
        if not self.awaited:
            return True
        if not self._enough or not all(map(self._may_miss, self.awaited)):
            self._late_at = float("inf")
        elif self._late_at == float("inf"):
            self._late_at = now + max(self._settings.late_s, now - self._started)
        return now >= min(self._late_at, self._started + self._settings.matchmaking_s)

    @property
    def deadline(self) -> float:
        return min(self._resend_at, self._late_at, self._started + self._settings.matchmaking_s)

    @property
    def _enough(self) -> bool:
        enough = self.samples >= self._settings.target_samples
        return enough and self._me in self.joined and len(self.joined) >= self._settings.min_group_size

    @property
    def samples(self) -> int:
        return sum(one.contribution.samples for one in self.joined.values() if one.contribution is not None)

    def plan(self) -> Plan | None:
        """For those who have joined; None if they are too few, or do not have the samples."""
        contributions = [one.contribution for one in self.joined.values() if one.contribution is not None]
        if not self._enough:
            return None
        reducers = reducers_of(self.joined)
        stop = any(offer.stop for offer in self.joined.values())
        last = stop or any(offer.last for offer in self.joined.values())
        return make_plan(
            self.round,
            self.head,
            self._me,
            members=list(self.joined),
            contributions=[one for one in contributions if one.samples],
            bandwidths=reducers,
            chunks=self._settings.chunks,
            trailing=[] if last else self._trailing(),
            slow=slow_lines({peer: offer.bandwidth for peer, offer in self.joined.items()}, reducers),
            stop=stop,
            last=last,
        )

    def _trailing(self) -> list[PeerId]:
        """Who is not waited for at the end: not more than others are."""
        trailing = [peer for peer, offer in self.joined.items() if offer.trails]
        return trailing if 2 * len(trailing) <= len(self.joined) else []

    def dismiss(self, reason: str, better: PeerId | None = None) -> None:
        """Send home who has come, and who may still come."""
        for peer in sorted({*self.awaited, *self.joined}):
            self._emit(Send(to=peer, message=Ended(round=self.round, reason=reason, aborted=True, better=better)))

    def _call(self, peer: PeerId) -> None:
        self._emit(Send(to=peer, message=Call(round=self.round, head=self.head, cuts=self._cuts)))
