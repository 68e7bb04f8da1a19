"""How fast this peer's line sends, so that a slow one is given less to reduce.

Linux counts, for every connection, the bytes that the other end has confirmed and the time in which something waited to
be sent. Connections that send at the same time share the line: their speeds add up to its own.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

#: bytes per second from which on lines are taken for equally fast; also of those of which nothing is known
FAST = 50e6
#: less says nothing: the kernel's buffers take it at once
LEAST_BYTES = 1 << 20
#: weight of the newest measurement
SMOOTHING = 0.5
#: of struct tcp_info (linux/tcp.h): bytes confirmed; microseconds with something to send; those of them in which the
#: other end had no room
_ACKED, _BUSY, _NO_ROOM, _BYTES = 120, 168, 176, 184
#: packets sent again; the shortest round trip that was seen, in microseconds; packets with data; the usual round trip
_LOST, _ROUND_TRIP, _PACKETS, _ANSWER = 100, 148, 156, 68


class Speed:
    """See the module."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[socket.socket, tuple[int, float]] = WeakKeyDictionary()
        self._rates: WeakKeyDictionary[socket.socket, float] = WeakKeyDictionary()

    def of(self, connections: Iterable[socket.socket]) -> float:
        """Bytes per second, at most :data:`FAST`, of a line with these connections to send on."""
        known = 0.0
        for sock in connections:
            self._measure(sock)
            known += self._rates.get(sock, 0.0)
        return min(known, FAST) or FAST

    def _measure(self, sock: socket.socket) -> None:
        found = sent(sock)
        if found is None:
            return
        before = self._seen.setdefault(sock, (0, 0.0))
        count, busy_s = found[0] - before[0], found[1] - before[1]
        if count >= LEAST_BYTES:
            self._seen[sock] = found
            rate = count / max(busy_s, 1e-3)
            known = self._rates.get(sock, rate)
            self._rates[sock] = known + SMOOTHING * (rate - known)


def sent(sock: socket.socket) -> tuple[int, float] | None:
    """Bytes that arrived at the other end, and the seconds that it took; None if the system does not say."""
    if (info := _tcp_info(sock)) is None:
        return None
    acked, busy, no_room = (struct.unpack_from("=Q", info, at)[0] for at in (_ACKED, _BUSY, _NO_ROOM))
    return acked, max(0.0, (busy - no_room) / 1e6)


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
