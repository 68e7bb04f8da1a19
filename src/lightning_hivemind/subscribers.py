"""Where events go that nobody else reads: to the log, and to a file."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.events import BatchDropped, EpochCommitted, Event

log = logging.getLogger("lightning_hivemind")

PROGRESS_EVERY_S = 30.0


def make_log_visible() -> None:
    """Show this package's INFO lines on standard error, unless the script has set up logging itself."""
    if not log.hasHandlers():
        handler = _BesideBars()
        handler.setFormatter(logging.Formatter("[swarm] %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


class _BesideBars(logging.StreamHandler[Any]):
    """Standard error, without tearing progress bars apart."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(tqdm, "_instances", None):
            super().emit(record)
            return
        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except Exception:
            self.handleError(record)


class LogSubscriber:
    """Writes events to the ``lightning_hivemind`` logger; with ``verbose`` even the small ones at INFO.

    Without it one global step in 30 s is written, so that one sees how the run goes.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._least = logging.INFO if verbose else logging.DEBUG
        self._dropped: Counter[str] = Counter()
        self._next_progress = -math.inf

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchDropped):
            self._dropped[event.reason] += 1
            if self._dropped[event.reason].bit_count() > 1:
                return  # said at the 1st, 2nd, 4th, 8th ... only; every one is an event for other subscribers
        level = max(self._level(event), self._least)
        if log.isEnabledFor(level):  # there is one event for each batch
            log.log(level, event.describe())

    def _level(self, event: Event) -> int:
        if isinstance(event, EpochCommitted) and time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_EVERY_S
            return logging.INFO
        return event.level


class JsonLinesSubscriber:
    """Appends each event as one line of JSON to a file, flushed at once (a killed peer's last line is whole).

    Raises:
        ArgumentError: there can be no such file.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - lives as long as the peer
        except OSError as error:
            raise ArgumentError(
                f"LIGHTNING_HIVEMIND_EVENTS={str(path)!r}: cannot be written: {error}. Nothing was"
                " started. Name a file in a writable directory."
            ) from error

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event.as_dict()) + "\n")
