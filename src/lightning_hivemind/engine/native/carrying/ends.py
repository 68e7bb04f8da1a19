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
        self._carrier = Carrier(links, training, peer.knows, layout, codecs, memory)
        self._sender = Sender(links, training, peer.me, lambda: peer.heads, layout, codecs, memory)
        self._line = Line(peer.me)
        self._whole = not any(one.leaves_out for one in codecs)  # what is left out would have to be given later
        #: whether this peer may have other samples than before
        self._changed = False

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
        return lambda now: self._take(peer, header, payload, now)

    def _take(self, peer: PeerId, header: Header, payload: memoryview, now: float) -> None:
        self._changed |= self._carrier.take(peer, header, payload, now)

    def moved(self, peer: PeerId, now: float) -> None:
        """A part of a chunk has come from it; from the threads that read connections."""
        self._carrier.moved(peer, now)

    def lost(self, peer: PeerId, now: float) -> None:
        """There is no connection to it."""
        self._sender.lost(peer, now)

    def suspended(self, now: float) -> None:
        """This process stood still until now."""
        self._carrier.suspended(now)
        self._sender.suspended(now)

    def begun(self, plan: Plan, now: float) -> None:
        """A round of this peer, for which all of its line is there."""
        self._line.observe(plan, self._sender.takes_s, now)

    def look(self, now: float) -> bool:
        """After every event: hand over what is to be. Returns whether this peer has other samples for rounds now."""
        changed, self._changed = self._changed, False
        self._carrier.tidy(now)
        if self._line.slow or self._sender.busy or self._training.hands_over:
            can = self._line.slow and self._whole and self._training.can_hand_over
            carriers = self._sender.carriers(self._peer.quick, now) if can else []
            hands_over = bool(carriers)
            changed |= self._training.hands_over != hands_over
            self._training.hands_over = hands_over
            self._peer.sends_slowly(hands_over and not self._training.samples)
            self._sender.look(carriers, now)
        return changed
