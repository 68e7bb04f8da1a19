"""What a very slow peer, one with large batches, one with a slow line, and a busy machine cost the others.

    python benchmarks/unequal.py    # 22 minutes; writes benchmarks/results/unequal.md

Three peers train with ``engine="native"``. First one is twenty times slower than the others (a batch of it takes little
more than a step: where it takes several, ``max_staleness`` says whether it counts), then one has batches five times as
large, then one has a line so slow that it takes several steps to send a gradient (each has a network of its own then,
which needs root), and then two processes for each core keep the machine busy.
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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench_bars import Bar, at_most, is_so
from bench_results import Run, report, write
from bench_stats import markdown_table, number
from herd import AFTER_S, BATCH, BATCH_S, LINE_MBIT_S, TARGET, USUAL_S, Herd, Peer

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from swarm.namespaces import homes, why_no_homes

#: with a slow peer: what a batch of the others takes longer than it does, as how many of theirs its own, and the target
QUICK_S, SLOWER, SLOW_TARGET = 0.02, 20.0, 128
#: the batches of one that has large ones, and the steps beside it
LARGE_BATCH, LARGE_EPOCHS = 5 * BATCH, 100
#: of one slow line; it takes more than two steps to send a gradient, and its peer is allowed that
SLOW_LINE_MBIT_S, SLOW_LINE_STALENESS = 1.0, 4
#: steps that are measured without that peer, and beside it once it has shown itself slow
SLOW_LINE_EPOCHS, SETTLED_S = 60, 20.0
#: a step on a busy machine takes no longer, on the average
STEP_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Samples per second of two peers ``alone`` and ``beside`` a third one; steps with a gradient of that, or samples.

    ``member``: the third one is in step at the end. ``batch_s``: what a batch of it takes.
    """

    alone: float
    beside: float
    gave: int
    member: bool
    batch_s: float

    @property
    def kept(self) -> float:
        return self.beside / self.alone


def slow(epochs: int) -> Beside:
    """One that is slow. Alone before and after: the machine may have become slower."""
    with Herd(SLOW_TARGET) as herd:
        herd.gather(2, QUICK_S)
        two = list(herd.living)
        before = throughput(herd, two, epochs // 2)
        batch_s = SLOWER * len(two) * BATCH / before  # of what a batch of theirs takes, all in all
        return beside(herd, two, herd.start(batch_s), before, batch_s, epochs)


def large_batches(epochs: int) -> Beside:
    """One whose batches are larger, and take longer in proportion."""
    with Herd() as herd:
        herd.gather(2, BATCH_S)
        two = list(herd.living)
        before = throughput(herd, two, epochs // 2)
        batch_s = BATCH_S * LARGE_BATCH / BATCH
        return beside(herd, two, herd.start(batch_s, batch=LARGE_BATCH), before, batch_s, epochs)


def beside(herd: Herd, two: Sequence[Peer], third: Peer, before: float, batch_s: float, epochs: int) -> Beside:
    """So many steps beside the third one, and half as many without it."""
    herd.await_steps(third, 2)
    together = throughput(herd, two, epochs)
    begin = herd.steps(two[0])[-epochs]["time"]
    commits = [one for one in herd.events(third, "EpochCommitted") if one["time"] >= begin]
    gave, member = sum(one["samples"] > 0 for one in commits), is_in_step(herd, third, two[0])
    alone = mean([before, alone_again(herd, two, third, epochs // 2)])
    return Beside(alone=alone, beside=together, gave=gave, member=member, batch_s=batch_s)


def is_in_step(herd: Herd, peer: Peer, other: Peer) -> bool:
    last, theirs = herd.steps(peer)[-1], herd.digests(other)
    return last["epoch"] >= max(theirs) - 2 and theirs.get(last["epoch"]) == last["digest"]


def alone_again(herd: Herd, two: Sequence[Peer], third: Peer, epochs: int) -> float:
    """What two peers give when that one is gone."""
    herd.kill(third)
    herd.watch(AFTER_S)
    return throughput(herd, two, epochs)


def slow_line(epochs: int) -> Beside:
    """One with a slow line; the samples it handed over."""
    if why := why_no_homes():
        print(f"no slow line: {why}", file=sys.stderr)
        return Beside(alone=math.nan, beside=math.nan, gave=0, member=False, batch_s=BATCH_S)
    slower = {2: SLOW_LINE_MBIT_S}
    with homes(3, LINE_MBIT_S, slower=slower) as networks, Herd(SLOW_TARGET, networks=networks) as herd:
        herd.gather(2, BATCH_S)
        two = list(herd.living)
        before = throughput(herd, two, epochs // 2)
        slow = herd.start(BATCH_S, max_staleness=SLOW_LINE_STALENESS)
        herd.await_steps(slow, 2)
        herd.watch(SETTLED_S)
        found = beside(herd, two, slow, before, BATCH_S, epochs)
        handed = sum(one["samples"] for one in herd.events(slow, "GradientHandedOver"))
        return replace(found, gave=handed)


def rows_of(who: str, found: Beside, target: int) -> list[list[str]]:
    return [
        [f"{who}: samples/s of the other two without it", number(found.alone)],
        ["... and beside it", number(found.beside)],
        ["... ratio", number(found.kept)],
        ["... a step of the two, a batch of it, s", f"{number(target / found.alone)}, {number(found.batch_s)}"],
        ["... it is in step at the end", "yes" if found.member else "no"],
    ]


def bars_of(who: str, found: Beside, gave: str, least: int) -> list[Bar]:
    """``gave``: in words; ``least``: so much of it is to be."""
    return [
        is_so(f"{who}: what the others keep", ">= 0.9", number(found.kept), holds=found.kept >= 0.9),
        is_so(f"{who}: gives, and is a member at the end", "yes", gave, holds=found.member and found.gave >= least),
    ]


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


class Busy(NamedTuple):
    """Steps, those not with all three, states taken, and how often a peer counted fewer than three."""

    steps: int
    without: int
    states: int
    fewer: int


def busy(rounds: int) -> Busy:
    """While others keep all cores busy."""
    with Herd() as herd:
        herd.gather(3, BATCH_S)
        with burning(2 * (os.cpu_count() or 1)):
            herd.watch(USUAL_S)
            first = max(herd.steps(peer)[-1]["epoch"] for peer in herd.living)
            before = [len(herd.events(peer, "PeersChanged")) for peer in herd.living]
            deadline = time.monotonic() + STEP_S * rounds
            while herd.steps(herd.living[0])[-1]["epoch"] < first + rounds and time.monotonic() < deadline:
                herd.watch(1.0)
        commits = [one for one in herd.events(herd.living[0], "EpochCommitted") if one["epoch"] > first]
        told = [herd.events(peer, "PeersChanged")[known:] for peer, known in zip(herd.living, before, strict=True)]
        fewer = sum(one["num_peers"] < 3 for events in told for one in events)
        states = sum(one["epoch"] > first for peer in herd.living for one in herd.events(peer, "StateLoaded"))
        return Busy(len(commits), sum(one["contributors"] < 3 for one in commits), states, fewer)


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
    late, large, line = slow(options.epochs), large_batches(LARGE_EPOCHS), slow_line(SLOW_LINE_EPOCHS)
    full = busy(options.rounds)
    slower, larger = f"a peer {SLOWER:.0f} times slower", f"a peer with batches of {LARGE_BATCH}, of {BATCH} the others"
    rows = [
        *rows_of(slower, late, SLOW_TARGET),
        [f"... steps with a gradient of it, of {options.epochs}", str(late.gave)],
        *rows_of(larger, large, TARGET),
        [f"... steps with a gradient of it, of {LARGE_EPOCHS}", str(large.gave)],
        *rows_of(f"a peer with a line of {SLOW_LINE_MBIT_S:g} Mbit/s", line, SLOW_TARGET),
        ["... samples that it handed to them", str(line.gave)],
        [f"{2 * (os.cpu_count() or 1)} other processes on {os.cpu_count()} cores: steps", str(full.steps)],
        ["... without a gradient of one of the three", str(full.without)],
        ["... states that had to be taken", str(full.states)],
        ["... times that a peer counted fewer than three", str(full.fewer)],
    ]
    false_deaths = full.without + full.states + full.fewer + max(0, options.rounds - full.steps)
    handed_over = f"{line.gave} samples, with max_staleness={SLOW_LINE_STALENESS}"
    bars = [
        at_most(f"false deaths in {options.rounds} rounds on a busy machine", 0.0, [false_deaths]),
        *bars_of(slower, late, f"{late.gave} of {options.epochs} steps", options.epochs // 4),
        *bars_of(larger, large, f"{large.gave} of {LARGE_EPOCHS} steps", LARGE_EPOCHS // 4),
        *bars_of("a slow line", line, handed_over, SLOW_TARGET),
    ]
    facts = run.facts()
    text = report("Unequal peers", facts, markdown_table(["what", "found"], rows), bars)
    print(text)
    if options.write:
        write("unequal", text, facts, bars)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
