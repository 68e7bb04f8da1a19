"""Memory that a peer's processes share: torch's manager of it, started early and waited for.

Each of hivemind's futures between processes has a byte in such memory, each of its rounds a few more, and the manager
is a process of its own. torch gives it one second to answer, also on a machine that is busy, and in a process that was
paused in the middle of the question (Ctrl+Z, SIGSTOP) and goes on before its manager does: then whoever made the future
fails, and with it the training.
Can go when torch waits for its manager, or hivemind's futures need no shared memory.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_hivemind.errors import DaemonError

log = logging.getLogger("lightning_hivemind")

#: How long the manager is asked again after torch's own time-outs of a second.
PATIENCE_S = 60.0
_TIMED_OUT = "connection has timed out"


def start_shared_memory() -> None:
    """Have torch start its shared-memory manager now, out of reach of Ctrl+C, and be patient with it from now on.

    The manager leaves the terminal's process group once it is up. Killed before that, torch waits for its first words
    in a loop that has no end and holds the GIL, and only SIGKILL helps. What is blocked here is blocked in the manager,
    too, which ends when its last client does. Safe to call twice; holds in processes that are forked from now on.

    Raises:
        DaemonError: it does not start.
    """
    _be_patient()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
    try:
        torch.empty(1, dtype=torch.uint8, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise DaemonError(
            f"torch cannot share memory between processes: {str(error).splitlines()[0]} (TMPDIR="
            f"{os.environ.get('TMPDIR')!r}). Nothing was started. Set TMPDIR to a short, writable path, and see that"
            " /dev/shm is not full (docker run --shm-size=1g)."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _be_patient() -> None:
    storage: Any = torch.UntypedStorage
    storage._share_filename_cpu_ = _patient(storage._share_filename_cpu_)
    storage._new_shared_filename_cpu = staticmethod(_patient(storage._new_shared_filename_cpu))


def _patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    """``ask``, again and again while its answer does not come in time; it has changed nothing then."""

    @functools.wraps(ask)
    def ask_until_answered(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ask(*args, **kwargs)
            except RuntimeError as error:
                if _TIMED_OUT not in str(error) or time.monotonic() > deadline:
                    raise
                log.debug("torch's shared-memory manager did not answer within a second; asked again")

    return ask_until_answered
