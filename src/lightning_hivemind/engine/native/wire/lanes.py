"""More connections to one peer, where the line to it is long.

A connection takes a packet that is lost for a sign that the line is full, and slows down; how soon it is as fast as
before depends on how long an answer takes. So a long line on which a packet in a thousand is lost is nearly empty,
unless several connections share it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from lightning_hivemind.engine.native.wire.connection import close, minds_losses, why
from lightning_hivemind.engine.native.wire.reach import Gone, Reach
from lightning_hivemind.engine.native.wire.speed import round_trip_s
from lightning_hivemind.errors import LightningHivemindError

log = logging.getLogger("lightning_hivemind")

#: a connection for each of these of a round trip, and at most so many; where losses matter, and where they do not
STEP_S, MOST = 0.010, 8
CALM_STEP_S, MOST_CALM = 0.025, 4
#: between two looks at the round trip, or attempts to connect
AGAIN_S = 1.0


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
            if 1 + len(self._connections) >= wanted(first, self._outlets()):
                self._again_at = now + AGAIN_S
                return
            self._connecting = True
        threading.Thread(target=self._run, name=f"to {self._reach.peer[-6:]}, too", daemon=True).start()

    def _run(self) -> None:
        try:
            sock = self._reach.another()
        except (OSError, LightningHivemindError, Gone) as error:
            log.debug("no further connection to %s: %s", self._reach.peer, why(error))
            with self._lock:
                self._connecting, self._again_at = False, time.monotonic() + AGAIN_S
            return
        with self._lock:
            self._connecting = False
            self._connections.append(sock)
        try:
            self._pump(sock)
        finally:
            with self._lock:
                self._connections.remove(sock)
            close(sock)


def wanted(sock: socket.socket, outlets: int) -> int:
    """How many connections make full use of the line that this one goes over, when it is shared by ``outlets``."""
    round_trip = round_trip_s(sock)
    return useful(round_trip, outlets, minds_losses=minds_losses(sock)) if round_trip is not None else 1


def useful(round_trip: float, outlets: int, *, minds_losses: bool = True) -> int:
    """The same for a line of which this is known; ``round_trip`` in seconds."""
    step_s, most = (STEP_S, MOST) if minds_losses else (CALM_STEP_S, MOST_CALM)
    return max(1, min(most, 1 + int(round_trip / step_s)) // max(1, outlets))
