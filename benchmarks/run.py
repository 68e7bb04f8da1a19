"""The benchmark of steps and of averaging: both engines against DDP over gloo and against hivemind's own Optimizer.

    python benchmarks/run.py            # as many repeats as fit into forty minutes; writes benchmarks/results/
    python benchmarks/run.py --quick    # one small repeat in under two minutes; writes nothing
    python benchmarks/run.py --shortest    # the shortest steps only, and who has bars; writes its own results
    python benchmarks/run.py --averaging 50,100 --peers 2,4    # large gradients only; likewise
    make bench ARGS="--forecast 2,4,8"    # the simulator beside real peers on limited lines (needs root); likewise
    python benchmarks/run.py --joiner 1,50    # a late joiner of a large model; likewise
    python benchmarks/run.py --averaging 50,100 --peers 2,4 --more    # and the repeats of its results so far

All contenders take turns: a repeat runs each of them once (slow ones of
hivemind only until they have been measured once), and a ratio compares two turns of the same repeat.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench_bars import bars_of_turns
from bench_forecast import forecast_bars, forecast_specs, forecast_table
from bench_joiner import Joiner, joiner_bars, joiner_table, run_joiner
from bench_more import OtherMeasurement, both, measured_before, next_repeat
from bench_plan import averaging_specs, full_plan, quick_plan, shortest_plan
from bench_results import Run, report, write
from bench_spec import TurnSpec
from bench_stats import number, rotated
from bench_tables import all_tables
from bench_turn import Turn, run_turn

MOST_REPEATS = 7


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small repeat; nothing is written")
    parser.add_argument(
        "--averaging", type=numbers, metavar="MILLIONS", help="only this table, of models of these sizes"
    )
    parser.add_argument("--forecast", type=numbers, metavar="PEERS", help="only this table, of these numbers of peers")
    parser.add_argument("--joiner", type=numbers, metavar="MILLIONS", help="only this table, of models of these sizes")
    parser.add_argument("--shortest", action="store_true", help="only the shortest steps")
    parser.add_argument("--peers", type=numbers, default=[2], help="with --averaging: numbers of peers")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="begin no repeat that would probably end later (not --joiner)"
    )
    parser.add_argument(
        "--more", action="store_true", help="join the repeats and cases with those of the results so far (not --joiner)"
    )
    parser.add_argument(
        "--only",
        metavar="CONTENDERS",
        help="names with semicolons: only these take turns, those whose bars are near",
    )
    parser.add_argument("--keep", type=Path, help="existing folder in which the files of all processes are kept")
    options = parser.parse_args(arguments)
    if options.more and (options.joiner or options.quick):
        parser.error("--more: not with --joiner or --quick")
    name, plan, tables, bars_of = "foundation", full_plan(), all_tables, bars_of_turns
    if options.forecast:
        if why := why_no_lines():
            parser.error(f"--forecast {why}")
        name, plan = "forecast", [forecast_specs(peers) for peers in options.forecast]
        tables, bars_of = forecast_table, forecast_bars
    elif options.averaging:
        name = "averaging"
        plan = [averaging_specs(millions, peers) for millions in options.averaging for peers in options.peers]
    elif options.shortest:
        name, plan = "shortest", shortest_plan()
    elif options.quick:
        plan = quick_plan()
    limit_s = 0.0 if options.quick else 60 * options.minutes
    run, most_load = Run(), 0.0
    try:
        before, facts_before = measured_before(name, plan, run.facts()) if options.more else ([], {})
    except OtherMeasurement as error:
        parser.error(str(error))
    if options.joiner:
        name, repeats = "joiner", 1 if options.quick else MOST_REPEATS
        joined = [one for repeat in range(repeats) for one in run_joiners(options.joiner, repeat, options.keep)]
        table, bars = joiner_table(joined), joiner_bars(joined)
        records = [{"millions": size, **asdict(one)} for size, one in joined]
    else:
        firsts = [next_repeat(before, specs) for specs in plan]
        turns = before + run_repeats(only(plan, options.only), limit_s, options.keep, firsts, before)
        table, records, repeats = tables(turns), [asdict(turn) for turn in turns], 1 + max(one.repeat for one in turns)
        bars, most_load = bars_of(turns), max(turn.load for turn in turns)
    facts = both(facts_before, run.facts(most_load=most_load, repeats=str(repeats)))
    text = report("Benchmark", facts, table, bars)
    print(text)
    if not options.quick:
        write(name, text, facts, bars, turns=records)
    return 0


def why_no_lines() -> str | None:
    """Whether this machine can stand for several, with lines of limited width."""
    try:
        from swarm.namespaces import why_no_homes  # tests/
    except ImportError:
        return 'needs tests/ in PYTHONPATH: run it as `make bench ARGS="--forecast ..."`'
    return why_no_homes()


def only(plan: list[list[TurnSpec]], contenders: str | None) -> list[list[TurnSpec]]:
    """What these have of it; all of it, if none are named."""
    if contenders is None:
        return plan
    return [[spec for spec in specs if spec.contender in contenders.split(";")] for specs in plan]


def numbers(text: str) -> list[int]:
    """``"50,100"``"""
    return [int(one) for one in text.split(",")]


def run_repeats(
    plan: list[list[TurnSpec]], limit_s: float, keep: Path | None, firsts: Sequence[int], before: Sequence[Turn] = ()
) -> list[Turn]:
    """At least one repeat; another only if it fits into ``limit_s`` judging by the last.

    Args:
        firsts: the number of the first, in each case of the plan.
        before: turns that count already.
    """
    turns: list[Turn] = []
    begin, next_s = time.monotonic(), 0.0
    for more in range(MOST_REPEATS):
        now = [(specs, first + more) for specs, first in zip(plan, firsts, strict=True)]
        now = [(specs, repeat) for specs, repeat in now if not more or repeat < MOST_REPEATS]
        if not now or (more and time.monotonic() - begin + next_s > limit_s):
            break
        done = len(turns)
        for specs, repeat in now:
            had = {(turn.spec.case, turn.spec.contender) for turn in (*before, *turns)}
            due = [one for one in specs if not (one.once and (one.case, one.contender) in had)]
            for spec in rotated(due, repeat):
                turn = run_turn(spec, repeat, keep)
                turns.append(turn)
                print(_progress(turn), file=sys.stderr, flush=True)
        next_s = sum(turn.total_s for turn in turns[done:] if not turn.spec.once)
    return turns


def run_joiners(sizes: Sequence[int], repeat: int, keep: Path | None) -> list[tuple[int, Joiner]]:
    """One repeat."""
    found = []
    for millions in sizes:
        found.append((millions, run_joiner(millions, keep)))
        print(f"[repeat {repeat + 1}] {millions}M: {found[-1][1]}", file=sys.stderr, flush=True)
    return found


def _progress(turn: Turn) -> str:
    what = f"{turn.spec.contender}, {turn.spec.peers} peers, {turn.spec.parameters} parameters"
    result = turn.failure or f"{number(turn.step_s)} s per step, {turn.steps} steps"
    return f"[repeat {turn.repeat + 1}, {turn.total_s:.0f} s, load {turn.load:.1f}] {what}: {result}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
