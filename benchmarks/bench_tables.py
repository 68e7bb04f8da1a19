"""What is run, and the three tables that it is shown in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bench_spec import TurnSpec
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

OURS, DDP, STOCK = "ours", "DDP over gloo", "stock hivemind, defaults"
STOCK_SIZED = "stock hivemind, target_group_size given"
OURS_FLOAT16, OURS_8BIT = "ours, Float16", "ours, Uniform8Bit"
NATIVE, NATIVE_FLOAT16, NATIVE_8BIT = "native", "native, Float16", "native, Uniform8Bit"
NATIVE_CLEAR = "native, insecure_lan"
AVERAGING = [NATIVE, NATIVE_CLEAR, NATIVE_FLOAT16, NATIVE_8BIT, OURS, OURS_FLOAT16, OURS_8BIT, DDP]
Case = tuple[int, int]


def step_specs(peers: int) -> list[TurnSpec]:
    """The shortest global step: a model of ten parameters, each peer gives four batches of 25 ms."""
    ours = TurnSpec(contender=OURS, kind="ours", peers=peers, steps=16, window_s=12.0)
    return [
        ours,
        native(ours, NATIVE),
        replace(ours, contender=DDP, kind="ddp"),
        replace(ours, contender=STOCK_SIZED, kind="stock", options={"target_group_size": peers}, once=True),
        replace(ours, contender=STOCK, kind="stock", warm=1, once=True),
    ]


def averaging_specs(millions: int, peers: int = 2) -> list[TurnSpec]:
    """Averaging gradients only: the state is not averaged in these turns."""
    ours = TurnSpec(
        contender=OURS,
        kind="ours",
        peers=peers,
        layers=millions,
        batches=2,
        batch_s=0.1,
        options={"average_state_every": 10**6},
        steps=6,
        window_s=12.0,
    )
    return [
        ours,
        replace(ours, contender=DDP, kind="ddp", options={}),
        replace(ours, contender=OURS_FLOAT16, codec="Float16Compression"),
        replace(ours, contender=OURS_8BIT, codec="Uniform8BitQuantization"),
        native(ours, NATIVE),
        native(ours, NATIVE_CLEAR, insecure_lan=True),
        native(ours, NATIVE_FLOAT16, codec="Float16Compression"),
        native(ours, NATIVE_8BIT, codec="Uniform8BitQuantization"),
    ]


def native(spec: TurnSpec, contender: str, codec: str = "", **options: Any) -> TurnSpec:
    """The same with ``engine="native"``."""
    return replace(spec, contender=contender, codec=codec, options={**spec.options, "engine": "native", **options})


def full_plan() -> list[list[TurnSpec]]:
    return [step_specs(2), step_specs(3), averaging_specs(5), averaging_specs(25)]


def quick_plan() -> list[list[TurnSpec]]:
    """Enough to see that everything runs; not enough to quote."""
    steps = [replace(spec, steps=8, window_s=6.0) for spec in step_specs(2) if spec.contender != STOCK]
    averaging = [replace(spec, steps=4) for spec in averaging_specs(5)]
    return [steps, averaging]


def all_tables(turns: Sequence[Turn]) -> str:
    """The three tables with their captions, as Markdown; without the first if no step of its was measured."""
    tiny = [turn for turn in turns if not turn.spec.layers]
    steps = [
        "## Seconds per global step\n\n"
        "A model of ten parameters; each peer gives four batches, and a batch takes 25 ms, so a step takes at least"
        " 0.1 s; the target is the same for all. The measurement begins once all peers have met in a round, or after"
        " 20 s. *s per step*: time of the window per epoch of peer 0, whoever made it. *s per whole step*: time of the"
        " window per whole round of peer 0, in which the gradients of all peers were averaged completely; epochs that"
        " a peer makes alone or downloads are quick and worth little. Ratios are of whole steps. *wait*: how long"
        " training of peer 0 stood still for one round. *samples*: that peer 0 gave to a step, 16 being its share; more"
        " means that the target was noticed late. *CPU*: seconds of all processes of all peers, daemons included.",
        _step_table(tiny),
    ]
    parts = [
        *(steps if tiny else []),
        "## Averaging\n\n"
        "Square linear layers of a million weights, batches of 0.1 s, no averaging of the state. *round*:"
        " how long training stood still for it, median (range) over rounds and peers: looking around, matchmaking,"
        " exchange and optimizer step; for DDP from the first bucket's start to the last one's end, which overlaps with"
        " the backward pass. *MB/s*: bytes of one float32 gradient, whatever the codec sends, by the median round.",
        _averaging_table([turn for turn in turns if turn.spec.layers]),
        _marginal(turns),
        "## Reliability\n\n"
        "Every peer's steps in all turns of the tables above, from its first one on, also before the measurement began."
        " A step that hung until the end of the turn is not counted. *whole*: all peers were in the round and every"
        " value arrived. *values*: least share of the values that arrived in a round with others. For stock hivemind"
        " this was read off its averagers, which do not report it.",
        _reliability_table([turn for turn in turns if turn.spec.kind != "ddp"]),
        _failures(turns),
    ]
    return "\n\n".join(part for part in parts if part)


def contenders_of(turns: Sequence[Turn]) -> list[tuple[Case, str]]:
    """Every (case, contender), cases ascending, contenders in the order of the plan."""
    order = [*AVERAGING[:-1], STOCK_SIZED, STOCK, DDP]
    found = {(turn.spec.case, turn.spec.contender) for turn in turns}
    return sorted(found, key=lambda one: (one[0], order.index(one[1])))


def _select(turns: Sequence[Turn], case: Case, contender: str) -> list[Turn]:
    return [turn for turn in turns if turn.spec.case == case and turn.spec.contender == contender]


def _ratios(turns: Sequence[Turn], case: Case, contender: str, baseline: str, value: Callable[[Turn], float]) -> str:
    if contender == baseline:
        return "1"
    measured, base = ({turn.repeat: value(turn) for turn in _select(turns, case, who)} for who in (contender, baseline))
    return summary(pair_ratios(measured, base)).show()


def _whole_step_s(turn: Turn) -> float:
    return turn.step_s if turn.spec.kind == "ddp" else turn.whole_step_s  # DDP knows no other steps


def round_s(turn: Turn) -> float:
    """Median wait of the turn's rounds, NaN if none was measured."""
    return summary(one.wait_s for one in turn.all_rounds).median


def _rate(turn: Turn) -> float:
    return megabytes_per_s(turn.spec.parameters, round_s(turn))


def _step_table(turns: Sequence[Turn]) -> str:
    rows = []
    for case, contender in contenders_of(turns):
        own = _select(turns, case, contender)
        first = [one for turn in own if turn.rounds for one in turn.rounds[0]]
        rows.append(
            [
                contender,
                str(case[1]),
                summary(turn.step_s for turn in own).show(),
                summary(map(_whole_step_s, own)).show(),
                _ratios(turns, case, contender, DDP, _whole_step_s),
                _ratios(turns, case, contender, STOCK, _whole_step_s),
                summary(one.wait_s for one in first).show(),
                summary(one.samples for one in first).show(),
                summary(turn.cpu_s for turn in own).show(),
            ]
        )
    header = ["contender", "peers", "s per step", "s per whole step", "/ DDP", "/ stock defaults"]
    header += ["wait, s", "samples", "CPU s per step"]
    return markdown_table(header, rows)


def _averaging_table(turns: Sequence[Turn]) -> str:
    rows = []
    for case, contender in contenders_of(turns):
        own = _select(turns, case, contender)
        rows.append(
            [
                contender,
                f"{case[0]}M",
                str(case[1]),
                summary(one.wait_s for turn in own for one in turn.all_rounds).show(),
                summary(map(_rate, own)).show(),
                _ratios(turns, case, contender, DDP, _rate),
                summary(turn.step_s for turn in own).show(),
                summary(turn.cpu_s for turn in own).show(),
            ]
        )
    header = ["contender", "parameters", "peers", "round, s", "MB/s", "MB/s / DDP", "s per step", "CPU s per step"]
    return markdown_table(header, rows)


def _marginal(turns: Sequence[Turn]) -> str:
    """One line: the rate without the fixed cost of a round, where two sizes were measured."""
    sizes = sorted({turn.spec.case for turn in turns if turn.spec.layers and turn.spec.peers == 2})
    if len(sizes) < 2:
        return ""
    small, large = sizes[0], sizes[-1]
    found = []
    for contender in AVERAGING:
        both = []
        for case in (small, large):
            own = _select(turns, case, contender)
            both.append(summary(one.wait_s for turn in own for one in turn.all_rounds).median)
        ends = [(case[0] * 10**6, wait_s) for case, wait_s in zip((small, large), both, strict=True)]
        rate = marginal_megabytes_per_s(ends[0], ends[1])
        found.append(f"{contender} {number(rate)}")
    what = f"Additional bytes from {small[0]}M to {large[0]}M alone, two peers, MB/s of the median rounds"
    return f"{what}: {'; '.join(found)}."


def _reliability_table(turns: Sequence[Turn]) -> str:
    rows = []
    for case, contender in contenders_of(turns):
        own = _select(turns, case, contender)
        history = [one for turn in own for peer in turn.history for one in peer]
        whole, total = whole_share(history, case[1])
        together = [one for one in history if one.contributors > 1]
        rows.append(
            [
                contender,
                f"{case[0]}M" if case[0] else "10",
                str(case[1]),
                str(total),
                str(whole),
                percent(whole, total),
                number(min(one.fraction for one in together)) if together else NOTHING,
            ]
        )
    return markdown_table(["contender", "parameters", "peers", "steps", "whole", "share", "values, least"], rows)


def _failures(turns: Sequence[Turn]) -> str:
    lines = [
        f"- {turn.spec.contender}, {turn.spec.peers} peers, {turn.spec.parameters} parameters, repeat"
        f" {turn.repeat + 1}: {turn.failure}"
        for turn in turns
        if turn.failure
    ]
    return "\n".join(["Turns without a measurement:", "", *lines]) if lines else ""
