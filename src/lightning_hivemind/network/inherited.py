"""What a forked process must not hold open: workers of a DataLoader outlive a trainer that is killed, some for long.

While one of them has a connection, the other end does not see that it has ended; its port still listens, and the lock
of its identity is held.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class Closable(Protocol):
    """``close`` gives up this process's descriptor, and nothing that the one has from which it was forked."""

    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)

_OPEN: weakref.WeakSet[Closable] = weakref.WeakSet()


def not_inherited(one: T) -> T:
    """It is closed in every process that is forked from now on."""
    _OPEN.add(one)
    return one


def _close_all() -> None:
    for one in list(_OPEN):
        with contextlib.suppress(OSError):
            one.close()


os.register_at_fork(after_in_child=_close_all)
