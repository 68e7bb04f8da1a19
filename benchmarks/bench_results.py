"""What a benchmark has found, as Markdown for people and as JSON for the table of all bars."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench_bars import Bar, bars_table
from bench_machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results"


class Run:
    """When a benchmark began, and how busy the machine was then."""

    def __init__(self) -> None:
        self._clock, self._load = time.monotonic(), os.getloadavg()[0]
        self._date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")

    def facts(self, *, most_load: float = 0.0, **more: str) -> dict[str, str]:
        """Of the run until now, and of the machine. ``most_load``: that was seen meanwhile."""
        after = os.getloadavg()[0]
        return {
            "date": self._date,
            "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "duration": f"{time.monotonic() - self._clock:.0f} s",
            **more,
            "load": f"{self._load:.1f} before, {after:.1f} after, {max(self._load, after, most_load):.1f} at most"
            " (1-minute averages, the benchmark's own processes included)",
            **describe_machine(),
        }


def report(title: str, facts: Mapping[str, str], table: str, bars: Sequence[Bar]) -> str:
    """The text of a result."""
    below = ["## Bars", "", bars_table(bars), ""] if bars else []
    return "\n".join(
        [f"# {title}", "", *(f"- {fact}: {value}" for fact, value in facts.items()), "", table, "", *below]
    )


def write(name: str, text: str, facts: Mapping[str, str], bars: Sequence[Bar], **content: Any) -> None:
    """``results/<name>.md`` and ``.json``."""
    RESULTS.mkdir(exist_ok=True)
    values = {**facts, "bars": [asdict(bar) for bar in bars], **plain(content)}
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Values that JSON has: NaN and infinity become null, six significant digits are enough."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name != "time"}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return None if not math.isfinite(value) else float(f"{value:.6g}")
    return value
