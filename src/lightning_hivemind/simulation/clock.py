"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Runs callbacks in the order of their times; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call ``action`` at ``time``, or now if that is past."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self, until: float) -> None:
        """Let everything happen that is due before ``until``."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until
