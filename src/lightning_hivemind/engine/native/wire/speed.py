"""How fast this peer's line sends, so that a slow one is given less to reduce.

Linux counts, for every connection, the bytes that the other end has confirmed and the time in which something waited to
be sent. Of a short message that is the way there and back: only times in which much is sent say how fast a line is.
Connections to several peers share the line: it has sent what all of them have, in the time in which any of them was
busy. But what goes to one of several only, or to such as are known to be slow, waits for their lines.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from lightning_hivemind.engine.native.wire.sink import PeerId

#: bytes per second from which on lines are taken for equally fast; also of those of which nothing is known
FAST = 50e6
#: less says nothing: the kernel's buffers take it at once; but for what has taken so long all the same
LEAST_BYTES, LEAST_S, LEAST_IN_IT = 1 << 20, 1.0, 1 << 16
#: messages between two looks have less
MUCH_BYTES = 1 << 14
#: what was seen in so many busy seconds counts as much as all before
HALF_S = 2.0
#: the line of a peer to which so many times less is sent than to another one is the reason
SLOWER = 4
#: of struct tcp_info (linux/tcp.h): bytes confirmed; microseconds with something to send; those of them in which the
#: other end had no room, or this one none for more that was to be sent; bytes that the kernel has not sent yet
_ACKED, _BUSY, _NO_ROOM, _NONE_HERE, _BYTES, _UNSENT = 120, 168, 176, 184, 192, 144
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
        self._meters: WeakKeyDictionary[socket.socket, _Meter] = WeakKeyDictionary()
        #: of what goes to several peers at a time
        self._line = _Meter()

    def of_line(self, peers: Iterable[Collection[socket.socket]]) -> float:
        """Bytes per second, at most :data:`FAST`, that can be sent to peers with these connections together."""
        quickest = max((self._known(connections) for connections in peers), default=0.0)
        return min(max(self._line.rate, quickest), FAST) or FAST

    def to(self, connections: Collection[socket.socket]) -> float:
        """Bytes per second, at most :data:`FAST`, to the peer with these connections."""
        return min(self._known(connections), FAST) or FAST

    def slow_to(self, peers: Mapping[PeerId, Collection[socket.socket]]) -> list[PeerId]:
        """Those of the peers with these connections to whom much less is sent than to another one."""
        rates = {peer: self.to(connections) for peer, connections in peers.items()}
        quickest = max(rates.values(), default=0.0)
        return [peer for peer, rate in rates.items() if SLOWER * rate < quickest]

    def look(self, peers: Iterable[Collection[socket.socket]]) -> None:
        """What was sent to peers with these connections since the last time; to be called several times a second."""
        ways = [(self._passed(connections), self._known(connections)) for connections in peers]
        busy_s = max((passed.busy_s for passed, _ in ways), default=0.0)
        if not busy_s:
            return
        quickest = max(rate for _, rate in ways)
        together = [rate for passed, rate in ways if 2 * passed.busy_s >= busy_s]
        if len(ways) == 1 or (len(together) > 1 and any(not 0.0 < SLOWER * rate < quickest for rate in together)):
            self._line.add(sum(passed.arrived for passed, _ in ways), busy_s)

    def _known(self, connections: Iterable[socket.socket]) -> float:
        """The rate to the peer with these; 0 as long as too little was sent."""
        return sum(meter.rate for sock in connections if (meter := self._meters.get(sock)))

    def _passed(self, connections: Iterable[socket.socket]) -> Sent:
        """What went over them since the last time, as far as it was much."""
        count, longest_s = 0, 0.0
        for sock in connections:
            if (now := sent(sock)) is None:
                continue
            before, self._seen[sock] = self._seen.get(sock, Sent(0, 0.0)), now
            arrived, busy_s = now.arrived - before.arrived, now.busy_s - before.busy_s
            if before.waits or now.waits or arrived >= MUCH_BYTES:
                self._meters.setdefault(sock, _Meter()).add(arrived, busy_s)
                count, longest_s = count + arrived, max(longest_s, busy_s)
        return Sent(count, longest_s)


class _Meter:
    """The rate at which something is sent; what was seen last counts most."""

    def __init__(self) -> None:
        self._count, self._busy_s = 0.0, 0.0
        self._knows = False

    def add(self, count: float, busy_s: float) -> None:
        keep = 0.5 ** (busy_s / HALF_S) if self._knows else 1.0
        self._count, self._busy_s = keep * self._count + count, keep * self._busy_s + busy_s
        self._knows |= self._count >= LEAST_BYTES or (self._count >= LEAST_IN_IT and self._busy_s >= LEAST_S)

    @property
    def rate(self) -> float:
        """Bytes per second; 0 as long as too little was sent."""
        return self._count / max(self._busy_s, 1e-3) if self._knows else 0.0


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
    """``round_trip_s`` without what waits on the line, ``answer_s`` with it; packets sent, and those sent again.

    ``busy_s`` it had something to send, and ``full_s`` of it as much was under way as the buffers of both ends hold.
    """

    round_trip_s: float
    answer_s: float
    packets: int
    lost: int
    busy_s: float = 0.0
    full_s: float = 0.0


def line_of(sock: socket.socket) -> Line | None:
    """The line that it goes over, as seen so far; None if the system does not say."""
    if (info := _tcp_info(sock)) is None:
        return None
    places = (_LOST, _ROUND_TRIP, _PACKETS, _ANSWER)
    lost, round_trip, packets, answer = (struct.unpack_from("=I", info, at)[0] for at in places)
    busy, no_room, none_here = (struct.unpack_from("=Q", info, at)[0] / 1e6 for at in (_BUSY, _NO_ROOM, _NONE_HERE))
    return Line(
        round_trip_s=round_trip / 1e6,
        answer_s=answer / 1e6,
        packets=packets,
        lost=lost,
        busy_s=busy,
        full_s=no_room + none_here,
    )


def _tcp_info(sock: socket.socket) -> bytes | None:
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except (OSError, AttributeError):
        return None
    return info if len(info) >= _BYTES else None
