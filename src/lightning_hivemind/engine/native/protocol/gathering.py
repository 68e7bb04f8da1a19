"""The coordinator's first half: call peers to a round, and close the group as soon as all of them are there.

Who gives nothing to rounds, since its line is slow, is not waited for: it is in the plan before it has answered.
"""

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
        *,
        gives_nothing: Callable[[PeerId], bool],
        stands: Callable[[PeerId, Head], bool],
        emit: Callable[[Action], None],
        now: float,
    ) -> None:
        self._settings, self._me, self._cuts, self._emit = settings, me, cuts, emit
        self._gives_nothing, self._stands = gives_nothing, stands
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
        """Nobody is awaited any more, or not any longer; and who gives nothing only if it is needed all the same."""
        complete = not self.awaited if self._few or self._last else all(map(self._gives_nothing, self.awaited))
        return complete or now >= self._started + self._settings.matchmaking_s

    @property
    def deadline(self) -> float:
        return min(self._resend_at, self._started + self._settings.matchmaking_s)

    @property
    def _last(self) -> bool:
        """Whether somebody's run ends with this step."""
        return any(offer.stop or offer.last for offer in self.joined.values())

    @property
    def _few(self) -> bool:
        """Whether more peers are needed, even such as give nothing."""
        return self._me not in self.joined or len(self.joined) < self._settings.min_group_size

    @property
    def brought(self) -> dict[PeerId, int]:
        """Samples, of each that was called."""
        of = {peer: offer.contribution for peer, offer in self.joined.items()}
        return {**dict.fromkeys(self.awaited, 0), **{peer: one.samples if one else 0 for peer, one in of.items()}}

    @property
    def samples(self) -> int:
        return sum(self.brought.values())

    def plan(self) -> Plan | None:
        """For those who have joined, or will; None if they are too few, or do not have the samples."""
        contributions = [one.contribution for one in self.joined.values() if one.contribution is not None]
        if self._few or self.samples < self._settings.target_samples:
            return None
        reducers = reducers_of(self.joined)
        trailing, expected = self._trailing()
        slow = slow_lines({peer: offer.bandwidth for peer, offer in self.joined.items()}, reducers)
        return make_plan(
            self.round,
            self.head,
            self._me,
            members=[*self.joined, *expected],
            contributions=[one for one in contributions if one.samples],
            bandwidths=reducers,
            chunks=self._settings.chunks,
            trailing=[*trailing, *expected],
            slow=[*slow, *expected],
            stop=any(offer.stop for offer in self.joined.values()),
            last=self._last,
        )

    def _trailing(self) -> tuple[list[PeerId], list[PeerId]]:
        """Who is not waited for at the end, and of those who have not answered yet: not more than others are."""
        if self._last:
            return [], []
        trailing = [peer for peer, offer in self.joined.items() if offer.trails]
        expected = sorted(peer for peer in self.awaited if self._gives_nothing(peer) and self._stands(peer, self.head))
        if 2 * len(trailing) > len(self.joined):
            return [], []
        return trailing, expected[: len(self.joined) - 2 * len(trailing)]

    def dismiss(self, reason: str, better: PeerId | None = None) -> None:
        """Send home who has come, and who may still come."""
        for peer in sorted({*self.awaited, *self.joined}):
            self._emit(Send(to=peer, message=Ended(round=self.round, reason=reason, aborted=True, better=better)))

    def _call(self, peer: PeerId) -> None:
        self._emit(Send(to=peer, message=Call(round=self.round, head=self.head, cuts=self._cuts)))
