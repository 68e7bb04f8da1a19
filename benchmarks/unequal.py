"""What a very slow peer, one with a slow line, and a busy machine cost the others.

    python benchmarks/unequal.py    # a quarter of an hour; writes benchmarks/results/unequal.md

Three peers train with ``engine="native"``. First one is twenty times slower than the others, then one has a line so
slow that it takes several steps to send a gradient (each has a network of its own then, which needs root), and then
two processes for each core keep the machine busy.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from bench_bars import at_most, is_so
from bench_results import Run, report, write
from bench_stats import markdown_table, number
from herd import AFTER_S, BATCH, BATCH_S, LINE_MBIT_S, USUAL_S, Herd, Peer

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from swarm.namespaces import homes, why_no_homes

#: with a slow peer: what a batch of the others takes longer than it does, as how many of theirs its own, and the target
QUICK_S, SLOWER, SLOW_TARGET = 0.02, 20.0, 128
#: of one slow line; it takes more than two steps to send a gradient, and its peer is allowed that
SLOW_LINE_MBIT_S, SLOW_LINE_STALENESS = 1.0, 4
#: steps that are measured without that peer, and beside it once it has shown itself slow
SLOW_LINE_EPOCHS, SETTLED_S = 30, 20.0
#: a step on a busy machine takes no longer, on the average
STEP_S = 5.0


def slow(epochs: int) -> tuple[float, float, int, bool]:
    """Samples per second that two peers give alone, and beside a slow one, over so many steps each.

    Alone before and after: the machine may have become slower. Also the steps with a gradient of the slow one, and
    whether it is in step at the end.
    """
    with Herd(SLOW_TARGET) as herd:
        herd.gather(2, QUICK_S)
        two = list(herd.living)
        before = throughput(herd, two, epochs // 2)
        late = herd.start(SLOWER * len(two) * BATCH / before)  # of what a batch of theirs takes, all in all
        herd.await_steps(late, 2)
        beside = throughput(herd, two, epochs)
        begin = herd.steps(two[0])[-epochs]["time"]
        commits = [one for one in herd.events(late, "EpochCommitted") if one["time"] >= begin]
        gave = sum(one["samples"] > 0 for one in commits)
        last, theirs = herd.steps(late)[-1], herd.digests(two[0])
        member = last["epoch"] >= max(theirs) - 2 and theirs.get(last["epoch"]) == last["digest"]
        return mean([before, alone_again(herd, two, late, epochs // 2)]), beside, gave, member


def alone_again(herd: Herd, two: Sequence[Peer], third: Peer, epochs: int) -> float:
    """What two peers give when that one is gone."""
    herd.kill(third)
    herd.watch(AFTER_S)
    return throughput(herd, two, epochs)


def slow_line(epochs: int) -> tuple[float, float, int]:
    """Samples per second that two peers give alone, and beside one with a slow line; the samples it handed over."""
    if why := why_no_homes():
        print(f"no slow line: {why}", file=sys.stderr)
        return math.nan, math.nan, 0
    slower = {2: SLOW_LINE_MBIT_S}
    with homes(3, LINE_MBIT_S, slower=slower) as networks, Herd(SLOW_TARGET, networks=networks) as herd:
        herd.gather(2, BATCH_S)
        two = list(herd.living)
        before = throughput(herd, two, epochs // 2)
        slow = herd.start(BATCH_S, max_staleness=SLOW_LINE_STALENESS)
        herd.await_steps(slow, 2)
        herd.watch(SETTLED_S)
        beside = throughput(herd, two, epochs)
        handed = sum(one["samples"] for one in herd.events(slow, "GradientHandedOver"))
        return mean([before, alone_again(herd, two, slow, epochs // 2)]), beside, handed


def throughput(herd: Herd, peers: Sequence[Peer], epochs: int) -> float:
    """Samples per second of these peers alone, whoever else gives some, or has them give some."""
    begin, first = time.time(), herd.steps(peers[0])[-1]["epoch"]
    while herd.steps(peers[0])[-1]["epoch"] < first + epochs:
        herd.watch(0.5)
    seconds = time.time() - begin
    given, carried = (
        sum(one["samples"] for peer in peers for one in herd.events(peer, name) if one["time"] > begin)
        for name in ("EpochCommitted", "GradientCarried")
    )
    return (given - carried) / seconds


def busy(rounds: int) -> tuple[int, int, int]:
    """Steps, those not with all three, and states taken, while others keep all cores busy."""
    with Herd() as herd:
        herd.gather(3, BATCH_S)
        with burning(2 * (os.cpu_count() or 1)):
            herd.watch(USUAL_S)
            first = max(herd.steps(peer)[-1]["epoch"] for peer in herd.living)
            deadline = time.monotonic() + STEP_S * rounds
            while herd.steps(herd.living[0])[-1]["epoch"] < first + rounds and time.monotonic() < deadline:
                herd.watch(1.0)
        commits = [one for one in herd.events(herd.living[0], "EpochCommitted") if one["epoch"] > first]
        states = sum(one["epoch"] > first for peer in herd.living for one in herd.events(peer, "StateLoaded"))
        return len(commits), sum(one["contributors"] < 3 for one in commits), states


@contextmanager
def burning(count: int) -> Iterator[None]:
    """So many processes that compute and nothing else."""
    fires = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(count)]
    for fire in fires:
        fire.start()
    try:
        yield
    finally:
        for fire in fires:
            fire.kill()


def _burn() -> None:
    while True:
        sum(range(100_000))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200, help="beside a slow peer, and before it comes")
    parser.add_argument("--rounds", type=int, default=500, help="on a busy machine")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/unequal.md")
    options = parser.parse_args()
    run = Run()
    alone, beside, gave, member = slow(options.epochs)
    line_alone, line_beside, handed = slow_line(SLOW_LINE_EPOCHS)
    steps, without, states = busy(options.rounds)
    rows = [
        [f"a peer {SLOWER:.0f} times slower: samples/s of the other two without it", number(alone)],
        ["... and beside it", number(beside)],
        ["... ratio", number(beside / alone)],
        [f"... steps with a gradient of the slow one, of {options.epochs}", str(gave)],
        ["... it is in step at the end", "yes" if member else "no"],
        [f"a line of {SLOW_LINE_MBIT_S:g} Mbit/s: samples/s of the other two without that peer", number(line_alone)],
        ["... and beside it", number(line_beside)],
        ["... ratio", number(line_beside / line_alone)],
        ["... samples that it handed to them", str(handed)],
        [f"{2 * (os.cpu_count() or 1)} other processes on {os.cpu_count()} cores: steps", str(steps)],
        ["... without a gradient of one of the three", str(without)],
        ["... states that had to be taken", str(states)],
    ]
    line = line_beside / line_alone
    kept, false_deaths = beside / alone, without + states + max(0, options.rounds - steps)
    slower, gives = f"a peer {SLOWER:.0f} times slower", f"{gave} of {options.epochs} steps"
    handed_over = f"{handed} samples, with max_staleness={SLOW_LINE_STALENESS}"
    bars = [
        at_most(f"false deaths in {options.rounds} rounds on a busy machine", 0.0, [false_deaths]),
        is_so(f"{slower}: what the others keep", ">= 0.9", number(kept), holds=kept >= 0.9),
        is_so("a slow line: what the others keep", ">= 0.9", number(line), holds=line >= 0.9),
        is_so("a slow line: its peer hands over its gradients", "yes", handed_over, holds=handed > 0),
        is_so(f"{slower}: gives, and is a member at the end", "yes", gives, holds=member and gave > 0),
    ]
    facts = run.facts()
    text = report("Unequal peers", facts, markdown_table(["what", "found"], rows), bars)
    print(text)
    if options.write:
        write("unequal", text, facts, bars)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
