"""More connections to one peer, where the line to it is long, and loses packets or is wider than the kernel's buffers.

A connection takes a packet that is lost for a sign that the line is full, and slows down; how soon it is as fast as
before depends on how long an answer takes. So a long line on which a packet in a thousand is lost is nearly empty,
unless several connections share it. (With BBR, which a kernel may not have, one fills it.) And no more is under way
than the buffers of both ends hold: of a usual 4 MiB that is 24 MB/s where an answer takes 0.1 s, with BBR, too. Where
neither is so several are slower than one, as each has to find out how fast it may be.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from lightning_hivemind.engine.native.wire.connection import close, has_bbr, why
from lightning_hivemind.engine.native.wire.reach import Reach
from lightning_hivemind.engine.native.wire.speed import Line, line_of

log = logging.getLogger("lightning_hivemind")

#: a connection for each of these of a round trip, and at most so many
STEP_S, MOST = 0.010, 8
#: share of packets that is many, of how many it is judged, how often in a row: a full line loses some, too
LOSSY, PACKETS, IN_A_ROW = 3e-4, 2000, 3
#: the kernel's buffers hold more than that, if not as much as a long and wide line
BUFFERS_BYTES = 1 << 20
#: between two looks at the line, or attempts to connect
AGAIN_S = 1.0
#: after one that broke, or could not be made
BROKEN_S = 10.0
#: each of them has to carry so many bytes a second: with less, one piece of a chunk takes longer than silence may
LEAST_RATE = 128e3
PACKET_BYTES = 1400


class Lanes:
    """The connections to one peer, but for the first.

    Args:
        pump: sends on a connection until it breaks.
        outlets: to how many peers there are connections; they share this peer's line.
    """

    def __init__(self, reach: Reach, pump: Callable[[socket.socket], None], outlets: Callable[[], int]) -> None:
        self._reach, self._pump, self._outlets = reach, pump, outlets
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._connecting = False
        self._again_at = 0.0
        #: as of the last judgement, and how many in a row have found losses
        self._line: Line | None = None
        self._looked_at = 0.0
        self._bad = 0

    @property
    def connections(self) -> list[socket.socket]:
        with self._lock:
            return list(self._connections)

    def open_more(self, first: socket.socket) -> None:
        """One more, if the line of this one wants more than there are. Returns at once."""
        now = time.monotonic()
        with self._lock:
            if self._connecting or now < self._again_at:
                return
            if 1 + len(self._connections) >= self._wanted(first):
                self._again_at = now + AGAIN_S
                return
            self._connecting = True
        try:
            threading.Thread(target=self._run, name=f"to {self._reach.peer[-6:]}, too", daemon=True).start()
        except RuntimeError as error:  # as many threads as there may be: one connection will do
            log.debug("no further connection to %s: %s", self._reach.peer, why(error))
            self._not_now()

    def _run(self) -> None:
        try:
            sock = self._reach.another()
        except Exception as error:  # whatever it is, the first connection does not need this one
            log.debug("no further connection to %s: %s", self._reach.peer, why(error))
            self._not_now()
            return
        with self._lock:
            self._connecting = False
            self._connections.append(sock)
        try:
            self._pump(sock)
        finally:
            with self._lock:
                self._connections.remove(sock)
                self._again_at = time.monotonic() + BROKEN_S
            close(sock)

    def _not_now(self) -> None:
        with self._lock:
            self._connecting, self._again_at = False, time.monotonic() + BROKEN_S

    def _wanted(self, first: socket.socket) -> int:
        """How many connections make full use of the line that this one goes over."""
        line, before = line_of(first), self._line
        if line is None:
            return 1
        now = time.monotonic()
        if before is None or line.packets < before.packets:  # another connection
            self._line, self._looked_at = line, now
        elif (packets := line.packets - before.packets) >= PACKETS:
            rate = packets * PACKET_BYTES / max(1e-3, now - self._looked_at)
            self._line, self._looked_at = line, now
            lossy = line.lost - before.lost > LOSSY * packets and rate >= 2 * LEAST_RATE  # else it is only full
            much = rate * line.round_trip_s >= BUFFERS_BYTES  # else who reads is slow
            full = much and 2 * (line.full_s - before.full_s) > line.busy_s - before.busy_s
            self._bad = self._bad + 1 if full or (lossy and not has_bbr(first)) else 0
        return useful(line.round_trip_s, self._outlets()) if self._bad >= IN_A_ROW else 1


def useful(round_trip_s: float, outlets: int) -> int:
    """How many connections make full use of a line that loses packets, when it is shared by ``outlets``."""
    return max(1, min(MOST, 1 + int(round_trip_s / STEP_S)) // max(1, outlets))
