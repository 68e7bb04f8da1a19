"""How fast this peer's line sends, so that a slow one is given less to reduce.

Linux counts, for every connection, the bytes that the other end has confirmed and the time in which something waited to
be sent. Of a short message that is the way there and back: only times in which much is sent say how fast a line is.
Connections that send at the same time share the line: their speeds add up to its own.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

#: bytes per second from which on lines are taken for equally fast; also of those of which nothing is known
FAST = 50e6
#: less says nothing: the kernel's buffers take it at once; but for what has taken so long all the same
LEAST_BYTES, LEAST_S, LEAST_IN_IT = 1 << 20, 1.0, 1 << 16
#: messages between two looks have less
MUCH_BYTES = 1 << 14
#: weight of the newest measurement
SMOOTHING = 0.5
#: of struct tcp_info (linux/tcp.h): bytes confirmed; microseconds with something to send; those of them in which the
#: other end had no room; bytes that the kernel has not sent yet
_ACKED, _BUSY, _NO_ROOM, _BYTES, _UNSENT = 120, 168, 176, 184, 144
#: packets sent again; the shortest round trip that was seen, in microseconds; packets with data; the usual round trip
_LOST, _ROUND_TRIP, _PACKETS, _ANSWER = 100, 148, 156, 68
#: milliseconds since something has arrived here
_HEARD = 52


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that arrived at the other end, the seconds that it took, and whether more of them wait in the kernel."""

    arrived: int
    busy_s: float
    waits: bool = False


class Speed:
    """See the module."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[socket.socket, Sent] = WeakKeyDictionary()
        #: of what was much, since the last measurement
        self._much: WeakKeyDictionary[socket.socket, Sent] = WeakKeyDictionary()
        self._rates: WeakKeyDictionary[socket.socket, float] = WeakKeyDictionary()

    def of(self, connections: Iterable[socket.socket]) -> float:
        """Bytes per second, at most :data:`FAST`, of a line with these connections to send on."""
        return min(sum(self._rates.get(sock, 0.0) for sock in connections), FAST) or FAST

    def look(self, connections: Iterable[socket.socket]) -> None:
        """What was sent since the last time; to be called several times a second."""
        for sock in connections:
            self._look(sock)

    def _look(self, sock: socket.socket) -> None:
        now = sent(sock)
        if now is None:
            return
        before, self._seen[sock] = self._seen.get(sock, Sent(0, 0.0)), now
        if not (before.waits or now.waits or now.arrived - before.arrived >= MUCH_BYTES):
            return
        much = self._much.get(sock, Sent(0, 0.0))
        count, busy_s = much.arrived + now.arrived - before.arrived, much.busy_s + now.busy_s - before.busy_s
        if count >= LEAST_BYTES or (count >= LEAST_IN_IT and busy_s >= LEAST_S):
            rate = count / max(busy_s, 1e-3)
            known = self._rates.get(sock, rate)
            self._rates[sock] = known + SMOOTHING * (rate - known)
            count, busy_s = 0, 0.0
        self._much[sock] = Sent(count, busy_s)


def sent(sock: socket.socket) -> Sent | None:
    """What it has sent so far; None if the system does not say."""
    if (info := _tcp_info(sock)) is None:
        return None
    acked, busy, no_room = (struct.unpack_from("=Q", info, at)[0] for at in (_ACKED, _BUSY, _NO_ROOM))
    return Sent(acked, max(0.0, (busy - no_room) / 1e6), struct.unpack_from("=I", info, _UNSENT)[0] > 0)


def silent_s(sock: socket.socket) -> float | None:
    """For how long nothing has arrived, of a record that is not whole either; None if the system does not say."""
    info = _tcp_info(sock)
    return None if info is None else float(struct.unpack_from("=I", info, _HEARD)[0]) / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """``round_trip_s`` without what waits on the line, ``answer_s`` with it; packets sent, and those sent again."""

    round_trip_s: float
    answer_s: float
    packets: int
    lost: int


def line_of(sock: socket.socket) -> Line | None:
    """The line that it goes over, as seen so far; None if the system does not say."""
    if (info := _tcp_info(sock)) is None:
        return None
    places = (_LOST, _ROUND_TRIP, _PACKETS, _ANSWER)
    lost, round_trip, packets, answer = (struct.unpack_from("=I", info, at)[0] for at in places)
    return Line(round_trip_s=round_trip / 1e6, answer_s=answer / 1e6, packets=packets, lost=lost)


def _tcp_info(sock: socket.socket) -> bytes | None:
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except (OSError, AttributeError):
        return None
    return info if len(info) >= _BYTES else None
