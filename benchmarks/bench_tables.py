"""The three tables of the benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bench_plan import ALONE, CONTENDERS, DDP, OURS, STOCK, STOCK_SIZED
from bench_spec import Case
from bench_stats import (
    NOTHING,
    marginal_megabytes_per_s,
    markdown_table,
    megabytes_per_s,
    number,
    pair_ratios,
    percent,
    summary,
    whole_share,
)
from bench_turn import Turn

STEPS_CAPTION = """## Seconds per global step

A model of ten parameters; each peer gives four batches, so a step *computes* for four times what a batch takes; the
target is the same for all. The measurement begins once all peers have met in a round, or after 20 s. *s per step*: time
per epoch of peer 0, whoever made it, from the first that ends in the window to the last (or to the window's end, if the
next one takes longer). *s per whole step*: the same time per whole round of peer 0, in which the gradients of all peers
were averaged completely (with local updates: their parameters); epochs that a peer makes alone or downloads are quick
and worth little. Ratios are of whole steps; *over compute*: of what a whole step takes longer than its computation.
*wait*: how long training of peer 0 stood still for one round. *samples*: that peer 0 gave to a step, 16 being its
share; more means that the target was noticed late. *CPU*: seconds of all processes of all peers, daemons included."""

AVERAGING_CAPTION = """## Averaging

Square linear layers of a million weights, two batches of 0.1 s in a step, no averaging of the state. *added*: seconds
of a step (whoever was in it) beyond those of as many processes that do the same and average nothing, in the same
repeat; everything that averaging costs is in it. *CPU added*: likewise, processor seconds of all processes of all
peers. *MB/s*: bytes of one float32 gradient, whatever the codec sends, by what was added. *MB sent*: per peer and step,
everything that went through loopback: TLS, TCP and the DHT included. *ideal*: 2(n-1)/n times the encoded gradient."""

RELIABILITY_CAPTION = """## Reliability

Every peer's steps in all turns of the tables above, from its first one on, also before the measurement began. A step
that hung until the end of the turn is not counted. *whole*: all peers were in the round and every value arrived.
*values*: least share of the values that arrived in a round with others. For stock hivemind this was read off its
averagers, which do not report it."""


def all_tables(turns: Sequence[Turn]) -> str:
    """The tables with their captions, as Markdown; none of what was not run."""
    tiny, large = [turn for turn in turns if not turn.spec.layers], [turn for turn in turns if turn.spec.layers]
    parts = [
        *((STEPS_CAPTION, _step_table(tiny)) if tiny else ()),
        *((AVERAGING_CAPTION, _averaging_table(large), _marginal(large)) if large else ()),
        RELIABILITY_CAPTION,
        _reliability_table([turn for turn in turns if turn.spec.swarm]),
        _failures(turns),
    ]
    return "\n\n".join(part for part in parts if part)


def contenders_of(turns: Sequence[Turn]) -> list[tuple[Case, str]]:
    """Every (case, contender), cases ascending, contenders in the order of the plan."""
    found = {(turn.spec.case, turn.spec.contender) for turn in turns}
    return sorted(found, key=lambda one: (one[0].layers, one[0].compute_s, one[0].peers, CONTENDERS.index(one[1])))


def _select(turns: Sequence[Turn], case: Case, contender: str) -> list[Turn]:
    return [turn for turn in turns if turn.spec.case == case and turn.spec.contender == contender]


def _ratios(turns: Sequence[Turn], case: Case, contender: str, baseline: str, value: Callable[[Turn], float]) -> str:
    if contender == baseline:
        return "1"
    measured, base = ({turn.repeat: value(turn) for turn in _select(turns, case, who)} for who in (contender, baseline))
    return summary(pair_ratios(measured, base)).show()


def _whole_step_s(turn: Turn) -> float:
    return turn.whole_step_s if turn.spec.swarm else turn.step_s  # DDP knows no other steps


def _over_compute_s(turn: Turn) -> float:
    return _whole_step_s(turn) - turn.spec.case.compute_s


def _step_table(turns: Sequence[Turn]) -> str:
    rows = []
    for case, contender in contenders_of(turns):
        own = _select(turns, case, contender)
        first = [one for turn in own if turn.rounds for one in turn.rounds[0]]
        rows.append(
            [
                contender,
                str(case.peers),
                number(case.compute_s),
                summary(turn.step_s for turn in own).show(),
                summary(map(_whole_step_s, own)).show(),
                _ratios(turns, case, contender, DDP, _whole_step_s),
                _ratios(turns, case, contender, STOCK, _whole_step_s),
                _ratios(turns, case, contender, STOCK_SIZED, _over_compute_s),
                summary(one.wait_s for one in first).show(),
                summary(one.samples for one in first).show(),
                summary(turn.cpu_s for turn in own).show(),
            ]
        )
    header = ["contender", "peers", "computes, s", "s per step", "s per whole step", "/ DDP", "/ stock defaults"]
    header += ["over compute / stock with target_group_size", "wait, s", "samples", "CPU s per step"]
    return markdown_table(header, rows)


def added_to(turns: Sequence[Turn], value: Callable[[Turn], float]) -> Callable[[Turn], float]:
    """What a turn's value is above that of the turn without averaging of the same case and repeat; NaN without one."""
    alone = {(turn.spec.case, turn.repeat): value(turn) for turn in turns if turn.spec.contender == ALONE}
    return lambda turn: value(turn) - alone.get((turn.spec.case, turn.repeat), math.nan)


def _averaging_table(turns: Sequence[Turn]) -> str:
    added_s, added_cpu_s = added_to(turns, lambda turn: turn.step_s), added_to(turns, lambda turn: turn.cpu_s)
    rows = []
    for case, contender in contenders_of(turns):
        own = _select(turns, case, contender)
        if contender == ALONE:
            continue
        sent = summary(sent for turn in own for sent in turn.sent_bytes)
        rows.append(
            [
                contender,
                f"{case.layers}M",
                str(case.peers),
                summary(map(added_cpu_s, own)).show(),
                _ratios(turns, case, contender, OURS, added_cpu_s),
                summary(turn.step_s for turn in own).show(),
                summary(map(added_s, own)).show(),
                _ratios(turns, case, contender, OURS, added_s),
                _ratios(turns, case, contender, DDP, added_s),
                summary(megabytes_per_s(turn.spec.parameters, added_s(turn)) for turn in own).show(),
                number(sent.median / 1e6),
                number(sent.median / own[0].spec.ideal_bytes),
            ]
        )
    header = ["contender", "parameters", "peers", "CPU added, s", "CPU / hivemind engine", "s per step", "added, s"]
    header += ["/ hivemind engine", "/ DDP", "MB/s", "MB sent", "/ ideal"]
    return markdown_table(header, rows)


def _marginal(turns: Sequence[Turn]) -> str:
    """One line: the rate without the fixed cost of a round, where two sizes were measured."""
    cases = sorted({turn.spec.case for turn in turns if turn.spec.peers == 2})
    if len(cases) < 2:
        return ""
    small, large = cases[0], cases[-1]
    added_s = added_to(turns, lambda turn: turn.step_s)
    found = []
    for contender in (one for one in CONTENDERS if one != ALONE):
        ends = [
            (case.layers * 10**6, summary(map(added_s, _select(turns, case, contender))).median)
            for case in (small, large)
        ]
        rate = marginal_megabytes_per_s(*ends)
        if not math.isnan(rate):
            found.append(f"{contender} {number(rate)}")
    what = (
        f"Additional bytes from {small.layers}M to {large.layers}M alone, two peers, MB/s of the median added seconds"
    )
    return f"{what}: {'; '.join(found)}."


def _reliability_table(turns: Sequence[Turn]) -> str:
    rows = []
    for case, contender in contenders_of(turns):
        own = _select(turns, case, contender)
        history = [one for turn in own for peer in turn.history for one in peer]
        whole, total = whole_share(history, case.peers)
        together = [one for one in history if one.contributors > 1]
        rows.append(
            [
                contender,
                f"{case.layers}M" if case.layers else "10",
                str(case.peers),
                number(case.compute_s),
                str(total),
                str(whole),
                percent(whole, total),
                number(min(one.fraction for one in together)) if together else NOTHING,
            ]
        )
    header = ["contender", "parameters", "peers", "computes, s", "steps", "whole", "share", "values, least"]
    return markdown_table(header, rows)


def _failures(turns: Sequence[Turn]) -> str:
    lines = [
        f"- {turn.spec.contender}, {turn.spec.peers} peers, {turn.spec.parameters} parameters, steps of"
        f" {number(turn.spec.case.compute_s)} s, repeat {turn.repeat + 1}: {turn.failure}"
        for turn in turns
        if turn.failure
    ]
    return "\n".join(["Turns without a measurement:", "", *lines]) if lines else ""
