"""Who takes turns: the contenders of every case, in the order in which a repeat runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench_spec import TurnSpec

ALONE, DDP = "no averaging", "DDP over gloo"
OURS, OURS_FLOAT16, OURS_8BIT = "hivemind engine", "hivemind engine, Float16", "hivemind engine, 8 bits"
OURS_STATE = "hivemind engine, parameters too"
NATIVE, NATIVE_CLEAR = "native engine", "native engine, insecure_lan"
NATIVE_FLOAT16, NATIVE_8BIT = "native engine, Float16", "native engine, 8 bits"
STOCK = "stock hivemind, defaults"
STOCK_SIZED = "stock hivemind, target_group_size"
STOCK_QUICK = "stock hivemind, matchmaking_time=3"
STOCK_LOCAL = "stock hivemind, matchmaking_time=1, local updates"

#: the order of the tables' rows
CONTENDERS = [NATIVE, NATIVE_CLEAR, NATIVE_FLOAT16, NATIVE_8BIT, OURS, OURS_STATE, OURS_FLOAT16, OURS_8BIT]
CONTENDERS += [STOCK_SIZED, STOCK_LOCAL, STOCK_QUICK, STOCK, DDP, ALONE]


def step_specs(peers: int, batch_s: float) -> list[TurnSpec]:
    """Global steps of a model of ten parameters; each peer gives four batches."""
    ours = TurnSpec(contender=OURS, kind="ours", peers=peers, batch_s=batch_s, steps=16, window_s=12.0)
    stock = replace(ours, kind="stock", warm=1)
    slow = replace(stock, window_s=30.0, once=True)
    return [
        ours,
        native(ours, NATIVE),
        replace(ours, contender=DDP, kind="ddp"),
        replace(stock, contender=STOCK_SIZED, options={"target_group_size": peers}),
        replace(slow, contender=STOCK_LOCAL, options={"matchmaking_time": 1.0, "use_local_updates": True}),
        replace(slow, contender=STOCK_QUICK, options={"matchmaking_time": 3.0}),
        replace(slow, contender=STOCK),
    ]


def averaging_specs(millions: int, peers: int = 2) -> list[TurnSpec]:
    """Averaging gradients only; but one turn of hivemind's engine averages parameters, too, as it does by default."""
    ours = TurnSpec(
        contender=OURS,
        kind="ours",
        peers=peers,
        layers=millions,
        batches=2,
        batch_s=0.1,
        options={"average_state_every": 10**6},
        warm=1,
        steps=2,
        window_s=15.0 * max(1.0, millions * peers / 100),  # of the slowest more than a step is to be seen
    )
    quick = replace(ours, warm=3, steps=4)  # (the first rounds touch fresh memory)
    # no bar asks for the seconds of float16
    float16: dict[str, Any] = {"codec": "Float16Compression", "value_bytes": 2.0, "once": True}
    uniform: dict[str, Any] = {"codec": "Uniform8BitQuantization", "value_bytes": 1.0}
    return [
        ours,
        native(quick, NATIVE),
        replace(quick, contender=DDP, kind="ddp", options={}),
        replace(ours, contender=OURS_FLOAT16, **float16),
        native(replace(quick, **float16), NATIVE_FLOAT16),
        replace(ours, contender=OURS_8BIT, **uniform),
        native(replace(quick, **uniform), NATIVE_8BIT),
        native(quick, NATIVE_CLEAR, insecure_lan=True),
        replace(quick, contender=ALONE, kind="alone", options={}),
        replace(ours, contender=OURS_STATE, options={}, window_s=2.5 * ours.window_s, once=True),  # twice the bytes
    ]


def native(spec: TurnSpec, contender: str, **options: Any) -> TurnSpec:
    """The same with ``engine="native"``."""
    return replace(spec, contender=contender, options={**spec.options, "engine": "native", **options})


def full_plan() -> list[list[TurnSpec]]:
    steps = [step_specs(peers, batch_s) for batch_s in (0.001, 0.025, 0.2) for peers in (2, 3)]
    return [*steps, averaging_specs(5), averaging_specs(25)]


def shortest_plan() -> list[list[TurnSpec]]:
    """Of the shortest steps those with bars, in every repeat."""
    wanted = (NATIVE, STOCK_SIZED, STOCK)
    cases = [step_specs(peers, 0.001) for peers in (2, 3)]
    return [[replace(spec, once=False) for spec in specs if spec.contender in wanted] for specs in cases]


def quick_plan() -> list[list[TurnSpec]]:
    """Enough to see that everything runs; not enough to quote."""
    steps = [replace(spec, steps=8, window_s=6.0) for spec in step_specs(2, 0.2) if not spec.once]
    averaging = [replace(spec, steps=4) for spec in averaging_specs(5)]
    return [steps, averaging]
