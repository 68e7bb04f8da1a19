"""What a killed, a frozen and a cut off peer cost the others.

    python benchmarks/faults.py              # about half an hour; writes benchmarks/results/faults.md
    python benchmarks/faults.py --times 2    # fewer of what is left to chance (8)

Three peers train with ``engine="native"``. The oldest, through which the others have joined, dies of ``kill -9`` in
each phase of a round, as a member, as an owner of chunks and as the coordinator (``swarm.phases``); then any one at any
moment; SIGSTOP comes to any one at any moment. Afterwards another one joins, or it is thawed. What it cost is the
longest step of those that go on, less the usual one of all three. The same where all packets of one are lost (each has
a network of its own then, which needs root).
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median

from bench_bars import at_most
from bench_results import Run, report, write
from bench_stats import markdown_table, number, summary
from herd import AFTER_S, BATCH_S, LINE_MBIT_S, USUAL_S, WARM_STEPS, Herd, Peer

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from swarm.namespaces import homes, why_no_homes
from swarm.namespaces import run as run_command
from swarm.phases import MOMENTS

FROZEN_S = 6.0
#: within which who was thawed has to be in step again
BACK_S = 30.0
#: within which a moment of a round comes: every peer is its coordinator now and then
DOOMED_S = 60.0


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


def killed(herd: Herd) -> dict[str, float]:
    """What it costs at each moment of a round: of three it is the oldest, through which the others have joined."""
    moments, found = list(MOMENTS), {}
    for moment in moments[:3]:
        herd.await_steps(herd.start(BATCH_S, dies=moment), WARM_STEPS)
    for moment, later in zip_longest(moments, moments[3:], fillvalue=""):
        herd.watch(USUAL_S)
        at = herd.doom(herd.living[0], DOOMED_S)
        herd.watch(AFTER_S)
        found[moment] = cost(herd, herd.living, at)
        herd.await_steps(herd.start(BATCH_S, dies=later), WARM_STEPS)
    return found


def killed_somewhen(herd: Herd, chance: random.Random) -> float:
    """Any of three, at any moment."""
    herd.watch(USUAL_S + chance.random())
    at = time.time()
    herd.kill(chance.choice(herd.living))
    herd.watch(AFTER_S)
    found = cost(herd, herd.living, at)
    herd.await_steps(herd.start(BATCH_S), WARM_STEPS)
    return found


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
        theirs = herd.digests(others[0])
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=8, help="how often any one is killed, frozen, cut off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/faults.md")
    options = parser.parse_args()
    chance, run = random.Random(options.seed), Run()
    with Herd() as herd:
        kills = killed(herd)
        others = [killed_somewhen(herd, chance) for _ in range(options.times)]
        freezes = [absent(herd, chance, herd.freeze, herd.thaw) for _ in range(options.times)]
        herd.end()
        unlike, twice = herd.unlike(), herd.counted_twice()
    cuts, twice_cut = cut_off(options.times, chance)
    rows = [
        [
            "`kill -9` of the first peer: longest step of the others above the usual, s",
            summary([*kills.values()]).show(),
        ],
        *([f"... {moment}", number(found)] for moment, found in kills.items()),
        [f"... any peer at any moment, {len(others)} times", summary(others).show()],
        ["... the longest of all", number(worst([*kills.values(), *others]))],
        [f"SIGSTOP for {FROZEN_S:.0f} s, {len(freezes)} times: the same", summary([one for one, _ in freezes]).show()],
        ["... the longest of all", number(worst([one for one, _ in freezes]))],
        ["... until it is in step again once thawed", summary([back for _, back in freezes]).show()],
        [
            f"its packets are lost for {FROZEN_S:.0f} s, {len(cuts)} times: the same",
            summary([one for one, _ in cuts]).show(),
        ],
        ["... the longest of all", number(worst([one for one, _ in cuts]))],
        ["... until it is in step again", summary([back for _, back in cuts]).show()],
        ["after all that is killed and frozen: steps with unlike parameters", str(len(unlike))],
        ["... and after all that is cut off: samples counted twice", str(twice + twice_cut)],
    ]
    frozen_s, back_s = [worst(column) for column in zip(*freezes, strict=True)]
    cut_s = [worst(column) for column in zip(*cuts, strict=True)]
    what = "kill -9 of the first peer in any role and phase: longest step of the others above the usual"
    bars = [
        at_most(what, 2.0, [worst([*kills.values(), *others])], " s"),
        at_most("SIGSTOP: the same (it is noticed within 2 s)", 4.0, [frozen_s], " s"),
        at_most("SIGSTOP: until it is in step again", BACK_S, [back_s], " s"),
        at_most("cut off: longest step of the others above the usual", 4.0, cut_s[:1], " s"),
        at_most("cut off: until it is in step again", BACK_S, cut_s[1:], " s"),
        at_most("kill -9 and SIGSTOP: steps with unlike parameters", 0.0, [len(unlike)]),
        at_most("kill -9, SIGSTOP, cut off: samples counted twice", 0.0, [twice + twice_cut]),
    ]
    facts = run.facts()
    text = report("Faults", facts, markdown_table(["what", "found"], rows), bars)
    print(text)
    if options.write:
        write("faults", text, facts, bars, kills=kills, others=others, freezes=freezes, cuts=cuts)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
