"""Peers, the network between them, their records, and the invariants that must hold whatever happens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.protocol.messages import Message, RoundId
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.simulation.clock import Clock
from lightning_hivemind.simulation.network import Network
from lightning_hivemind.simulation.trainer import Habits, Parameters, SimulatedPeer

#: of a message, where its size does not matter
MESSAGE_BYTES = 200
#: how often a peer publishes its record, and how late the others read it
RECORD_S = 1.0


class World:
    """See the module. Everything random comes from the network's seed, so a run repeats exactly."""

    def __init__(
        self, settings: Settings, network: Network, *, chunk_bytes: int = 1 << 20, state_s: float = 0.3
    ) -> None:
        self.settings, self.network = settings, network
        self.chunk_bytes, self.state_s = chunk_bytes, state_s
        self.clock = Clock()
        self.peers: dict[str, SimulatedPeer] = {}
        self.cuts: set[frozenset[str]] = set()
        self._noticing: set[tuple[str, str]] = set()
        #: digest of the parameters at each head, and the heads that follow each head
        self.parameters: dict[Head, bytes] = {}
        self.children: defaultdict[Head, set[Head]] = defaultdict(set)
        self._contents: dict[Contribution, frozenset[str]] = {}
        self._incarnations: defaultdict[str, int] = defaultdict(int)

    @property
    def now(self) -> float:
        return self.clock.now

    # ------------------------------------------------------------------ peers

    def add(self, name: str, habits: Habits | None = None) -> SimulatedPeer:
        """A new peer, or one that starts again: the first is the founder, others take a living one's state."""
        if name in self.peers:
            self.peers[name].alive = False  # so quickly that nobody noticed its end
        self._incarnations[name] += 1
        peer = self._make(name, self._incarnations[name], habits or Habits())
        donors = [one for one in self.peers.values() if one.alive and one.parameters is not None and one.name != name]
        self.peers[name] = peer
        if donors:
            best = max(donors, key=lambda one: (one.parameters.head.samples, one.name))  # type: ignore[union-attr]
            assert best.parameters is not None
            peer.applied = list(best.applied)
            for one in donors:  # a joiner reads the others' records before it starts
                place = self._place(one)
                assert place is not None
                peer.core.saw(one.name, place, self.now)
            peer.start(Parameters(head=best.parameters.head, digest=best.parameters.digest))
        else:
            peer.start(Parameters(head=Head.root(self.settings.run, name), digest=b"initial"))
        self._publish(peer)
        return peer

    def _make(self, name: str, incarnation: int, habits: Habits) -> SimulatedPeer:
        return SimulatedPeer(self, name, incarnation, self.settings, habits)

    def living(self) -> list[SimulatedPeer]:
        return [peer for peer in self.peers.values() if peer.alive]

    def others(self, peer: SimulatedPeer) -> Iterator[SimulatedPeer]:
        return (one for one in self.living() if one is not peer)

    def _publish(self, peer: SimulatedPeer) -> None:
        """Its record in the DHT: everybody to whom a way leads, through others if need be, reads it sooner or later."""
        if not peer.alive or self.peers[peer.name] is not peer:
            return
        place = self._place(peer)
        if not peer.frozen and place is not None:
            for other in self._in_reach(peer):
                self._deliver_record(peer.name, other, place)
        self.clock.after(RECORD_S, lambda: self._publish(peer))

    def _in_reach(self, peer: SimulatedPeer) -> list[SimulatedPeer]:
        """All living peers to which connections lead from this one, through others or not."""
        found, left = [peer], [one for one in self.others(peer) if not one.frozen]
        for one in found:  # it grows
            found += [other for other in left if self.connected(one, other)]
            left = [other for other in left if other not in found]
        return found[1:]

    def _place(self, peer: SimulatedPeer) -> Place | None:
        core, reduces = peer.core, peer.habits.reduces
        if core.head is None:
            return None
        return Place(head=core.head, samples=core.samples, stamp=self.now, reduces=reduces, cuts=core.cuts)

    def _deliver_record(self, name: str, other: SimulatedPeer, place: Place) -> None:
        def arrive() -> None:
            if other.alive and not other.frozen:
                other.core.saw(name, place, self.now)
                other.carry_out()

        self.clock.after(self.network.detection_s(other.name, name) * 0.25, arrive)

    # ------------------------------------------------------------------ the network

    def message_bytes(self, message: Message) -> int:
        """What a message weighs on the wire."""
        return MESSAGE_BYTES

    def data_bytes(self, chunk: int) -> int:
        """What a chunk weighs on the wire, encoded."""
        return self.chunk_bytes

    def state_time_s(self, peer: SimulatedPeer) -> float:
        """How long ``peer`` needs to fetch a state, or an average that it lacks."""
        return self.state_s

    def send(
        self,
        sender: SimulatedPeer,
        to: str,
        size_bytes: int,
        arrive: Callable[[SimulatedPeer], None],
        *,
        data_of: RoundId | None = None,
    ) -> None:
        """``arrive`` is called with the receiver, if and when it gets there.

        ``data_of``: the round of which this is a chunk; None: it is a message.
        """
        target = self.peers.get(to)
        if target is sender:
            self.clock.after(0.0, lambda: arrive(sender) if sender.alive else None)
        elif target is not None:
            self._transmit(sender, target, size_bytes, arrive, data_of)
            self._notice_failure(sender.name, to)

    def _transmit(
        self,
        sender: SimulatedPeer,
        target: SimulatedPeer,
        size_bytes: int,
        arrive: Callable[[SimulatedPeer], None],
        data_of: RoundId | None,
    ) -> None:
        """From one peer to another one; see :meth:`send`."""
        for time in self.network.deliveries(sender.name, target.name, size_bytes, self.now):
            self._deliver(sender, target, time, arrive)

    def _deliver(
        self, sender: SimulatedPeer, target: SimulatedPeer, time: float, arrive: Callable[[SimulatedPeer], None]
    ) -> None:
        def deliver() -> None:
            if not target.alive or self.peers[target.name] is not target or not self.connected(sender, target):
                return
            if target.frozen:
                self.clock.after(0.5, deliver)  # it lies in the socket until the process goes on
            else:
                arrive(target)

        self.clock.at(time, deliver)

    def connected(self, one: SimulatedPeer, other: SimulatedPeer) -> bool:
        return frozenset({one.name, other.name}) not in self.cuts

    # ------------------------------------------------------------------ faults

    def crash(self, name: str) -> None:
        """``kill -9``."""
        peer = self.peers[name]
        peer.alive = False
        for other in list(self.others(peer)):
            self._notice(other.name, name, lambda: not self.peers[name].alive)

    def freeze(self, name: str) -> None:
        """``SIGSTOP``: connections stay, so only its silence tells."""
        peer = self.peers[name]
        peer.frozen = True
        for other in list(self.others(peer)):
            self._notice(other.name, name, lambda: peer.frozen, self.settings.detect_s)

    def thaw(self, name: str) -> None:
        peer = self.peers[name]
        if peer.alive and peer.frozen:
            peer.frozen = False
            peer.tick()

    def cut(self, one: str, other: str) -> None:
        """No packet gets through between these two."""
        pair = frozenset({one, other})
        self.cuts.add(pair)
        for observer, gone in ((one, other), (other, one)):
            self._notice(observer, gone, lambda: pair in self.cuts)

    def join(self, one: str, other: str) -> None:
        """The end of a cut."""
        self.cuts.discard(frozenset({one, other}))

    def heal(self) -> None:
        self.cuts.clear()

    def _notice_failure(self, sender: str, target: str) -> None:
        """Whenever sending fails it is noticed anew, whatever is known of the other one from elsewhere."""
        pair = (sender, target)

        def fails() -> bool:
            return not self.peers[target].alive or frozenset(pair) in self.cuts

        def still_fails() -> bool:
            self._noticing.discard(pair)
            return fails()

        if fails() and pair not in self._noticing:
            self._noticing.add(pair)
            self._notice(*pair, still_fails)

    def _notice(self, observer: str, gone: str, still: Callable[[], bool], silence_s: float = 0.0) -> None:
        def notice() -> None:
            peer = self.peers[observer]
            if still() and peer.alive and not peer.frozen:
                peer.lost(gone)

        self.clock.after(max(silence_s, self.network.detection_s(observer, gone)), notice)

    # ------------------------------------------------------------------ what must hold

    def register(self, contribution: Contribution, samples: frozenset[str]) -> None:
        """Which samples a contribution stands for."""
        assert contribution not in self._contents, "two contributions with one number"
        self._contents[contribution] = samples

    def samples_of(self, contribution: Contribution) -> frozenset[str]:
        return self._contents[contribution]

    def check(self, peer: SimulatedPeer, commit: Commit) -> None:
        """After a step: the same bytes gave the same parameters as everywhere else (I2)."""
        assert peer.parameters is not None
        head = commit.head
        known = self.parameters.setdefault(head, peer.parameters.digest)
        assert known == peer.parameters.digest, f"{peer.name} has other parameters at epoch {head.epoch}"
        self.children[commit.parent].add(head)

    @property
    def forks(self) -> int:
        """Heads that were extended in more than one way."""
        return sum(len(heads) > 1 for heads in self.children.values())

    def check_ledger(self, peer: SimulatedPeer) -> None:
        """The lineage that this peer is on is one chain (I4), and no sample is in two commits of it (I3).

        Nor is one lost: this peer's are in a commit, or wait for one, or were dropped and counted.
        """
        self._check_counts(peer, self._chain(peer.decided))

    def _chain(self, applied: list[Commit]) -> dict[str, set[str]]:
        """The samples in these commits, which must be one chain, by the peer's life that made them."""
        seen: defaultdict[str, set[str]] = defaultdict(set)
        for before, after in pairwise(applied):
            assert after.parent == before.head
        for commit in applied:
            for one in commit.contributions:
                samples = self._contents[one]
                known = seen[next(iter(samples)).split("/")[0]]  # all of them are of one life
                assert not samples & known, f"samples of {one.peer} count twice"
                known |= samples
        return seen

    def _check_counts(self, peer: SimulatedPeer, seen: dict[str, set[str]]) -> None:
        committed = seen.get(peer.tag, set())
        assert not committed & peer.pool, f"samples of {peer.name} would count twice"
        lost = peer.made - len(committed) - len(peer.pool) - peer.dropped
        assert lost == 0, f"{lost} samples of {peer.name} are lost in silence"
