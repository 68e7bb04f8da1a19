"""Did this process stand still? Suspended, or swapped out, it has missed what the others decided meanwhile.

A thread looks at the clock a few times per second. So a long piece of work of one other thread is not taken for it.
"""

from __future__ import annotations

import threading
import time


class Wakefulness:
    """See the module. ``longest_s``: between two looks at the clock, without having stood still."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._last = time.monotonic()
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
                self._last = time.monotonic()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._last > self._longest_s:
            self._stood_still, self._last = True, now
