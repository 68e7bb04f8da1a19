"""Many peers on few cores for a long time, while something happens to one of them every few seconds.

    python benchmarks/soak.py --every 0       # nothing happens; writes benchmarks/results/soak-calm.md
    python benchmarks/soak.py                 # eight peers, ten minutes, an event every five seconds; writes soak.md
    python benchmarks/soak.py --codec Uniform8BitQuantization --peers 6 --minutes 4

An event kills a random peer, or freezes it for six seconds. A killed one is started again after twenty. In the first
and the last minute nothing happens, nor while fewer than three peers train, nor to the last one through which a new one
is about to join: where all of those die nothing can be saved. The loss at equal steps is compared with that of the last
run without events. Status 1 if the swarm made no step for long, if parameters were unlike at one step, if a sample was
counted twice, if a peer took more and more memory, descriptors or threads, or did not end well.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import psutil

from bench_bars import at_most, is_so
from bench_results import RESULTS, Run, report, write
from bench_spec import json_lines
from bench_stats import markdown_table, number
from herd import Herd, Peer

RESTART_S, FROZEN_S = 20.0, 6.0
#: peers that must train for something to happen to one of them
LEAST = 3
#: a peer that has lived so long has taken all the memory that it needs
SETTLED_S = 60.0
SAMPLE_S = 5.0
#: events that are counted
TOLD = ("RoundMissed", "RoundIncomplete", "StateLoaded", "StepsUndone", "ParametersDiffered", "GradientCarried")
#: the longest that the swarm may make no step
STILL_S = 20.0
#: over so many steps losses are averaged, and by how much they may be above those without events
WINDOW, LOSS = 50, 1.05
#: by how much a peer may grow in what is left of its life: its memory, and descriptors and threads
GROWTH_MEMORY, GROWTH_COUNTS = 1.1, 1.2


class Soak:
    """What happens to a herd, and how large its peers were: ``(age in s, awake, bytes, descriptors, threads)``."""

    def __init__(self, herd: Herd, every_s: float, seed: int) -> None:
        self.herd, self._every_s, self._chance = herd, every_s, random.Random(seed)
        self.sizes: dict[Peer, list[tuple[float, int, int, int, int]]] = defaultdict(list)
        #: when (`time.time`), to whom, and what happened
        self.struck: list[tuple[float, str, str]] = []
        self._due: list[tuple[float, Peer | None]] = []

    def run(self, seconds: float) -> None:
        """Until that is over, or a peer ends by itself."""
        begin = time.monotonic()
        end, strikes, looks = begin + seconds, begin + SETTLED_S, begin
        while (now := time.monotonic()) < end:
            self._tend(now)
            if self._every_s and strikes <= now < end - SETTLED_S:
                strikes = now + self._every_s
                self._strike(now)
            if now >= looks:
                looks = now + SAMPLE_S
                awake = sum(not peer.frozen for peer in self.herd.living)
                for peer in self.herd.living:
                    self.sizes[peer].append((now - peer.born, awake, *size_of(peer.process.pid)))
            self.herd.watch(0.1)

    def _tend(self, now: float) -> None:
        """Who is due is thawed, or started again."""
        for one in [one for one in self._due if one[0] <= now]:
            self._due.remove(one)
            if one[1] is not None:
                self.herd.thaw(one[1])
                self._note(one[1], "thawed")
            else:
                self._note(self.herd.start(), "restarted")

    def _strike(self, now: float) -> None:
        living = self.herd.living
        awake = {peer.name for peer in living if not peer.frozen}
        training = {peer.name for peer in living if self.herd.trains(peer)}
        ways = [peer.through & awake for peer in living if peer.name not in training]
        spared = frozenset[str]().union(*(way for way in ways if len(way) == 1))
        victims = [peer for peer in living if peer.name in awake - spared and now - peer.born > RESTART_S]
        if len(awake & training) < LEAST or not victims:
            return
        victim = self._chance.choice(victims)
        if self._chance.random() < 0.5:
            self._note(victim, "killed")
            self.herd.kill(victim)
            self._due.append((now + RESTART_S, None))
        else:
            self._note(victim, "frozen")
            self.herd.freeze(victim)
            self._due.append((now + FROZEN_S, victim))

    def _note(self, peer: Peer, what: str) -> None:
        self.struck.append((time.time(), peer.name, what))

    @property
    def events(self) -> Counter[str]:
        """How often what happened; who is thawed was frozen, and is counted there."""
        return Counter(what for _, _, what in self.struck if what != "thawed")


def size_of(pid: int) -> tuple[int, int, int]:
    """Bytes of their own, descriptors and threads of a process and of what it has started."""
    me = psutil.Process(pid)
    family = [me, *me.children(recursive=True)]
    return (
        sum(one.memory_full_info().uss for one in family),
        sum(one.num_fds() for one in family),
        sum(one.num_threads() for one in family),
    )


def growth(sizes: Sequence[tuple[float, int, int, int, int]]) -> list[float] | None:
    """Of memory, descriptors and threads, from the first quarter of its settled life to the last; None if too short.

    Descriptors and threads with as many other peers awake: there are some for each of them.
    """
    settled = [(awake, *counts) for age, awake, *counts in sizes if age > SETTLED_S]
    quarter = len(settled) // 4
    if quarter < 3:
        return None
    first, last = settled[:quarter], settled[-quarter:]
    often = Counter(awake for awake, *_ in first) & Counter(awake for awake, *_ in last)
    if not often:
        return None
    same = max(often, key=lambda awake: (often[awake], awake))

    def ratio(column: int, before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> float:
        return median(one[column] for one in after) / median(one[column] for one in before)

    then, now = ([one for one in part if one[0] == same] for part in (first, last))
    return [ratio(1, first, last), *(ratio(column, then, now) for column in (2, 3))]


def findings(soak: Soak) -> dict[str, Any]:
    """What the peers wrote."""
    folder = soak.herd.folder
    peers: dict[int, int] = defaultdict(int)
    times: dict[int, float] = {}
    losses: dict[int, list[float]] = defaultdict(list)
    for line in soak.herd.all_steps():
        peers[line["epoch"]] += 1
        losses[line["epoch"] // WINDOW].append(line["loss"])
        times[line["epoch"]] = min(line["time"], times.get(line["epoch"], line["time"]))
    first_s = min(times.values()) + SETTLED_S
    steps = sorted(time_s for time_s in times.values() if time_s > first_s)
    events: dict[str, int] = defaultdict(int)
    for path in folder.glob("peer*.events.jsonl"):
        for line in json_lines(path):
            if line["event"] in TOLD:
                events[line["event"]] += 1
    grown = [found for sizes in soak.sizes.values() if (found := growth(sizes)) is not None]
    still_s, until = max(((after - before, after) for before, after in pairwise(steps)), default=(math.inf, math.inf))
    results = [float(path.read_text(encoding="utf-8")) for path in folder.glob("peer*.result")]
    return {
        "steps": max(peers),
        "compared": sum(count > 1 for count in peers.values()),
        "unlike": soak.herd.unlike(),
        "losses": [sum(losses[one]) / len(losses[one]) for one in sorted(losses)[:-1]],
        "twice": soak.herd.counted_twice(),
        "still_s": still_s,
        "struck": [f"{at - until:.1f} s: {who} {what}" for at, who, what in soak.struck if -RESTART_S < at - until < 0],
        "grown": [max(column) for column in zip(*grown, strict=True)] if grown else [],
        "peers_measured": len(grown),
        "events": dict(events),
        "held_out": sorted(results),
        "ended": len(results),
    }


def problems(found: dict[str, Any], peers: int) -> list[str]:
    """What should not be so."""
    wrong = []
    if found["unlike"]:
        wrong.append(f"parameters differed at steps {found['unlike'][:10]}")
    if found["twice"]:
        wrong.append(f"{found['twice']} samples were counted twice")
    if found["still_s"] > STILL_S:
        wrong.append("the swarm stood still")
    limits = (GROWTH_MEMORY, GROWTH_COUNTS, GROWTH_COUNTS)
    if not found["grown"] or any(one > limit for one, limit in zip(found["grown"], limits, strict=True)):
        wrong.append("a peer grew, or none lived long enough to tell")
    if found["ended"] < peers:
        wrong.append(f"of {peers} peers {found['ended']} ended with a result")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two events; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the events")
    parser.add_argument("--codec", default="", help="of gradients: a name in lightning_hivemind or in herd_peer.CODECS")
    parser.add_argument("--keep", action="store_true", help="what the peers wrote")
    parser.add_argument(
        "--write", action=argparse.BooleanOptionalAction, default=True, help="benchmarks/results/soak*.md"
    )
    options = parser.parse_args()
    run = Run()
    with Herd(codec=options.codec) as herd:
        soak = Soak(herd, options.every, options.seed)
        for _ in range(options.peers):
            herd.start()
        soak.run(60 * options.minutes)
        herd.end()
        found = findings(soak)
        wrong = problems(found, len(herd.living))
        herd.keep = bool(wrong) or options.keep
    rows = [
        ["peers", str(options.peers)],
        ["codec", options.codec or "none"],
        ["events", ", ".join(f"{count} {what}" for what, count in soak.events.items()) or "none"],
        ["global steps", str(found["steps"])],
        ["steps at which parameters of two or more peers were compared", str(found["compared"])],
        ["... and differed", str(len(found["unlike"]))],
        ["samples counted twice", str(found["twice"])],
        ["longest time without a step, s", number(found["still_s"])],
        ["what happened before its end", ", ".join(found["struck"]) or "nothing"],
        [f"growth of memory, descriptors, threads, largest of {found['peers_measured']} peers", _times(found["grown"])],
        ["told by peers", ", ".join(f"{count} {what}" for what, count in sorted(found["events"].items()))],
        ["held-out loss, all that lived at the end", ", ".join(number(one) for one in found["held_out"])],
        ["wrong", "; ".join(wrong) or "nothing"],
    ]
    what = f"{options.peers} peers, {_how_often(soak, 60 * options.minutes)}, {options.codec or 'no compression'}"
    bars = [
        is_so(f"{what}: steps with unlike parameters", "0", str(len(found["unlike"])), holds=not found["unlike"]),
        is_so(f"{what}: hangs, leaks, bad ends", "none", "; ".join(wrong) or "none", holds=not wrong),
    ]
    name = "-".join(["soak", *filter(None, [options.codec])])
    if options.every and (calm := _calm_losses(name)):
        bars.append(at_most(f"{what}: loss / without events", LOSS, [loss_ratio(found["losses"], calm)]))
        rows.append(["loss at equal steps / without events", bars[-1].found])
    facts = run.facts(peers=str(options.peers), minutes=f"{options.minutes:g}")
    text = report("Soak", facts, markdown_table(["what", "found"], rows), bars)
    print(text)
    if options.write:
        write(name if options.every else f"{name}-calm", text, facts, bars, found=found)
    return 1 if wrong else 0


def _how_often(soak: Soak, seconds: float) -> str:
    """One failure after another, while there were any."""
    count = soak.events["killed"] + soak.events["frozen"]
    return f"one killed or frozen every {(seconds - 2 * SETTLED_S) / count:.1f} s" if count else "no events"


def loss_ratio(found: Sequence[float], calm: Sequence[float]) -> float:
    """In the last window of as many steps that both have; NaN if there is none."""
    common = min(len(found), len(calm))
    return found[common - 1] / calm[common - 1] if common else math.nan


def _calm_losses(name: str) -> list[float]:
    """Of the run without events that was written last."""
    path = RESULTS / f"{name}-calm.json"
    losses: list[float] = json.loads(path.read_text(encoding="utf-8"))["found"]["losses"] if path.exists() else []
    return losses


def _times(ratios: list[float]) -> str:
    return ", ".join(f"x{number(one)}" for one in ratios) or "no peer lived long enough"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
