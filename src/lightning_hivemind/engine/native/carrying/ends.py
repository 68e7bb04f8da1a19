"""Both ends of it at one peer, and when it hands over what it has: for the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_hivemind.engine.native.carrying.carrier import Carrier
from lightning_hivemind.engine.native.carrying.line import Line
from lightning_hivemind.engine.native.carrying.papers import longest_receipt, read_offer, read_receipt
from lightning_hivemind.engine.native.carrying.sender import Sender
from lightning_hivemind.engine.native.codecs import ChunkCodec
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import PeerId
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Plan
from lightning_hivemind.engine.native.seam import Training
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.errors import WireError

KINDS = (Kind.OFFERED, Kind.PARCEL, Kind.RECEIPT)


class Ends:
    """See the module. Threads that read connections call ``room`` and ``read``, that of the rounds all else."""

    def __init__(
        self,
        links: Links,
        peer: Peer,
        training: Training,
        layout: Layout,
        codecs: Sequence[ChunkCodec],
        memory: Memory,
    ) -> None:
        self._peer, self._training, self._layout = peer, training, layout
        self._carrier = Carrier(links, training, layout, codecs, memory)
        self._sender = Sender(links, training, peer.me, layout, codecs, memory)
        self._line = Line(peer.me)

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        """Where what follows is to be put; None if it is not wanted. Raises WireError: there is no such thing."""
        if header.kind is Kind.PARCEL:
            return self._carrier.room(peer, header)
        if header.length > longest_receipt(self._layout):
            raise WireError(f"{header.length} bytes about a gradient that is handed over")
        return memoryview(bytearray(header.length))

    def read(self, peer: PeerId, header: Header, payload: memoryview) -> Callable[[float], None]:
        """What is to be done about it by the rounds' thread. Raises WireError: it cannot be understood."""
        if header.kind is Kind.OFFERED:
            offer = read_offer(payload)
            return lambda now: self._carrier.offered(peer, header.round, offer, now)
        if header.kind is Kind.RECEIPT:
            receipt = read_receipt(payload, self._layout)
            return lambda now: self._sender.answered(peer, header.round, receipt, now)
        return lambda now: self._carrier.take(peer, header, payload, now)

    def lost(self, peer: PeerId, now: float) -> None:
        """There is no connection to it."""
        self._carrier.lost(peer)
        self._sender.lost(peer, now)

    def begun(self, plan: Plan, now: float) -> None:
        """A round of this peer, for which all of its line is there."""
        self._line.observe(plan, self._sender.takes_s, now)
        self._peer.sends_slowly(self._line.slow)

    def look(self, now: float) -> bool:
        """After every event: hand over what is to be. Returns whether this peer has other samples for rounds now."""
        before = self._training.hands_over, self._training.samples
        carriers = self._sender.carriers(self._peer.quick, now) if self._line.slow else []
        self._training.hands_over = bool(carriers)
        self._sender.look(carriers, now)
        return before != (self._training.hands_over, self._training.samples)
