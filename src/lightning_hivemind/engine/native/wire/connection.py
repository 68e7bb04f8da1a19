"""One connection, used in one direction: frames are written at one end and read at the other.

A TLS socket that two threads use both ways has known defects in Python, and one thread per direction is fastest anyway.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.sink import Payload, PeerId, Sink
from lightning_hivemind.errors import WireError

#: the default caps one flow near 125 Mbit/s at 100 ms
BUFFER_BYTES = 4 << 20
#: so often it is said that parts of a frame arrive
TOLD_S = 0.05
#: a frame without room is read in pieces of this size, and dropped
DRAIN_BYTES = 64 << 10
TOKEN_BYTES = 32


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Options of every connection."""
    sock.settimeout(timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION"):
        # a loss on the way costs cubic most of its speed; a kernel without BBR keeps what it has
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def close(sock: socket.socket) -> None:
    """From any thread: whoever reads or writes it wakes up with an error."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()


def write(sock: socket.socket, header: Header, payload: Payload = ()) -> None:
    """Send one frame. Raises OSError when the connection is gone."""
    parts: Payload = (header.pack(), *payload)
    if sum(len(part) for part in payload) <= DRAIN_BYTES:
        parts = (b"".join(parts),)  # one packet, not several
    for part in parts:
        left = memoryview(part)
        while left:  # not sendall, whose timeout is for all of it: a slow connection is not a dead one
            left = left[sock.send(left) :]


def read_exactly(sock: socket.socket, memory: memoryview) -> None:
    """Fill ``memory``. Raises OSError when the connection is gone."""
    position = 0
    while position < len(memory):
        count = sock.recv_into(memory[position:])
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        position += count


def read_frame(sock: socket.socket, peer: PeerId, sink: Sink, scratch: bytearray) -> None:
    """Read one frame and hand it over.

    Raises:
        OSError: the connection is gone, or silent for too long.
        WireError: what came is no frame, or one that cannot be.
    """
    space = memoryview(scratch)
    read_exactly(sock, space[:HEADER_BYTES])
    header = Header.unpack(space[:HEADER_BYTES])
    if header.kind is Kind.PING and header.length == 0:
        return
    room = sink.room(peer, header)
    if room is not None and len(room) != header.length:
        raise WireError(f"a frame of {header.length} bytes where {len(room)} belong")
    left, position, told = header.length, 0, 0.0
    while left:
        target = room[position:] if room is not None else space[: min(left, len(space))]
        count = sock.recv_into(target)
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        left, position = left - count, position + count
        if (now := time.monotonic()) >= told + TOLD_S:
            told = now
            sink.moved(peer, header)
    sink.arrived(peer, header, room)


def why(error: BaseException) -> str:
    """A short reason for a user."""
    if isinstance(error, TimeoutError):
        return "silent for too long"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return str(error) or type(error).__name__
