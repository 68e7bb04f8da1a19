"""Reads the frames of one connection and hands them over; messages come between the pieces of a long frame."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass, replace

from lightning_hivemind.engine.native.wire.checksum import Checksum
from lightning_hivemind.engine.native.wire.connection import DRAIN_BYTES, read_exactly, receive
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, PIECE_BYTES, VALUES, Header, Kind
from lightning_hivemind.engine.native.wire.sink import PeerId, Sink
from lightning_hivemind.errors import WireError

log = logging.getLogger("lightning_hivemind")

#: so often it is said that parts of a frame arrive
TOLD_S = 0.05


@dataclass(slots=True)
class _Frame:
    """What has come of a frame: ``position`` bytes of it; without ``room`` they were dropped."""

    header: Header
    room: memoryview | None
    position: int = 0
    told: float = 0.0
    check: Checksum | None = None

    @property
    def left(self) -> int:
        return self.header.length - self.position


class Reader:
    """See the module. Used by one thread.

    Args:
        verifies: values are only handed over if their checksum is theirs: nothing else protects them.
    """

    def __init__(self, sock: socket.socket, peer: PeerId, sink: Sink, *, verifies: bool) -> None:
        self._sock, self._peer, self._sink, self._verifies = sock, peer, sink, verifies
        self._scratch, self._head = memoryview(bytearray(DRAIN_BYTES)), memoryview(bytearray(HEADER_BYTES))
        #: of which more is to come
        self._long: _Frame | None = None

    def read(self) -> None:
        """Read one frame, or a piece of one, and hand it over once it is whole.

        Raises:
            OSError: the connection is gone, or silent for too long.
            WireError: what came is no frame, or one that cannot be.
        """
        read_exactly(self._sock, self._head)
        header = Header.unpack(self._head)
        if header.kind is Kind.PING and header.length == 0:
            return
        if header.kind is Kind.MORE:
            long = self._long
            if long is None or header.in_pieces or not 0 < header.length <= min(long.left, PIECE_BYTES):
                raise WireError("a piece of a frame that was not begun, or is whole")
            self._fill(long, header.length, header.checksum)
            return
        if in_pieces := header.in_pieces:
            if self._long is not None:
                raise WireError("a long frame within another one")
            header = replace(header, in_pieces=False)
        elif header.length > PIECE_BYTES:
            raise WireError(f"a frame of {header.length} bytes that is not in pieces")
        room = self._sink.room(self._peer, header)
        if room is not None and len(room) != header.length:
            raise WireError(f"a frame of {header.length} bytes where {len(room)} belong")
        frame = _Frame(header, room)
        if self._verifies and room is not None and header.kind in VALUES:
            frame.check = Checksum(room)
        if in_pieces:
            self._long = frame
        self._fill(frame, 0 if in_pieces else header.length)

    def _fill(self, frame: _Frame, count: int, check: int = 0) -> None:
        """The next ``count`` bytes of it; ``check``: the checksum of all of it, if its own header has none."""
        end = frame.position + count
        while frame.position < end:
            target = frame.room[frame.position : end] if frame.room is not None else self._scratch
            frame.position += receive(self._sock, target[: end - frame.position])
            if (now := time.monotonic()) >= frame.told + TOLD_S:
                frame.told = now
                self._sink.moved(self._peer, frame.header)
        if frame.check is not None:
            frame.check.look(end)  # now, while it is in the processor's cache
            if not frame.left and frame.check.value != (frame.header.checksum or check):
                log.warning("a chunk of peer %s was damaged on the way, and is asked for again", self._peer)
                frame.room = None
        if not frame.left:
            if self._long is frame:
                self._long = None
            self._sink.arrived(self._peer, frame.header, frame.room)
