"""Did this process stand still? Suspended, or swapped out, it has missed what the others decided meanwhile.

A thread looks at the clock a few times per second. So a long piece of work of one other thread is not taken for it.
"""

from __future__ import annotations

import sys
import threading
import time


def time_with_sleep() -> float:
    """Seconds that go on while the machine sleeps, unlike ``time.monotonic``; whatever is done to its clock."""
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Wakefulness:
    """See the module. ``longest_s``: between two looks at the clock, without having stood still."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._last = time_with_sleep()
        self._stood_still = False
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        self.stood_still()
        threading.Thread(target=self._watch, name="lightning-hivemind-awake", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def stood_still(self) -> bool:
        """Whether it did since this was asked last."""
        with self._lock:
            self._look()
            found, self._stood_still = self._stood_still, False
            return found

    def _watch(self) -> None:
        while not self._stop.wait(self._longest_s / 4):
            with self._lock:
                self._look()
                self._last = time_with_sleep()

    def _look(self) -> None:
        now = time_with_sleep()
        if now - self._last > self._longest_s:
            self._stood_still, self._last = True, now
