"""The end that takes other peers' gradients, to give them to a round with its own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_hivemind.engine.native.carrying.papers import TOKEN_BYTES, Offered, Receipt, write_receipt
from lightning_hivemind.engine.native.codecs import ChunkCodec
from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.exchange import check_length, finite
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId
from lightning_hivemind.engine.native.seam import Parcel, Training
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links

#: parcels that are taken at a time: so many, or as many as fit into this memory (each needs as much as a gradient)
MOST_PARCELS, PARCELS_BYTES = 4, 1 << 30
#: a parcel of which nothing has come for so long makes room for another one
IDLE_S = 10.0


@dataclass(slots=True)
class _Coming:
    """A parcel that is not whole yet. ``values``: float32 CPU (elements,)."""

    number: bytes
    offered: Offered
    values: Tensor
    moved_at: float
    here: set[int] = field(default_factory=set)


class Carrier:
    """See the module. Threads that read connections call ``room`` and ``moved``, that of the rounds all else."""

    def __init__(
        self,
        links: Links,
        training: Training,
        knows: Callable[[Iterable[Head]], bool],
        layout: Layout,
        codecs: Sequence[ChunkCodec],
        memory: Memory,
    ) -> None:
        self._links, self._training, self._layout, self._codecs = links, training, layout, codecs
        self._knows, self._memory = knows, memory
        self._most = max(MOST_PARCELS, PARCELS_BYTES // max(1, 4 * layout.elements))
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._lock = threading.Lock()
        self._coming: dict[PeerId, _Coming] = {}
        #: of each peer, the last parcel that was taken
        self._taken: dict[PeerId, bytes] = {}

    def offered(self, peer: PeerId, number: bytes, offered: Offered, now: float) -> None:
        """``peer`` wants to hand over a parcel, or asks how far it is."""
        coming = self._coming.get(peer)
        if self._taken.get(peer) == number:
            self._answer(peer, number, Receipt(self._token))
        elif coming is not None and coming.number == number:
            self._answer(peer, number, Receipt(self._token, self._missing(coming)))
        elif self._training.too_old(offered.until):
            self._answer(peer, number, Receipt(self._token, refused="it is too old", too_old=True))
        elif why := self._why_not(offered):
            self._answer(peer, number, Receipt(self._token, refused=why))
        elif not self._make_room(peer, now):
            self._answer(peer, number, Receipt(self._token, refused="this peer carries others' already"))
        else:
            coming = _Coming(number, offered, self._memory.floats(self._layout.elements), now)
            with self._lock:
                self._coming[peer] = coming
            self._answer(peer, number, Receipt(self._token, self._missing(coming)))

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        """Where a chunk of a parcel is to be put; None if it is not wanted. Raises WireError: no such chunk."""
        check_length(self._layout, self._codecs, header.chunk, header.length)
        with self._lock:
            coming = self._coming.get(peer)
            wanted = coming is not None and coming.number == header.round and header.chunk not in coming.here
        return memory_of(self._memory.bytes(header.length)) if wanted else None

    def moved(self, peer: PeerId, now: float) -> None:
        """A part of a chunk has come."""
        with self._lock:
            if (coming := self._coming.get(peer)) is not None:
                coming.moved_at = now

    def take(self, peer: PeerId, header: Header, payload: memoryview, now: float) -> bool:
        """A chunk is there. True if it was the last one of a gradient."""
        coming = self._coming.get(peer)
        if coming is None or coming.number != header.round or header.chunk in coming.here:
            return False
        self._codecs[header.chunk].decode(payload, coming.values[self._layout.span(header.chunk)])
        coming.moved_at = now
        with self._lock:
            coming.here.add(header.chunk)
        if len(coming.here) < self._layout.chunks:
            return False
        self._drop(peer)
        self._answer(peer, coming.number, self._finish(peer, coming))
        return True

    def suspended(self, now: float) -> None:
        """This process stood still until now: what has come meanwhile is still to be read."""
        with self._lock:
            for coming in self._coming.values():
                coming.moved_at = now

    def tidy(self, now: float) -> None:
        """Make room for others where nothing has come for so long."""
        for peer in [one for one, coming in self._coming.items() if now - coming.moved_at > IDLE_S]:
            self._drop(peer)

    def _why_not(self, offered: Offered) -> str:
        """Why this peer does not carry it now; nothing if it does."""
        if not self._training.carries:
            return "this peer gives nothing to rounds now"
        return "" if self._knows(offered.heads) else "it is of another lineage"

    def _finish(self, peer: PeerId, coming: _Coming) -> Receipt:
        if why := self._why_not(coming.offered):  # it was not so when this began
            return Receipt(self._token, refused=why)
        if not finite(coming.values):
            return Receipt(self._token, refused="it has values that are not finite", too_old=True)
        offered = coming.offered
        parcel = Parcel(coming.values, offered.samples, offered.epoch, offered.until)
        if not self._training.carry(peer, parcel):
            return Receipt(self._token, refused="it is too old", too_old=True)
        self._taken[peer] = coming.number
        return Receipt(self._token)

    def _missing(self, coming: _Coming) -> tuple[int, ...]:
        return tuple(chunk for chunk in range(self._layout.chunks) if chunk not in coming.here)

    def _make_room(self, peer: PeerId, now: float) -> bool:
        self._drop(peer)  # it has given that up
        self.tidy(now)
        return len(self._coming) < self._most

    def _drop(self, peer: PeerId) -> None:
        with self._lock:
            self._coming.pop(peer, None)

    def _answer(self, peer: PeerId, number: bytes, receipt: Receipt) -> None:
        data = write_receipt(receipt)
        self._links.send(peer, Header(kind=Kind.RECEIPT, round=number, length=len(data)), (data,))
