"""How often the lineage forks under random faults, on virtual time.

    python benchmarks/forks.py               # some minutes; writes benchmarks/results/forks.md
    python benchmarks/forks.py --seeds 100

Every schedule is a swarm of two to six peers on a network that delays, repeats, reorders and loses messages, with up to
eight faults in ten seconds, and then a calm (``lightning_hivemind.simulation.faults``). A fork is a head that was
extended in two ways; the lineage with more samples wins it at the next contact, and what the other one committed is
lost. The peers run the very rounds of ``engine="native"``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from bench_bars import is_so
from bench_results import Run, report, write
from bench_stats import markdown_table
from lightning_hivemind.simulation.faults import KINDS, Schedule

HOSTILE = "all but partitions"
#: which kinds of faults may happen
PROFILES: dict[str, tuple[str, ...]] = {
    "no faults": (),
    "crashes": ("crash",),
    "freezes": ("freeze",),
    "crashes and freezes": ("crash", "freeze"),
    "cut connections": ("cut",),
    "partitions": ("split",),
    HOSTILE: tuple(kind for kind in KINDS if kind != "split"),
    "all of them": KINDS,
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one schedule. ``commits`` are those of all lineages; ``one``: all living peers end on one lineage."""

    commits: int
    forks: int
    faults: int
    one: bool


def schedule(seed: int, kinds: tuple[str, ...]) -> Found:
    plan = Schedule(seed=seed, kinds=kinds)
    world = plan.run()
    front = max(world.living(), key=lambda peer: peer.head.samples)
    on_it = {front.head, *(commit.parent for commit in front.applied)}
    return Found(
        commits=sum(len(heads) for heads in world.children.values()),
        forks=world.forks,
        faults=len(plan.fired),
        one=all(peer.head in on_it for peer in world.living()),
    )


def row(name: str, found: Sequence[Found]) -> list[str]:
    commits, forks = sum(one.commits for one in found), sum(one.forks for one in found)
    return [
        name,
        str(sum(one.faults for one in found)),
        str(commits),
        str(forks),
        f"{1000 * forks / commits:.2g}",
        f"{sum(one.forks > 0 for one in found)} of {len(found)}",
        str(sum(not one.one for one in found)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="schedules of each kind")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/forks.md")
    options = parser.parse_args()
    run, rows, split = Run(), dict[str, list[str]](), 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, kinds in PROFILES.items():
            found = list(pool.map(partial(schedule, kinds=kinds), range(options.seeds), chunksize=10))
            rows[name] = row(name, found)
            split += sum(not one.one for one in found)
            print(*rows[name], file=sys.stderr, flush=True)
    heads = [
        "faults",
        "of them",
        "commits",
        "forks",
        "per 1000 commits",
        "schedules with one",
        "not on one lineage at the end",
    ]
    bars = [
        is_so("of all schedules, those that do not end on one lineage", "0", str(split), holds=split == 0),
        is_so(f"forks per 1000 commits, {HOSTILE}", "measured", rows[HOSTILE][4], holds=True),
    ]
    facts = run.facts()
    text = report("Forks", facts, markdown_table(heads, list(rows.values())), bars)
    print(text)
    if options.write:
        write("forks", text, facts, bars, rows=list(rows.values()))
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
