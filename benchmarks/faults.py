"""What a killed, a frozen, a cut off and a very slow peer cost the others.

    python benchmarks/faults.py              # about half an hour; writes benchmarks/results/faults.md
    python benchmarks/faults.py --times 2    # fewer of what is left to chance

Three peers train with ``engine="native"``. One dies of ``kill -9`` in each phase of a round, as a member, as an owner
of chunks and as the coordinator (``swarm.phases``), and so does, at a random moment, the one through which the others
have joined; SIGSTOP comes to a random one at a random moment. Afterwards another one joins, or it is thawed. What it
cost is the longest step of those that go on, less the usual one of all three. The same where all packets of one are
lost (each has a network of its own then, which needs root). Then one of the three is twenty times slower than the
others, then one has a line so slow that it takes several steps to send a gradient, and then two processes for each core
keep the machine busy.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from bench_bars import at_most, is_so
from bench_results import Run, report, write
from bench_stats import markdown_table, number, summary
from herd import BATCH, Herd, Peer

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from swarm.namespaces import homes, why_no_homes
from swarm.namespaces import run as run_command
from swarm.phases import MOMENTS

BATCH_S = 0.1
#: with a slow peer: what a batch of the others takes longer than it does, as how many of theirs its own, and the target
QUICK_S, SLOWER, SLOW_TARGET = 0.02, 20.0, 128
#: of undisturbed training before each event, and in which its cost shows
USUAL_S, AFTER_S = 6.0, 8.0
FROZEN_S = 6.0
#: within which who was thawed has to be in step again
BACK_S = 30.0
#: of the lines of peers that have networks of their own: no limit
LINE_MBIT_S = 10_000.0
#: of one slow line, and steps that are measured without that peer, and beside it once it has shown itself slow
SLOW_LINE_MBIT_S, SLOW_LINE_EPOCHS, SETTLED_S = 1.0, 30, 20.0
#: within which a moment of a round comes: every peer is its coordinator now and then
DOOMED_S = 60.0
#: a step on a busy machine takes no longer, on the average
STEP_S = 5.0


def intervals(steps: Sequence[float], first: float, last: float) -> list[float]:
    """Lengths of the steps that touch this span of time."""
    return [after - before for before, after in pairwise(steps) if after > first and before < last]


def times(herd: Herd, peer: Peer) -> list[float]:
    return [one["time"] for one in herd.steps(peer)]


def cost(herd: Herd, others: Sequence[Peer], at: float) -> float:
    """By how much the longest step of ``others`` after ``at`` was longer than a usual one."""
    longest = usual = 0.0
    for peer in others:
        ends = times(herd, peer)
        before = intervals(ends, at - USUAL_S, at)
        usual = max(usual, median(before)) if before else math.nan
        longest = max(longest, *intervals(ends, at, at + AFTER_S), time.time() - ends[-1])
    return longest - usual


def killed(herd: Herd, moment: str) -> float:
    """One more peer, which dies at that moment of a round."""
    victim = herd.start(BATCH_S, dies=moment)
    herd.await_steps(victim, 5)
    herd.watch(USUAL_S)
    at = herd.doom(victim, DOOMED_S)
    herd.watch(AFTER_S)
    return cost(herd, herd.living, at)


def first_killed(herd: Herd, chance: random.Random) -> float:
    """The oldest of three dies, whenever it is."""
    herd.await_steps(herd.start(BATCH_S), 5)
    herd.watch(USUAL_S + chance.random())
    at = time.time()
    herd.kill(herd.living[0])
    herd.watch(AFTER_S)
    return cost(herd, herd.living, at)


def absent(
    herd: Herd, chance: random.Random, leave: Callable[[Peer], None], back: Callable[[Peer], None]
) -> tuple[float, float]:
    """The cost of a peer that is away for a while, and the seconds until it has the parameters of the others again."""
    herd.watch(USUAL_S + chance.random())
    victim, at = chance.choice(herd.living), time.time()
    others = [peer for peer in herd.living if peer is not victim]
    leave(victim)
    herd.watch(FROZEN_S)
    thawed = time.time()
    newest = herd.steps(others[0])[-1]["epoch"]
    back(victim)
    herd.watch(AFTER_S - FROZEN_S)
    found = cost(herd, others, at)
    while time.time() < thawed + BACK_S:
        theirs = digests(herd, others[0])
        for one in herd.steps(victim):
            if one["epoch"] >= newest and theirs.get(one["epoch"]) == one["digest"]:
                return found, one["time"] - thawed
        herd.watch(0.1)
    return found, math.inf


def cut_off(times: int, chance: random.Random) -> tuple[list[tuple[float, float]], int]:
    """The same for a peer whose cable is pulled, none where networks cannot be made; and samples counted twice."""
    if why := why_no_homes():
        print(f"no cut connections: {why}", file=sys.stderr)
        return [], 0

    def cable(peer: Peer, state: str) -> None:
        run_command(*peer.network.command("ip", "link", "set", "line", state))

    with homes(3, LINE_MBIT_S) as networks, Herd(networks=networks) as herd:
        herd.gather(3, BATCH_S)
        found = [
            absent(herd, chance, lambda one: cable(one, "down"), lambda one: cable(one, "up")) for _ in range(times)
        ]
        herd.end()
        return found, herd.counted_twice()


def worst(values: Sequence[float]) -> float:
    """NaN if one was not measured, or none."""
    return math.nan if not values or any(map(math.isnan, values)) else max(values)


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
        last, theirs = herd.steps(late)[-1], digests(herd, two[0])
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
        slow = herd.start(BATCH_S)
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


def digests(herd: Herd, peer: Peer) -> dict[int, str]:
    return {one["epoch"]: one["digest"] for one in herd.steps(peer)}


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
    parser.add_argument("--times", type=int, default=8, help="how often the first peer is killed, and one is frozen")
    parser.add_argument("--epochs", type=int, default=200, help="beside a slow peer, and before it comes")
    parser.add_argument("--rounds", type=int, default=500, help="on a busy machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/faults.md")
    options = parser.parse_args()
    chance, run = random.Random(options.seed), Run()
    with Herd() as herd:
        herd.gather(2, BATCH_S)
        kills = {moment: killed(herd, moment) for moment in MOMENTS}
        firsts = [first_killed(herd, chance) for _ in range(options.times)]
        herd.await_steps(herd.start(BATCH_S), 5)
        freezes = [absent(herd, chance, herd.freeze, herd.thaw) for _ in range(options.times)]
        herd.end()
        unlike, twice = herd.unlike(), herd.counted_twice()
    cuts, twice_cut = cut_off(options.times, chance)
    alone, beside, gave, member = slow(options.epochs)
    line_alone, line_beside, handed = slow_line(SLOW_LINE_EPOCHS)
    steps, without, states = busy(options.rounds)
    rows = [
        ["`kill -9`: longest step of the others above the usual, s", summary(list(kills.values())).show()],
        *([f"... {moment}", number(found)] for moment, found in kills.items()),
        [f"... the first peer, {len(firsts)} times", summary(firsts).show()],
        ["... the longest of all", number(worst([*kills.values(), *firsts]))],
        [f"SIGSTOP for {FROZEN_S:.0f} s: the same", summary([one for one, _ in freezes]).show()],
        ["... the longest of all", number(worst([one for one, _ in freezes]))],
        ["... until it is in step again once thawed", summary([back for _, back in freezes]).show()],
        [f"its packets are lost for {FROZEN_S:.0f} s: the same", summary([one for one, _ in cuts]).show()],
        ["... the longest of all", number(worst([one for one, _ in cuts]))],
        ["... until it is in step again", summary([back for _, back in cuts]).show()],
        ["after all that is killed and frozen: steps with unlike parameters", str(len(unlike))],
        ["... and after all that is cut off: samples counted twice", str(twice + twice_cut)],
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
    frozen_s, back_s = [worst(column) for column in zip(*freezes, strict=True)]
    cut_s = [worst(column) for column in zip(*cuts, strict=True)]
    what = "kill -9 in any role and phase: longest step of the others above the usual"
    slower, gives = f"a peer {SLOWER:.0f} times slower", f"{gave} of {options.epochs} steps"
    bars = [
        at_most(what, 2.0, [worst([*kills.values(), *firsts])], " s"),
        at_most("SIGSTOP: the same (it is noticed within 2 s)", 4.0, [frozen_s], " s"),
        at_most("SIGSTOP: until it is in step again", BACK_S, [back_s], " s"),
        at_most("cut off: longest step of the others above the usual", 4.0, cut_s[:1], " s"),
        at_most("cut off: until it is in step again", BACK_S, cut_s[1:], " s"),
        at_most("kill -9 and SIGSTOP: steps with unlike parameters", 0.0, [len(unlike)]),
        at_most("kill -9, SIGSTOP, cut off: samples counted twice", 0.0, [twice + twice_cut]),
        at_most(f"false deaths in {options.rounds} rounds on a busy machine", 0.0, [false_deaths]),
        is_so(f"{slower}: what the others keep", ">= 0.9", number(kept), holds=kept >= 0.9),
        is_so("a slow line: what the others keep", ">= 0.9", number(line), holds=line >= 0.9 and handed > 0),
        is_so(f"{slower}: gives, and is a member at the end", "yes", gives, holds=member and gave > 0),
    ]
    facts = run.facts()
    text = report("Faults", facts, markdown_table(["what", "found"], rows), bars)
    print(text)
    if options.write:
        write("faults", text, facts, bars, kills=kills, firsts=firsts, freezes=freezes, cuts=cuts)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
