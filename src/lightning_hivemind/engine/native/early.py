"""Memory for chunks that come before this peer knows what they belong to: a round to join, a newer plan."""

from __future__ import annotations

import threading

from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.memory import Memory


class EarlyRoom:
    """Room for ``size_bytes`` of such chunks, whoever sends them. Its methods may be called from any thread.

    What found none is asked for again, if it is wanted then.
    """

    def __init__(self, memory: Memory, size_bytes: int) -> None:
        self._memory, self._size_bytes = memory, size_bytes
        self._left_bytes = size_bytes
        self._lock = threading.Lock()

    def take(self, length: int) -> memoryview | None:
        """Memory for so many bytes; None: there is no more, for now."""
        with self._lock:
            if length > self._left_bytes:
                return None
            self._left_bytes -= length
        return memory_of(self._memory.bytes(length))

    def give_back(self, length: int) -> None:
        """So many bytes turned out to be of no use."""
        with self._lock:
            self._left_bytes += length

    def renew(self) -> None:
        """All that came was for what is known now: there is room for what comes next."""
        with self._lock:
            self._left_bytes = self._size_bytes
