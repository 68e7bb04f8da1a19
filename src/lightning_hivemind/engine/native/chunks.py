"""Chunks on their way: between the exchanges of the rounds that this peer is, or was just, in, and the connections."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lightning_hivemind.engine.native.codecs import ChunkCodec
from lightning_hivemind.engine.native.early import EarlyRoom
from lightning_hivemind.engine.native.exchange import Exchange, check_length, encoded_bytes
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.actions import SendInput, SendResult
from lightning_hivemind.engine.native.protocol.lineage import Commit, PeerId
from lightning_hivemind.engine.native.protocol.trailing import MOST as MOST_LATE
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links

#: more is a peer that calls and never begins
MOST_EXCHANGES = 4 + MOST_LATE
#: rounds that were left
REMEMBERED = 64

Frame = tuple[PeerId, Header, memoryview]


class Chunks:
    """See the module. ``room`` is called by the threads that read connections, all else by that of the rounds."""

    def __init__(self, layout: Layout, codecs: Sequence[ChunkCodec], me: PeerId, memory: Memory, links: Links) -> None:
        self._layout, self._codecs, self._me, self._memory, self._links = layout, codecs, me, memory, links
        self._exchanges: dict[bytes, Exchange] = {}
        #: rounds of the last commits: some peers may still be waiting for their chunks
        self._decided: deque[bytes] = deque()
        #: rounds that this peer is not in any more
        self._over: tuple[bytes, ...] = ()
        #: results of a round that this peer has not joined yet, though it is in the plan, and the room for more
        self._early: list[Frame] = []
        self._early_room = EarlyRoom(memory, encoded_bytes(layout, codecs))

    def open(self, round_id: bytes, values: Tensor | None) -> list[Frame]:
        """This peer joins a round with ``values``: see :class:`.Exchange`. Returns what has come of it so far."""
        self._early_room.renew()
        early, self._early = self._early, []
        while len(self._exchanges) >= MOST_EXCHANGES:
            self._end(next(iter(self._exchanges)))
        self._exchanges[round_id] = Exchange(self._layout, self._codecs, self._me, values, self._memory)
        return [frame for frame in early if frame[1].round == round_id]

    def of(self, round_id: bytes) -> Exchange | None:
        """The exchange of that round, if this peer is in it."""
        return self._exchanges.get(round_id)

    def left_out(self, commit: Commit, *, complete: bool) -> Tensor | None:
        """See :meth:`.Exchange.left_out`."""
        exchange = self._exchanges.get(commit.round)
        return None if exchange is None else exchange.left_out(commit, complete=complete)

    def result(self, round_id: bytes, *, complete: bool) -> Tensor | None:
        """The average of a round that was committed, if it is ``complete`` here.

        Chunks that wait for a slow line go on to those that lack them, for as many rounds as those may be behind.
        """
        exchange = self._end(round_id)  # first: nobody is given its memory any more
        self._links.forget(round_id, Kind.INPUT)
        self._decided.append(round_id)
        if len(self._decided) > MOST_LATE:
            self._links.forget(self._decided.popleft())
        sending = self._links.sends(round_id, Kind.RESULT)
        return exchange.end(sending=sending) if complete and exchange is not None else None

    @property
    def owes(self) -> bool:
        """Whether some that are late with the results of the last steps do not have those of this peer yet."""
        return any(self._links.sends(round_id, Kind.RESULT) for round_id in tuple(self._decided))

    def drop(self, round_id: bytes) -> Exchange | None:
        """That round came to nothing, here at least."""
        exchange = self._end(round_id)
        self._links.forget(round_id)
        return exchange

    def _end(self, round_id: bytes) -> Exchange | None:
        self._over = (*self._over, round_id)[-REMEMBERED:]
        useless = [frame for frame in self._early if frame[1].round == round_id]
        if useless:
            self._early = [frame for frame in self._early if frame[1].round != round_id]
            self._early_room.give_back(sum(header.length for _, header, _ in useless))
        return self._exchanges.pop(round_id, None)

    def drop_all(self) -> None:
        for round_id in list(self._exchanges):
            self.drop(round_id)

    # ------------------------------------------------------------------ what comes

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        """Where a chunk is to be put; None where it is of a round that is over here, or of no use.

        It is asked for again, if it is wanted. Raises WireError: there can be no such chunk.
        """
        exchange = self._exchanges.get(header.round)
        if exchange is None:
            if header.kind is not Kind.RESULT:
                return None
            check_length(self._layout, self._codecs, header.chunk, header.length)
            # of a round that this peer may be about to join
            return None if header.round in self._over else self._early_room.take(header.length)
        if header.kind is Kind.INPUT:
            return exchange.room_for_input(header.chunk, peer, header.length)
        return exchange.room_for_result(header.chunk, header.version, peer, header.length)

    def take(self, peer: PeerId, header: Header, payload: memoryview) -> bool:
        """A chunk is in the place of :meth:`room`. False if its round is over meanwhile, or is not joined yet."""
        exchange = self._exchanges.get(header.round)
        if exchange is not None and header.kind is Kind.INPUT:
            exchange.keep(header.chunk, peer, payload)
        elif exchange is not None:
            exchange.take(header.chunk, header.version, peer, payload)
        elif header.round not in self._over:
            self._early.append((peer, header, payload))
        return exchange is not None

    # ------------------------------------------------------------------ what goes

    def sent_since(self, moment: float, round_id: bytes, peer: PeerId) -> bool:
        """Whether ``peer`` has been sent something of that round since then (``time.monotonic()``)."""
        exchange = self._exchanges.get(round_id)
        return exchange is not None and exchange.handed_over.get(peer, moment) > moment

    def send_input(self, action: SendInput) -> bool:
        """Send this peer's contribution to a chunk; True if it goes to this peer itself, and is there."""
        exchange = self._exchanges.get(action.round)
        if exchange is None:
            return False
        if action.to == self._me:
            exchange.keep_own(action.chunk)
            return True
        send_values(self._links, action.to, Kind.INPUT, action.round, action.chunk, exchange.input(action.chunk))
        exchange.handed_over[action.to] = time.monotonic()
        return False

    def send_result(self, action: SendResult) -> bytes | None:
        """Send a chunk that this peer has reduced; its digest, if this peer itself is to take it."""
        exchange = self._exchanges.get(action.round)
        if exchange is None:
            return None
        data, check = exchange.reduced(action.chunk)
        header = Header(
            kind=Kind.RESULT,
            round=action.round,
            chunk=action.chunk,
            version=action.version,
            length=len(data),
            checksum=check,
        )
        for peer in action.to:
            if peer != self._me:
                self._links.send(peer, header, (data,))
                exchange.handed_over[peer] = time.monotonic()
        return digest_from_checksum(check) if self._me in action.to else None


def send_values(links: Links, to: PeerId, kind: Kind, number: bytes, chunk: int, data: memoryview) -> None:
    """Send a peer's values of a chunk, encoded; of the round, or the parcel, with this number."""
    links.send(to, Header(kind=kind, round=number, chunk=chunk, length=len(data)), (data,))


def digest_from_checksum(check: int) -> bytes:
    """Of a chunk, as members compare it."""
    return check.to_bytes(4, "big")
