"""The protocol's core for a thousand peers in one process: the same answers, without counting everybody each time.

One peer asks a few times per second who of n is next, which is nothing for it; n peers in one process ask n times as
often, which is all that the process does. So the roster here keeps an order of ranks that all of them share, and sums
that change with what is heard. And what is computed from one unchanging value at every peer (the head that a commit
leads to, who contributes to a plan) is computed once. ``tests/unit/simulation`` compares forecasts with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId, rank
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Plan
from lightning_hivemind.engine.native.protocol.roster import Place, Roster
from lightning_hivemind.engine.native.protocol.rounds import Rounds
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.protocol.standing import Standing

#: epochs of which the order of candidates is kept
KEPT = 8


class Ranks:
    """All peers of a world in the order in which they are candidates, by epoch; shared by their rosters."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.names: list[PeerId] = []
        self._orders: dict[tuple[int, int], list[PeerId]] = {}

    def of(self, epoch: int) -> list[PeerId]:
        key = epoch, len(self.names)
        if key not in self._orders:
            while len(self._orders) >= KEPT:
                self._orders.pop(next(iter(self._orders)))
            self._orders[key] = sorted(self.names, key=lambda name: (rank(self._run, epoch, name), name))
        return self._orders[key]


class QuickRoster(Roster):
    """Answers as :class:`Roster` does. ``ranks`` must hold every peer that is ever heard of."""

    def __init__(self, settings: Settings, me: PeerId, reduces: bool, ranks: Ranks) -> None:
        super().__init__(settings, me, reduces)
        self._ranks = ranks
        self._living: list[PeerId] | None = None
        #: of the living at this head, this peer's own not included
        self._sum_head: Head | None = None
        self._sum = 0

    def record(self, peer: PeerId, place: Place, now: float, *, outdated: bool) -> bool:
        if not self.reaches(peer):
            self._forget()
        return super().record(peer, place, now, outdated=outdated)

    def note(self, peer: PeerId, head: Head, samples: int, *, outdated: bool) -> None:
        known, before = peer in self._seen, self._part(peer)
        super().note(peer, head, samples, outdated=outdated)
        self._sum += self._part(peer) - before
        if not known:
            self._living = None

    def came(self, samples: Mapping[PeerId, int]) -> None:
        self._sum_head = None
        super().came(samples)

    def lost(self, peer: PeerId, now: float) -> None:
        self._forget()
        super().lost(peer, now)

    def alive(self, peer: PeerId) -> None:
        if not self.reaches(peer):
            self._forget()
        super().alive(peer)

    def moved(
        self, peers: set[PeerId], parent: Head, head: Head, now: float, *, silent: Collection[PeerId] = ()
    ) -> None:
        self._sum_head = None
        super().moved(peers, parent, head, now, silent=silent)

    def living(self) -> list[PeerId]:
        if self._living is None:
            self._living = super().living()
        return self._living

    def candidate(self, head: Head) -> PeerId:
        best: PeerId | None = None
        for peer in self._ranks.of(head.epoch):
            if peer != self._me and not self._may_call(peer, head):
                continue
            unfit = self._unfit(peer)
            if not any(unfit):
                return peer
            if best is None or unfit < self._unfit(best):
                best = peer
        assert best is not None, "a peer is its own candidate at least"
        return best

    def _may_call(self, peer: PeerId, head: Head) -> bool:
        known = self._seen.get(peer)
        here = known is not None and known.head == head
        return here and self.reaches(peer) and peer not in self._idle

    def _counted(self, head: Head) -> int:
        if self._sum_head != head:
            self._sum_head, self._sum = head, super()._counted(head) - self.samples
        return self.samples + self._sum

    def _part(self, peer: PeerId) -> int:
        known = self._seen.get(peer)
        counts = known is not None and known.head == self._sum_head and self.reaches(peer)
        return known.samples if known is not None and counts else 0

    def _forget(self) -> None:
        self._living = self._sum_head = None


class QuickPeer(Peer):
    """The protocol's own :class:`Peer`, with a :class:`QuickRoster`."""

    def __init__(self, settings: Settings, me: PeerId, incarnation: bytes, *, reduces: bool, ranks: Ranks) -> None:
        super().__init__(settings, me, incarnation, reduces=reduces)
        self._roster: QuickRoster = QuickRoster(settings, me, reduces, ranks)
        self._standing = Standing(self._roster, self._emit)
        self._rounds = Rounds(settings, me, incarnation, self._roster, self._standing, self._emit)

    @property
    def wants_something(self) -> bool:
        """Whether :meth:`take` has anything."""
        return bool(self._out)


@contextmanager
def computed_once() -> Iterator[None]:
    """Within it, two properties of commits and plans are computed once for each object.

    Commits and plans never change, so a run is the same with and without.
    """
    kept: dict[tuple[str, int], tuple[object, Any]] = {}

    def once(name: str, compute: Callable[[Any], Any]) -> property:
        def get(value: object) -> Any:
            found = kept.get((name, id(value)))
            if found is None:
                found = kept[name, id(value)] = (value, compute(value))  # the object is kept: its id stays its own
            return found[1]

        return property(get)

    before = [(owner, name, vars(owner)[name]) for owner, name in ((Commit, "head"), (Plan, "contributors"))]
    for owner, name, original in before:
        setattr(owner, name, once(name, original.fget))
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
