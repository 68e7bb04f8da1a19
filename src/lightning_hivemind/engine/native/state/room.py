"""Memory for a state that is fetched, made ready while its donor is still looked for.

For the system to map fresh memory may take longer than for the bytes to arrive.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

from lightning_hivemind.engine.native.memory import Memory, populate

#: times the parameters: what an optimizer keeps of each, and room
MOST_RESERVED = 4


class StateMemory:
    """See the module. Used by the training thread."""

    def __init__(self) -> None:
        self._prepared: Tensor | None = None

    @contextlib.contextmanager
    def prepared(self, size: int) -> Iterator[None]:
        """A state of at least so many bytes will be fetched within it."""
        self._prepared = _reserved(size)
        _populate_soon(self._prepared[:size])
        try:
            yield
        finally:
            self._prepared = None

    def take(self, size: int) -> Tensor:
        """uint8 CPU (size,), for one state."""
        prepared, self._prepared = self._prepared, None
        memory = prepared[:size] if prepared is not None and prepared.numel() >= size else Memory().bytes(size)
        _populate_soon(memory)
        return memory


def _reserved(size: int) -> Tensor:
    """uint8 CPU, for ``size`` bytes and what an optimizer keeps, of which nothing is known yet: only an address."""
    try:
        return Memory().bytes(MOST_RESERVED * size)
    except MemoryError:  # of a system that promises no more than it has
        return Memory().bytes(size)


def _populate_soon(memory: Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # as many threads as there may be: then it is mapped as it is written
        threading.Thread(target=populate, args=(memory,), name="lightning-hivemind-memory", daemon=True).start()
