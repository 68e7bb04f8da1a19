"""Statistics and text of the benchmarks: pure functions, no clock, no file, no process."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
FLOAT32_BYTES = 4
NOTHING = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Median and range of ``count`` measurements; NaN everywhere if there were none."""

    median: float
    low: float
    high: float
    count: int

    def show(self, suffix: str = "") -> str:
        """``median (low to high)`` with three significant digits; only the median of a single measurement."""
        if self.count == 0:
            return NOTHING
        if self.count == 1:
            return f"{number(self.median)}{suffix}"
        return f"{number(self.median)}{suffix} ({number(self.low)} to {number(self.high)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One global step as one peer saw it.

    Attributes:
        advanced: by how many epochs the peer came forward; more than 1 when it took over another peer's state.
        contributors: peers in the round that this peer was in; 0 if it was in none.
        fraction: share of the averaged values that arrived at this peer.
        wait_s: how long training waited for the round; NaN if it was not measured.
    """

    time: float
    advanced: int
    samples: int
    contributors: int
    fraction: float
    wait_s: float

    def whole(self, peers: int) -> bool:
        """Every peer was in it and every value arrived."""
        return self.contributors == peers and self.fraction >= 1.0


def number(value: float) -> str:
    """Three significant digits, never in exponent notation; ``-`` for NaN."""
    if math.isnan(value):
        return NOTHING
    if value == 0 or math.isinf(value):
        return f"{value:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def summary(values: Iterable[float]) -> Summary:
    """Median, least and greatest of the values that are not NaN."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return Summary(median=math.nan, low=math.nan, high=math.nan, count=0)
    return Summary(median=statistics.median(known), low=known[0], high=known[-1], count=len(known))


def pair_ratios(measured: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """``measured / baseline`` for every repeat that has both: the two ran next to each other in time.

    NaN where only ``measured`` is: that turn has failed, and is not to be forgotten.
    """
    shared = sorted(measured.keys() & baseline.keys())
    return [measured[one] / baseline[one] for one in shared if baseline[one] and not math.isnan(baseline[one])]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The same items, begun ``turn`` places later, so that none always runs first or after the same other."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def whole_share(rounds: Sequence[Round], peers: int) -> tuple[int, int]:
    """``(whole, all)``: a peer's epochs in rounds that were whole, and all of its epochs."""
    return sum(one.whole(peers) for one in rounds), sum(one.advanced for one in rounds)


def percent(part: int, total: int) -> str:
    return NOTHING if total == 0 else f"{100 * part / total:.0f}%"


def megabytes_per_s(parameters: int, duration_s: float) -> float:
    """Bytes of one float32 gradient, in units of 10**6, per second: the same numerator for every codec."""
    return parameters * FLOAT32_BYTES / 1e6 / duration_s if duration_s > 0 else math.nan


def marginal_megabytes_per_s(small: tuple[int, float], large: tuple[int, float]) -> float:
    """Rate of the additional bytes of the larger model: what is left when the fixed cost of a round is taken out.

    Args:
        small, large: (parameters, seconds of a round). NaN unless the larger one also took longer.
    """
    return megabytes_per_s(large[0] - small[0], large[1] - small[1])


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns line up in plain text, too. The first column is text, the others are numbers."""
    cells = [list(header), *(list(row) for row in rows)]
    for row in cells:
        if len(row) != len(header):
            raise ValueError(f"row={row!r} has {len(row)} cells, the header has {len(header)}")
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in [cells[0], rule, *cells[1:]]
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def rounds_of_marks(marks: Sequence[Mapping[str, float]], outcomes: Sequence[Mapping[str, float]]) -> list[Round]:
    """Join what the training loop saw with what the averaging said.

    Args:
        marks: per global step, in order: ``time`` at which it was seen, ``epoch``, ``samples`` since the last one.
        outcomes: per averaging round, in order: ``time`` of its end, ``contributors``, ``fraction``, ``wait_s``. One
            belongs to the mark that follows it; a mark with none was reached without a round.
    Returns:
        One for each mark but the first, which only says where counting begins.
    """
    rounds: list[Round] = []
    for previous, mark in pairwise(marks):
        own = [one for one in outcomes if previous["time"] < one["time"] <= mark["time"]]
        last: Mapping[str, float] = own[-1] if own else {}
        rounds.append(
            Round(
                time=mark["time"],
                advanced=int(mark["epoch"] - previous["epoch"]),
                samples=int(mark["samples"]),
                contributors=int(last.get("contributors", 0)),
                fraction=last.get("fraction", 0.0),
                wait_s=last.get("wait_s", mark.get("wait_s", math.nan)),
            )
        )
    return rounds
