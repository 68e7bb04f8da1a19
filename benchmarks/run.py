"""The benchmark of the foundation: both engines against DDP over gloo and against hivemind's own Optimizer.

    python benchmarks/run.py            # as many repeats as fit into about ten minutes; writes benchmarks/results/
    python benchmarks/run.py --quick    # one small repeat in under two minutes; writes nothing
    python benchmarks/run.py --averaging 50,100 --peers 2,4    # large gradients only; writes its own results

All contenders take turns: a repeat runs each of them once (the slow ones
of stock hivemind only in the first repeat), and a ratio compares two turns of the same repeat.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench_machine import describe_machine
from bench_spec import TurnSpec
from bench_stats import number, rotated
from bench_tables import all_tables, averaging_specs, full_plan, quick_plan
from bench_turn import Turn, run_turn

RESULTS = Path(__file__).resolve().parent / "results"
MOST_REPEATS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small repeat; nothing is written")
    parser.add_argument(
        "--averaging", type=numbers, metavar="MILLIONS", help="only this table, of models of these sizes"
    )
    parser.add_argument("--peers", type=numbers, default=[2], help="with --averaging: numbers of peers")
    parser.add_argument("--minutes", type=float, default=9.5, help="begin no repeat that would probably end later")
    parser.add_argument("--keep", type=Path, help="existing folder in which the files of all processes are kept")
    options = parser.parse_args(arguments)
    started, clock = datetime.now(timezone.utc), time.monotonic()
    loads = [os.getloadavg()[0]]
    if options.averaging:
        plan = [averaging_specs(millions, peers) for millions in options.averaging for peers in options.peers]
    else:
        plan = quick_plan() if options.quick else full_plan()
    turns = run_repeats(plan, 0.0 if options.quick else 60 * options.minutes, options.keep)
    loads.append(os.getloadavg()[0])
    facts = {
        "date": started.strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "duration": f"{time.monotonic() - clock:.0f} s",
        "repeats": str(1 + max(turn.repeat for turn in turns)),
        "load": f"{loads[0]:.1f} before, {loads[-1]:.1f} after, {max(turn.load for turn in turns):.1f} at most"
        " (1-minute averages, the benchmark's own processes included)",
        **describe_machine(),
    }
    text = report(facts, turns)
    print(text)
    if not options.quick:
        write_results("averaging" if options.averaging else "foundation", text, facts, turns)
    return 0


def numbers(text: str) -> list[int]:
    """``"50,100"``"""
    return [int(one) for one in text.split(",")]


def run_repeats(plan: list[list[TurnSpec]], limit_s: float, keep: Path | None) -> list[Turn]:
    """At least one repeat; another one only if it fits into ``limit_s`` judging by the one before."""
    turns: list[Turn] = []
    begin, next_s = time.monotonic(), 0.0
    for repeat in range(MOST_REPEATS):
        if repeat and time.monotonic() - begin + next_s > limit_s:
            break
        for specs in plan:
            for spec in rotated([one for one in specs if not (one.once and repeat)], repeat):
                turn = run_turn(spec, repeat, keep)
                turns.append(turn)
                print(_progress(turn), file=sys.stderr, flush=True)
        next_s = sum(turn.total_s for turn in turns if turn.repeat == repeat and not turn.spec.once)
    return turns


def report(facts: dict[str, str], turns: Sequence[Turn]) -> str:
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join(["# Benchmark", "", *lines, "", all_tables(turns), ""])


def write_results(name: str, text: str, facts: dict[str, str], turns: Sequence[Turn]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    content = {**facts, "turns": [_plain(asdict(turn)) for turn in turns]}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Values that JSON has: NaN becomes null, six significant digits are enough."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if name != "time"}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value


def _progress(turn: Turn) -> str:
    what = f"{turn.spec.contender}, {turn.spec.peers} peers, {turn.spec.parameters} parameters"
    result = turn.failure or f"{number(turn.step_s)} s per step, {turn.steps} steps"
    return f"[repeat {turn.repeat + 1}, {turn.total_s:.0f} s, load {turn.load:.1f}] {what}: {result}"


if __name__ == "__main__":
    sys.exit(main())
