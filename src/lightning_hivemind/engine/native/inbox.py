"""What the rounds' thread has to see to, in order. Who sends faster than that is read no further until it is done."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from lightning_hivemind.engine.native.protocol.lineage import PeerId

#: of what one peer has sent, that may wait at least; a larger piece waits alone
WAITING_BYTES = 64 << 20
#: what an event counts at least: so many short messages would take a while, too
EVENT_BYTES = 16 << 10
#: what is due waits so long for events without end; on a busy machine what was said in time is read a little late
LATE_S = 0.2

Event = Callable[[float], None]


class Inbox:
    """One thread takes, any thread gives. ``limit``: of bytes that wait of one peer.

    More than a peer sends of its own accord: it takes a connection that is not read for dead after two seconds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._events: deque[tuple[Event, PeerId | None, int, float]] = deque()
        self._waiting: Counter[PeerId] = Counter()
        self._closed = False

    def put(self, event: Event) -> None:
        """An event of this peer's own."""
        with self._changed:
            self._events.append((event, None, 0, time.monotonic()))
            self._changed.notify_all()

    def put_from(self, peer: PeerId, size: int, event: Event) -> None:
        """``size`` bytes that ``peer`` has sent; in the thread that reads its connection, which may have to wait."""
        size = max(size, EVENT_BYTES)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._waiting[peer] or self._waiting[peer] + size <= self._limit
            )
            self._waiting[peer] += size
            self._events.append((event, peer, size, time.monotonic()))
            self._changed.notify_all()

    def take(self, until: float) -> Event | None:
        """The next; None if there is none by then, on :func:`time.monotonic`, or :data:`LATE_S` later.

        Then something else is due, which judges by all that came before, and which nobody who floods can hold up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events, max(0.0, until - time.monotonic()))
            if not self._events or self._events[0][3] > until + LATE_S:
                return None
            event, peer, size, _ = self._events.popleft()
            if peer is not None:
                self._waiting[peer] -= size
                if not self._waiting[peer]:
                    del self._waiting[peer]
                self._changed.notify_all()
            return event

    def close(self) -> None:
        """Nobody takes any more: nobody waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
