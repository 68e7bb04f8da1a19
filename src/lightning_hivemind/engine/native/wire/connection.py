"""One connection, used in one direction: frames are written at one end and read at the other.

A TLS socket that two threads use both ways has known defects in Python, and one thread per direction is fastest anyway.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace

from lightning_hivemind.engine.native.wire.checksum import Checksum
from lightning_hivemind.engine.native.wire.frames import PIECE_BYTES, VALUES, Header, more
from lightning_hivemind.engine.native.wire.sink import Payload
from lightning_hivemind.engine.native.wire.speed import Sent, line_of, sent, silent_s
from lightning_hivemind.network.inherited import not_inherited

#: that waits before a stream which libp2p carries: messages wait behind it
CARRIED_BYTES = 64 << 10
#: given to TLS at once, which counts the time-out for all of it: a slow connection is not a dead one
TLS_BYTES = 64 << 10
#: of a payload that are given to a socket at once: systems take no more than 1024
MOST_PARTS = 512
#: of a round trip: a line in the same house, which loses nothing but what is too much for it
NEAR_S = 1e-3
#: of an answer: one from far, or over a full line; of an answer beyond the round trip: a full one
FULL_S = 20e-3
#: bytes per second for one connection: less is a thin line, or many share it
THIN = 125e3
#: of a slow line: so long takes a piece of what is long, behind which messages wait, but for very slow ones
PIECE_S, LEAST_PIECE_BYTES = 0.03, 16 << 10
#: by which it is measured
LEAST_BYTES = 256 << 10
#: a frame without room is read in pieces of this size, and dropped
DRAIN_BYTES = 64 << 10
TOKEN_BYTES = 32


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Options of every connection, once it is made."""
    not_inherited(sock).settimeout(timeout_s)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CARRIED_BYTES)
        return  # libp2p carries it, and what it does with TCP is its own affair
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _control(sock, by_loss=True)
    _hold_at_most(sock, PIECE_BYTES)


def _hold_at_most(sock: socket.socket, size: int) -> None:
    """What waits in the socket holds up messages."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)


def break_if_unheard(sock: socket.socket) -> None:
    """When nothing that is sent was confirmed for twice its time-out: a router that has forgotten it drops all of it.

    The system's buffer takes short frames all the same, and would not give up for a quarter of an hour.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * (sock.gettimeout() or 0)))


class Follower:
    """Keeps a connection fit for its line, as that turns out to be."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seen, self._lost, self._thin = sent(sock), 0, False
        #: of the pieces in which something long is written
        self.piece_bytes = PIECE_BYTES

    def look(self) -> None:
        """Before something long."""
        now, before = sent(self._sock), self._seen
        if now is None or before is None or now.arrived - before.arrived < LEAST_BYTES:
            return
        self._seen = now
        rate = (now.arrived - before.arrived) / max(now.busy_s - before.busy_s, 1e-3)
        self._choose_control(rate)
        size = min(PIECE_BYTES, max(LEAST_PIECE_BYTES, int(PIECE_S * rate)))
        if size != self.piece_bytes:
            self.piece_bytes = size
            _hold_at_most(self._sock, size)

    def _choose_control(self, rate: float) -> None:
        """Who decides how much is on the way at a time: cubic, until it is known that BBR does better.

        A loss costs cubic most of its speed, and it fills whatever can be filled, behind which messages wait. But where
        an answer comes at once, BBR's clock takes up to twice the processor's time; and on a thin line several of BBR
        lose so much to one another, above all as they begin, that one hears nothing for seconds and is taken for dead.
        """
        if (line := line_of(self._sock)) is None:
            return
        full = line.answer_s > line.round_trip_s + FULL_S
        loses = line.round_trip_s >= NEAR_S and line.lost > self._lost
        self._lost = line.lost
        self._thin = rate < THIN and (full or self._thin)
        if self._thin:
            _control(self._sock, by_loss=True)
        elif loses or (line.answer_s > FULL_S and rate >= THIN):
            _control(self._sock, by_loss=False)


def _control(sock: socket.socket, *, by_loss: bool) -> None:
    """Cubic, or BBR. The kernel's own choice, if it is another than BBR, stands for cubic; a lack changes nothing."""
    if hasattr(socket, "TCP_CONGESTION") and by_loss == has_bbr(sock):
        for name in (b"cubic", b"reno") if by_loss else (b"bbr",):  # reno is allowed to everybody
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                break


def has_bbr(sock: socket.socket) -> bool:
    """Whether it is BBR's: a lost packet does not slow this connection down."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
    except (OSError, AttributeError):
        return False


def wake(sock: socket.socket) -> None:
    """End a connection that another thread reads or writes: it gets an error, and closes it.

    Were it closed here, a new connection could have its number before that thread has noticed, and TLS would write into
    that one.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def has_ended(sock: socket.socket) -> bool:
    """Whether the other end has closed it, or the other end's system has. (Where the system says so without a read.)"""
    return _happens(sock, getattr(select, "POLLRDHUP", 0)) is not False


def close(sock: socket.socket) -> None:
    """End a connection that no other thread uses."""
    wake(sock)
    with contextlib.suppress(OSError):
        sock.close()


def write(sock: socket.socket, header: Header, payload: Payload = ()) -> None:
    """Send one frame. Raises OSError when the connection is gone.

    The time-out is for a line that stands still: nothing arrives from one to the next. One that is slow, or shared by
    many peers, may take several for what is given to TLS at once, which cannot be taken back.
    """
    left: list[memoryview | bytes] = [header.pack(), *payload]
    if sum(map(len, payload)) <= DRAIN_BYTES:
        left = [b"".join(left)]  # one packet, not several
    encrypts = isinstance(sock, ssl.SSLSocket)
    now: Sent | None = None  # to ask the system before each piece costs more than its checksum
    while left:  # not sendall, whose timeout is for all of it
        try:
            count = sock.send(memoryview(left[0])[:TLS_BYTES]) if encrypts else sock.sendmsg(left[:MOST_PARTS])
        except TimeoutError:
            before, now = now, sent(sock)
            if now is None or (before is not None and now.arrived <= before.arrived):
                raise
            continue
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = memoryview(left[0])[count:]


def pieces(
    header: Header, payload: Payload, most: int = PIECE_BYTES, *, sums: bool = False
) -> Iterator[tuple[Header, Payload]]:
    """A frame as it is written: a long one in pieces of ``most`` bytes behind it, between which messages may go.

    ``sums``: values (of one part) with their checksum, in the last header if it is not in the first. Each piece is
    added to it just after it was written, while it is in the processor's cache.
    """
    check: Checksum | None = None
    if sums and header.kind in VALUES and not header.checksum:
        (values,) = payload
        check = Checksum(memoryview(values))
    if header.length <= most:
        yield (header if check is None else replace(header, checksum=check.value)), payload
        return
    yield replace(header, in_pieces=True), ()
    piece: list[memoryview] = []
    room, end = most, 0
    for part in payload:
        left = memoryview(part)
        while left:
            piece.append(left[:room])
            end += len(piece[-1])
            room, left = room - len(piece[-1]), left[room:]
            is_last = end == header.length
            if is_last or not room:
                yield more(most - room, check.value if check is not None and is_last else 0), piece
                piece, room = [], most
                if check is not None:
                    check.look(end)
    if piece:  # there is more than the header says: the other end refuses it
        yield more(most - room), piece


def receive(sock: socket.socket, memory: memoryview) -> int:
    """Some bytes into ``memory``; returns how many.

    Raises OSError when the connection is gone, or nothing comes for as long as its time-out. (TLS's own is for a whole
    record, which may take longer over a slow line.)
    """
    while True:
        try:
            count = sock.recv_into(memory)
        except TimeoutError:
            silent, limit_s = silent_s(sock), sock.gettimeout()
            if silent is None or limit_s is None or not _comes(sock, limit_s - silent):
                raise
            continue
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        return count


def _comes(sock: socket.socket, within_s: float) -> bool:
    """Whether there is anything to read, of a record that is not whole either; waits for it."""
    return bool(_happens(sock, select.POLLIN, within_s))


def _happens(sock: socket.socket, event: int, within_s: float = 0.0) -> bool | None:
    """Whether that does, or the connection ends; None if it was closed here meanwhile."""
    poll = select.poll()
    try:
        poll.register(sock, event)
        return bool(poll.poll(1e3 * max(0.0, within_s)))
    except (OSError, ValueError):
        return None


def read_exactly(sock: socket.socket, memory: memoryview) -> None:
    """Fill ``memory``. Raises as :func:`receive`."""
    position = 0
    while position < len(memory):
        position += receive(sock, memory[position:])


def why(error: BaseException) -> str:
    """A short reason for a user."""
    if isinstance(error, TimeoutError):
        return "silent for too long"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return str(error) or type(error).__name__
