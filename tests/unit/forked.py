"""What is so in a process that is forked from this one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def in_a_child(question: Callable[[], bool]) -> bool:
    """What a forked process answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where there are threads
        child = os.fork()
    if child == 0:
        os._exit(0 if question() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
