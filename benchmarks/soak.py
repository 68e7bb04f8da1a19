"""Many peers on few cores for a long time, while something happens to one of them every few seconds.

    python benchmarks/soak.py --peers 8 --minutes 10 --every 5     # writes benchmarks/results/soak.md
    python benchmarks/soak.py --every 0                            # the same with nothing happening

An event kills a random peer, or freezes it for six seconds. A killed one is started again after twenty. In the first
and the last minute nothing happens. Status 1 if the swarm made no step for long, if parameters were unlike at one step,
if a peer took more and more memory, descriptors or threads, or did not end well.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench_machine import describe_machine
from bench_spec import json_lines
from bench_stats import markdown_table, number

RESTART_S, FROZEN_S = 20.0, 6.0
#: a peer that has lived so long has taken all the memory that it needs; and so long all have to come back at the end
SETTLED_S = 60.0
SAMPLE_S = 5.0
#: the longest that the swarm may make no step
STILL_S = 20.0
#: by how much a peer may grow in what is left of its life: its memory, and (a few for each other peer) the others
GROWTH_MEMORY, GROWTH_COUNTS = 1.1, 1.5
END_S = 60.0


@dataclass(kw_only=True)
class Peer:
    """One process, and what was seen of it: ``(age in s, bytes, descriptors, threads)``."""

    name: str
    process: subprocess.Popen[bytes]
    born: float
    frozen_until: float = 0.0
    sizes: list[tuple[float, int, int, int]] = field(default_factory=list)


class Soak:
    """A running swarm, and what happens to it."""

    def __init__(self, folder: Path, peers: int, every_s: float, seed: int) -> None:
        self.folder, self._every_s, self._chance = folder, every_s, random.Random(seed)
        self.living: list[Peer] = []
        self.past: list[Peer] = []
        self.events: dict[str, int] = defaultdict(int)
        self._due: list[float] = []
        self._count, self._peers = 0, peers

    def start(self) -> None:
        """One more peer, which joins through those that live."""
        name = f"peer{self._count}"
        self._count += 1
        while self.living and not (paths := [p for p in map(self._address, self.living) if p.exists()]):
            self._tend(0.0)
            time.sleep(0.1)
        known = ",".join(path.read_text(encoding="utf-8") for path in paths) if self.living else ""
        script = str(Path(__file__).with_name("soak_peer.py"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "INITIAL_PEERS": ""}
        with open(self.folder / f"{name}.log", "wb") as log:
            command = [sys.executable, script, str(self.folder), name, known]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.living.append(Peer(name=name, process=process, born=time.monotonic()))

    def run(self, seconds: float) -> None:
        """Until that is over, or a peer ends by itself."""
        for _ in range(self._peers):
            self.start()
        begin = time.monotonic()
        end, strikes, looks = begin + seconds, begin + SETTLED_S, begin
        while (now := time.monotonic()) < end:
            self._tend(now)
            if self._every_s and strikes <= now < end - SETTLED_S:
                strikes = now + self._every_s
                self._strike(now)
            if now >= looks:
                looks = now + SAMPLE_S
                for peer in self.living:
                    peer.sizes.append((now - peer.born, *size_of(peer.process.pid)))
            time.sleep(0.1)

    def end(self) -> None:
        """All stop after the same step; who does not is killed."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + END_S
        for peer in self.living:
            try:
                peer.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.events["did not stop"] += 1
                peer.process.kill()

    def _address(self, peer: Peer) -> Path:
        return self.folder / f"{peer.name}.address"

    def _tend(self, now: float) -> None:
        for peer in self.living:
            if peer.process.poll() is not None:
                raise RuntimeError(f"{peer.name} ended with status {peer.process.returncode}: see {self.folder}")
            if 0 < peer.frozen_until <= now:
                peer.frozen_until = 0.0
                peer.process.send_signal(signal.SIGCONT)
        for due in [due for due in self._due if due <= now]:
            self._due.remove(due)
            self.events["restarted"] += 1
            self.start()

    def _strike(self, now: float) -> None:
        victims = [peer for peer in self.living if not peer.frozen_until and now - peer.born > RESTART_S]
        if len(self.living) < 3 or not victims:
            return
        victim = self._chance.choice(victims)
        if self._chance.random() < 0.5:
            self.events["killed"] += 1
            victim.process.kill()
            victim.process.wait()
            self.living.remove(victim)
            self.past.append(victim)
            self._due.append(now + RESTART_S)
        else:
            self.events["frozen"] += 1
            victim.process.send_signal(signal.SIGSTOP)
            victim.frozen_until = now + FROZEN_S


def size_of(pid: int) -> tuple[int, int, int]:
    """Bytes of their own, descriptors and threads of a process and of what it has started."""
    me = psutil.Process(pid)
    family = [me, *me.children(recursive=True)]
    return (
        sum(one.memory_full_info().uss for one in family),
        sum(one.num_fds() for one in family),
        sum(one.num_threads() for one in family),
    )


def growth(peer: Peer) -> list[float] | None:
    """Of memory, descriptors and threads, from the first quarter of its settled life to the last; None if too short."""
    settled = [sizes for age, *sizes in peer.sizes if age > SETTLED_S]
    quarter = len(settled) // 4
    if quarter < 3:
        return None
    first, last = settled[:quarter], settled[-quarter:]
    return [median(one[column] for one in last) / median(one[column] for one in first) for column in range(3)]


def findings(soak: Soak) -> dict[str, Any]:
    """What the peers wrote."""
    digests: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    times: dict[int, float] = {}
    for path in sorted(soak.folder.glob("peer*.jsonl")):
        if path.name.endswith(".events.jsonl"):
            continue
        for line in json_lines(path):
            digests[line["epoch"]][line["digest"]].append(path.stem)
            times[line["epoch"]] = min(line["time"], times.get(line["epoch"], line["time"]))
    first_s = min(times.values()) + SETTLED_S
    steps = sorted(time_s for time_s in times.values() if time_s > first_s)
    events: dict[str, int] = defaultdict(int)
    for path in soak.folder.glob("peer*.events.jsonl"):
        for line in json_lines(path):
            if line["event"] in ("RoundMissed", "RoundIncomplete", "StateLoaded", "ParametersDiffered"):
                events[line["event"]] += 1
    grown = [found for peer in (*soak.living, *soak.past) if (found := growth(peer)) is not None]
    results = [float(path.read_text(encoding="utf-8")) for path in soak.folder.glob("peer*.result")]
    return {
        "steps": max(digests),
        "compared": sum(sum(map(len, one.values())) > 1 for one in digests.values()),
        "unlike": sorted(epoch for epoch, one in digests.items() if len(one) > 1),
        "still_s": max((after - before for before, after in pairwise(steps)), default=math.inf),
        "grown": [max(column) for column in zip(*grown, strict=True)] if grown else [],
        "peers_measured": len(grown),
        "events": dict(events),
        "held_out": sorted(results),
        "ended": len(results),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two events; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the events")
    parser.add_argument(
        "--write", action=argparse.BooleanOptionalAction, default=True, help="benchmarks/results/soak.md"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, options.peers, options.every, options.seed)
    try:
        soak.run(60 * options.minutes)
        soak.end()
    finally:
        for peer in soak.living:
            peer.process.kill()  # what it has started ends with it
    found = findings(soak)
    wrong = []
    if found["unlike"]:
        wrong.append(f"parameters differed at steps {found['unlike'][:10]}")
    if found["still_s"] > STILL_S:
        wrong.append("the swarm stood still")
    limits = (GROWTH_MEMORY, GROWTH_COUNTS, GROWTH_COUNTS)
    if not found["grown"] or any(one > limit for one, limit in zip(found["grown"], limits, strict=True)):
        wrong.append("a peer grew, or none lived long enough to tell")
    if found["ended"] < len(soak.living):
        wrong.append(f"of {len(soak.living)} peers {found['ended']} ended with a result")
    rows = [
        ["peers", str(options.peers)],
        ["events", ", ".join(f"{count} {what}" for what, count in soak.events.items()) or "none"],
        ["global steps", str(found["steps"])],
        ["steps at which parameters of two or more peers were compared", str(found["compared"])],
        ["... and differed", str(len(found["unlike"]))],
        ["longest time without a step, s", number(found["still_s"])],
        [f"growth of memory, descriptors, threads, largest of {found['peers_measured']} peers", _times(found["grown"])],
        ["told by peers", ", ".join(f"{count} {what}" for what, count in sorted(found["events"].items()))],
        ["held-out loss, all that lived at the end", ", ".join(number(one) for one in found["held_out"])],
        ["wrong", "; ".join(wrong) or "nothing"],
    ]
    facts = [
        f"- {name}: {value}" for name, value in {"seconds": f"{60 * options.minutes:.0f}", **describe_machine()}.items()
    ]
    text = "\n".join(["# Soak", "", *facts, "", markdown_table(["what", "found"], rows), ""])
    print(text)
    if options.write:
        (Path(__file__).resolve().parent / "results" / "soak.md").write_text(text, encoding="utf-8")
    if wrong:
        print(f"the peers' files are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _times(ratios: list[float]) -> str:
    return ", ".join(f"x{number(one)}" for one in ratios) or "no peer lived long enough"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
