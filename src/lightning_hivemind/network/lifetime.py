"""A forked child that lives exactly as long as it should: not stopped by Ctrl+C, gone when its parent is gone.

hivemind forks its DHT and its averagers from the trainer. They inherit the trainer's Python signal handlers
(Lightning's among them), and outlive a trainer that was killed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger("lightning_hivemind")

#: How often a child looks whether its parent still lives.
POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def settle_child(parent_pid: int, cleanup: Callable[[], None] | None = None) -> None:
    """Call first in a forked child's ``run()``, from its main thread.

    SIGTERM gets its default action. SIGINT and SIGHUP are ignored: a terminal sends them to the whole process group,
    and it is the trainer that decides when its children stop. Other signals that the trainer handles in Python are
    ignored, SIGCHLD set to its default. A daemon thread then ends the child within :data:`POLL_S` of the parent's
    death, after calling ``cleanup``. The parent's own handlers are not touched.

    Python's ``random`` gets a new seed: hivemind draws the ids of DHT nodes and groups from it, and peers whose scripts
    all call ``seed_everything(42)`` would have equal ids, and then no rounds.

    Args:
        parent_pid: pid of the process that forked this one.
        cleanup: called from the watching thread once the parent is gone; what it raises is logged.
    """
    random.seed()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent_pid, cleanup), name="parent-watch", daemon=True).start()


def die_with_parent() -> Callable[[], None] | None:
    """A ``preexec_fn`` that has the kernel kill the new process when the *thread* that started it ends (Linux only).

    None on systems without such a thing. For processes started from a main thread.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: afterwards only a call is left to do
    parent_pid = os.getpid()

    def preexec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the call
            os._exit(1)

    return preexec


def _leave_with(parent_pid: int, cleanup: Callable[[], None] | None) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    try:
        if cleanup is not None:
            cleanup()
    except Exception:
        log.exception("cleaning up after process %d, which is gone, failed", parent_pid)
    finally:
        os._exit(1)
