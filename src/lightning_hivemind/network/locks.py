"""Locks that a killed process has taken with it.

hivemind's futures write to the trainer's one pipe under locks that all its processes share. A process that is killed in
the middle of a word (a DHT process that did not end in time, the out-of-memory killer) holds its lock for good: nothing
that is forked from that trainer later can answer, and every network it starts from then on is up and says nothing.
Can go when hivemind's futures have no locks between processes.
"""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

from hivemind.utils.mpfuture import MPFuture, SharedBytes

log = logging.getLogger("lightning_hivemind")

#: A word takes microseconds; who holds a lock so long is gone.
_HELD_S = 1.0
_LOCKS: tuple[tuple[Any, str], ...] = (
    (MPFuture, "_initialization_lock"),
    (MPFuture, "_update_lock"),
    (SharedBytes, "_lock"),
)


def free_locks() -> None:
    """Put new locks in the place of those that nobody gives back; for processes that are forked from now on.

    Half a word may lie in the pipe, too: where nobody else uses it there is a new one.
    """
    for owner, name in _LOCKS:
        lock = getattr(owner, name)
        if lock.acquire(timeout=_HELD_S):
            lock.release()
            continue
        log.debug("%s.%s was held by a process that is gone", owner.__name__, name)
        if not multiprocessing.active_children():
            MPFuture.reset_backend()
            return
        setattr(owner, name, multiprocessing.Lock())
