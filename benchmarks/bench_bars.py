"""Bars: what a measurement has to reach, and whether it does. No clock, no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench_plan import (
    DDP,
    NATIVE,
    NATIVE_8BIT,
    NATIVE_CLEAR,
    NATIVE_FLOAT16,
    OURS,
    OURS_8BIT,
    OURS_STATE,
    STOCK,
    STOCK_SIZED,
)
from bench_spec import Case
from bench_stats import markdown_table, number, pair_ratios, summary
from bench_tables import added_to
from bench_turn import NO_STEP, NO_WHOLE_STEP, Turn

#: a case in which a step computes for no longer than this is one of the shortest step
SHORTEST_S = 0.01
#: of so many million values, the bytes of a step have to be near the ideal
LARGE = 25
UNKNOWN = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """``holds`` is None if it was not measured."""

    what: str
    bar: str
    found: str
    holds: bool | None


def at_most(what: str, limit: float, values: Iterable[float], unit: str = "") -> Bar:
    """Of the median of these. NaN is a measurement that did not succeed: it is told, and the bar does not hold."""
    measured, asked = list(values), f"<= {number(limit)}{unit}"
    found = summary(measured)
    if not found.count:
        return Bar(what=what, bar=asked, found=UNKNOWN, holds=None)
    failed, told = len(measured) - found.count, [found.show(unit)]
    if failed:
        told.append(f"{failed} of {len(measured)} failed")
    if found.count > 1:
        told.append(f"{sum(one <= limit for one in measured)} of {len(measured)} within")
    return Bar(what=what, bar=asked, found="; ".join(told), holds=not failed and found.median <= limit)


def is_so(what: str, bar: str, found: str, *, holds: bool) -> Bar:
    return Bar(what=what, bar=bar, found=found, holds=holds)


def bars_table(bars: Sequence[Bar]) -> str:
    return markdown_table(["bar", "asked for", "found", "holds"], [cells_of(bar) for bar in bars])


def cells_of(bar: Bar) -> list[str]:
    return [bar.what, bar.bar, bar.found, {True: "yes", False: "**no**", None: "-"}[bar.holds]]


def bars_of_turns(turns: Sequence[Turn]) -> list[Bar]:
    """Those of steps and of averaging, for the cases that were run."""
    cases = sorted({turn.spec.case for turn in turns})
    found: list[Bar] = []
    for case in cases:
        own = [turn for turn in turns if turn.spec.case == case]
        if not case.layers and case.compute_s <= SHORTEST_S:
            found += _step_bars(own, case)
        elif case.layers >= LARGE:
            found += _averaging_bars(own, case)
    return found


def _step_bars(turns: Sequence[Turn], case: Case) -> list[Bar]:
    def made_none(turn: Turn) -> bool:
        """Stock hivemind with quick batches: no whole step in its window."""
        none = turn.spec.kind == "stock" and math.isnan(turn.whole_step_s)
        return none and (bool(turn.steps) or turn.failure.startswith((NO_STEP, NO_WHOLE_STEP)))

    def step_s(turn: Turn) -> float:
        """Of whole steps; who made none in its window needs at least that long."""
        if made_none(turn):
            return turn.spec.window_s
        return turn.whole_step_s if turn.spec.swarm else turn.step_s

    def against(baseline: str, called: str, limit: float) -> Bar:
        none = [turn for turn in turns if turn.spec.contender == baseline and made_none(turn)]
        note = f", which made no whole step in {none[0].spec.window_s:.0f} s (a bound)" if none else ""
        return at_most(f"{what} / {called}{note}", limit, _ratios(turns, NATIVE, baseline, step_s))

    what = f"shortest global step, {case.peers} peers"
    return [
        at_most(what, 0.15, _values(turns, NATIVE, step_s).values(), " s"),
        against(STOCK, "stock hivemind's defaults", 1 / 10),
        against(STOCK_SIZED, "stock hivemind, target_group_size", 1 / 3),
    ]


def _averaging_bars(turns: Sequence[Turn], case: Case) -> list[Bar]:
    added_s, added_cpu_s = added_to(turns, lambda turn: turn.step_s), added_to(turns, lambda turn: turn.cpu_s)
    name = f"averaging {case.layers}M, {case.peers} peers"
    wanted: list[tuple[str, str, str, float, Callable[[Turn], float]]] = [
        ("TLS, CPU seconds / hivemind engine", NATIVE, OURS, 1 / 3, added_cpu_s),
        ("TLS, seconds / hivemind engine", NATIVE, OURS, 1 / 3, added_s),
        ("in the clear, seconds / hivemind engine", NATIVE_CLEAR, OURS, 1 / 6, added_s),
        ("in the clear, seconds / gloo", NATIVE_CLEAR, DDP, 1.5, added_s),
        ("TLS, 8 bits, seconds / hivemind engine", NATIVE_8BIT, OURS, 1 / 5, added_s),
        ("TLS, 8 bits, seconds / hivemind engine, 8 bits", NATIVE_8BIT, OURS_8BIT, 1 / 3, added_s),
        ("bytes / hivemind engine at its defaults", NATIVE, OURS_STATE, 0.52, _sent),
    ]
    ideal = [
        at_most(f"{name}: {one}, bytes / ideal", 1.03, [_sent(turn) / turn.spec.ideal_bytes for turn in own])
        for one in (NATIVE, NATIVE_FLOAT16, NATIVE_8BIT)
        if (own := [turn for turn in turns if turn.spec.contender == one])
    ]
    ratios = [
        at_most(f"{name}: {what}", limit, _ratios(turns, one, base, value)) for what, one, base, limit, value in wanted
    ]
    return ratios + ideal


def _sent(turn: Turn) -> float:
    return summary(turn.sent_bytes).median


def _values(turns: Sequence[Turn], contender: str, value: Callable[[Turn], float]) -> dict[int, float]:
    return {turn.repeat: value(turn) for turn in turns if turn.spec.contender == contender}


def _ratios(turns: Sequence[Turn], contender: str, baseline: str, value: Callable[[Turn], float]) -> list[float]:
    """Of turns of the same repeat."""
    return pair_ratios(_values(turns, contender, value), _values(turns, baseline, value))
