"""The coordinator's first half: call peers to a round, and close the group as soon as all of them are there.

Who gives nothing to rounds, since its line is slow, is not waited for: it is in the plan before it has answered, as if
with what it answered last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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
        expected: Callable[[PeerId], Offer | None],
        emit: Callable[[Action], None],
        now: float,
    ) -> None:
        self._settings, self._me, self._cuts, self._emit = settings, me, cuts, emit
        #: whether a peer gives nothing, and what it will probably offer
        self._gives_nothing, self._expected = gives_nothing, expected
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
        if not self.awaited or now >= self._started + self._settings.matchmaking_s:
            return True
        # after every answer: most of the time the first one that is awaited says enough
        return all(map(self._gives_nothing, self.awaited)) and not self._few and not _ends(self.joined | self._late())

    @property
    def deadline(self) -> float:
        return min(self._resend_at, self._started + self._settings.matchmaking_s)

    @property
    def _few(self) -> bool:
        """Whether more peers are needed, even such as give nothing."""
        return self._me not in self.joined or len(self.joined) < self._settings.min_group_size

    @property
    def brought(self) -> dict[PeerId, int]:
        """Samples, of each that was called."""
        of = {peer: offer.contribution for peer, offer in self.joined.items()}
        nothing = dict.fromkeys(self.awaited | self._declined, 0)
        return {**nothing, **{peer: one.samples if one is not None else 0 for peer, one in of.items()}}

    @property
    def samples(self) -> int:
        return sum(self.brought.values())

    def plan(self) -> Plan | None:
        """For those who have joined, or will; None if they are too few, or do not have the samples."""
        contributions = [one.contribution for one in self.joined.values() if one.contribution is not None]
        if self._few or self.samples < self._settings.target_samples:
            return None
        offers = self.joined | self._late()
        reducers = reducers_of(offers)
        return make_plan(
            self.round,
            self.head,
            self._me,
            members=list(offers),
            contributions=[one for one in contributions if one.samples],
            bandwidths=reducers,
            chunks=self._settings.chunks,
            trailing=self._trailing(offers),
            slow=slow_lines({peer: offer.bandwidth for peer, offer in offers.items()}, reducers),
            stop=any(offer.stop for offer in offers.values()),
            last=_ends(offers),
        )

    def _late(self) -> dict[PeerId, Offer]:
        """What those will offer who are in the round before they have answered: none more than may trail in it."""
        if _ends(self.joined):
            return {}
        found = {peer: self._expected(peer) for peer in sorted(self.awaited) if self._gives_nothing(peer)}
        trailing = sum(offer.trails for offer in self.joined.values())
        known = [(peer, offer) for peer, offer in found.items() if offer is not None]
        return dict(known[: max(0, len(self.joined) - 2 * trailing)])

    def _trailing(self, offers: Mapping[PeerId, Offer]) -> list[PeerId]:
        """Who is not waited for at the end: not more than others are."""
        trailing = [peer for peer, offer in offers.items() if offer.trails]
        return trailing if 2 * len(trailing) <= len(offers) and not _ends(offers) else []

    def dismiss(self, reason: str, better: PeerId | None = None) -> None:
        """Send home who has come, and who may still come."""
        for peer in sorted({*self.awaited, *self.joined}):
            self._emit(Send(to=peer, message=Ended(round=self.round, reason=reason, aborted=True, better=better)))

    def _call(self, peer: PeerId) -> None:
        self._emit(Send(to=peer, message=Call(round=self.round, head=self.head, cuts=self._cuts)))


def _ends(offers: Mapping[PeerId, Offer]) -> bool:
    """Whether somebody's run ends with this step."""
    return any(offer.stop or offer.last for offer in offers.values())
