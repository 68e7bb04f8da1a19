"""Memory for a state that is fetched, made ready while its donor is still looked for.

For the system to map fresh memory may take longer than for the bytes to arrive.
"""

from __future__ import annotations

import contextlib
import threading

from torch import Tensor

from lightning_hivemind.engine.native.host import host_bytes
from lightning_hivemind.engine.native.memory import Memory, populate

#: times the parameters: what an optimizer keeps of each, and room
MOST_RESERVED = 4
#: pieces for what comes next: the first sum of gradients, and the first average
SPARES = 2


class StateMemory:
    """See the module. Used by the training thread.

    Args:
        spares: gets what a state does not need any more, :data:`SPARES` pieces of ``spare_bytes``: others would wait
            for this peer while the system maps them in its first round.
    """

    def __init__(self, spares: Memory | None = None, spare_bytes: int = 0) -> None:
        self._spares = spares
        self._spare_bytes = 0 if spares is None or spares.pinned else spare_bytes
        self._prepared: Tensor | None = None
        #: bytes of it that are made ready
        self._ready = 0

    def prepare(self, size: int) -> None:
        """A state of at least so many bytes will be fetched."""
        needed = max(size, SPARES * self._spare_bytes)
        self._prepared = _reserved(size, needed)
        self._ready = min(self._prepared.numel(), needed)
        _populate_soon(self._prepared[: self._ready])

    def release(self) -> None:
        """None is fetched any more for which memory was prepared."""
        self._prepared, self._ready = None, 0

    def give_back(self, memory: Tensor) -> None:
        """A state that is not used any more, as :meth:`take` gave it."""
        if self._spares is not None:
            prepared = host_bytes(0).set_(memory.untyped_storage())  # also beyond this state
            self._spares.give(prepared, self._spare_bytes, SPARES)

    def take(self, size: int) -> Tensor:
        """uint8 CPU (size,), for one state."""
        prepared, ready = self._prepared, self._ready
        self.release()
        if prepared is None or prepared.numel() < size:
            prepared, ready = Memory().bytes(size), 0
        _populate_soon(prepared[ready:size])
        return prepared[:size]


def _reserved(size: int, needed: int) -> Tensor:
    """uint8 CPU, for ``size`` bytes and what an optimizer keeps, of which nothing is known yet: only an address."""
    try:
        return Memory().bytes(max(MOST_RESERVED * size, needed))
    except MemoryError:  # of a system that promises no more than it has
        return Memory().bytes(size)


def _populate_soon(memory: Tensor) -> None:
    if not memory.numel():
        return
    with contextlib.suppress(RuntimeError):  # as many threads as there may be: then it is mapped as it is written
        threading.Thread(target=populate, args=(memory,), name="lightning-hivemind-memory", daemon=True).start()
