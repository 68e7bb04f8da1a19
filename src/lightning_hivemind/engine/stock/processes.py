"""Ending hivemind's averager processes within a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

log = logging.getLogger("lightning_hivemind")

TERM_S = 0.5


def stop_processes(averagers: Sequence[Any], deadline: float) -> None:
    """Ask all at once, then terminate, then kill what is left. ``deadline`` is in ``time.monotonic`` seconds."""
    for averager in averagers:
        if averager.is_alive():
            try:
                averager.ask_to_shut_down()
            except OSError as error:
                log.debug("averager %s could not be asked to stop: %r", averager.prefix, error)
    for averager in averagers:
        averager.join(max(0.0, deadline - 2 * TERM_S - time.monotonic()))
    for stop in ("terminate", "kill"):
        for averager in averagers:
            if averager.is_alive():
                getattr(averager, stop)()
        for averager in averagers:
            averager.join(TERM_S)
