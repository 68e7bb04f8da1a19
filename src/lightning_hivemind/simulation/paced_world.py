"""A world for forecasts: peers that keep the engine's pace, lines of limited width, messages as long as they are."""

from __future__ import annotations

import random
from collections.abc import Callable

from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head
from lightning_hivemind.engine.native.protocol.messages import Begin, Committed, Ended, Message, Missing, News, RoundId
from lightning_hivemind.engine.native.protocol.settings import AGAIN_S, PUBLISH_S, Settings
from lightning_hivemind.engine.native.wire.encoding import MAX_MESSAGE_BYTES, encode
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES
from lightning_hivemind.simulation.links import SharedLinks
from lightning_hivemind.simulation.paced import PacedPeer
from lightning_hivemind.simulation.quick import Ranks
from lightning_hivemind.simulation.tally import Tally
from lightning_hivemind.simulation.trainer import Habits, SimulatedPeer
from lightning_hivemind.simulation.world import World

#: how late others read a record at most
READ_S = 3.5


class PacedWorld(World):
    """See the module. ``encoded_bytes`` is of each chunk, ``state_bytes`` what a peer that joins downloads."""

    def __init__(
        self,
        settings: Settings,
        links: SharedLinks,
        *,
        layout: Layout,
        encoded_bytes: Callable[[int], int],
        state_bytes: int,
        seed: int,
    ) -> None:
        super().__init__(settings, links)
        self.links, self.seed, self.state_bytes = links, seed, state_bytes
        self._data_bytes = [HEADER_BYTES + encoded_bytes(layout.size(chunk)) for chunk in range(layout.chunks)]
        self.ranks, self.tally = Ranks(settings.run), Tally()
        #: also those that were killed
        self.everybody: list[PacedPeer] = []
        self._chance = random.Random(f"{seed} world")
        self._sizes: dict[object, tuple[object, int]] = {}

    def _make(self, name: str, incarnation: int, habits: Habits) -> SimulatedPeer:
        if name not in self.peers:
            self.ranks.names.append(name)
        peer = PacedPeer(self, name, incarnation, self.settings, habits)
        self.everybody.append(peer)
        return peer

    # ------------------------------------------------------------------ records

    def _publish(self, peer: SimulatedPeer) -> None:
        """Say where it stands, when that has changed, and from time to time that it lives."""
        self._look(peer, None, self.now)

    def _look(self, peer: SimulatedPeer, published: Head | None, at: float) -> None:
        if not peer.alive:
            return
        place = self._place(peer)
        if place is not None and (place.head != published or self.now - at > AGAIN_S):

            def read() -> None:
                for other in self.everybody:
                    if other.alive and other is not peer:
                        other.saw(peer.name, place)

            self.clock.after(self._chance.uniform(0.0, READ_S) if published is not None else 0.0, read)
            published, at = place.head, self.now
        self.clock.after(PUBLISH_S, lambda: self._look(peer, published, at))

    # ------------------------------------------------------------------ the network

    def data_bytes(self, chunk: int) -> int:
        return self._data_bytes[chunk]

    def state_time_s(self, peer: SimulatedPeer) -> float:
        return self.state_bytes / self.links.wires[peer.name].down

    def message_bytes(self, message: Message) -> int:
        """As encoded, with the frame's header. Messages of a kind are of like length, but for a few kinds."""
        match message:
            case Begin(plan=plan):
                size = self._size(id(plan), message, plan)
            case Committed(commit=commit):
                size = self._commit_bytes(commit)
            case News(commits=commits):
                size = self._size(News, News(head=message.head, commits=()), None)
                size += sum(self._commit_bytes(one) for one in commits)
            case Missing(chunks=chunks):
                size = self._size((Missing, len(chunks)), message, None)
            case Ended(reason=reason):
                size = self._size((Ended, reason), message, None)
            case _:
                size = self._size(type(message), message, None)
        return HEADER_BYTES + size

    def _commit_bytes(self, commit: Commit) -> int:
        return self._size(id(commit), Committed(commit=commit), commit)

    def _size(self, key: object, message: Message, keep: object) -> int:
        """Encoded once; ``keep`` is what the key is the id of."""
        if key not in self._sizes:
            self._sizes[key] = (keep, len(encode(message)))
        return self._sizes[key][1]

    def _transmit(
        self,
        sender: SimulatedPeer,
        target: SimulatedPeer,
        size_bytes: int,
        arrive: Callable[[SimulatedPeer], None],
        data_of: RoundId | None,
    ) -> None:
        assert isinstance(target, PacedPeer)
        if data_of is None and size_bytes > MAX_MESSAGE_BYTES:
            self.tally.reason(f"a message is above {MAX_MESSAGE_BYTES} bytes, which nobody takes")
            return
        data = data_of is not None
        times = self.links.deliveries(sender.name, target.name, size_bytes, self.now, data=data)
        if times:
            self.tally.carries(sender.name, target.name, size_bytes, data=data)
        for time in times:
            if data_of is None:
                self._deliver(sender, target, time, arrive)
            else:
                self._deliver_data(sender, target, time, arrive, data_of)

    def _deliver_data(
        self,
        sender: SimulatedPeer,
        target: PacedPeer,
        time: float,
        arrive: Callable[[SimulatedPeer], None],
        round_id: RoundId,
    ) -> None:
        key = round_id, sender.name
        target.incoming[key] += 1

        def deliver() -> None:
            target.incoming[key] -= 1
            if not target.incoming[key]:
                del target.incoming[key]
            if target.alive and sender.alive:  # a connection ends with its process, and what waited there with it
                arrive(target)

        self.clock.at(time, deliver)

    def crash(self, name: str) -> None:
        super().crash(name)
        self.links.forget(name)

    # ------------------------------------------------------------------ what must hold

    def check_everything(self) -> dict[str, set[str]]:
        """All ledgers; the samples in the heaviest lineage, by the peer's life that made them."""
        chains: dict[tuple[int, ...], dict[str, set[str]]] = {}
        front: PacedPeer | None = None
        for peer in self.everybody:
            if not peer.alive:
                continue
            decided = peer.decided
            key = tuple(map(id, decided))
            if key not in chains:
                chains[key] = self._chain(decided)
            self._check_counts(peer, chains[key])
            if front is None or peer.head.outweighs(front.head):
                front = peer
        return chains[tuple(map(id, front.decided))] if front is not None else {}
