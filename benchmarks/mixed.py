"""One model, trained together by peers of unlike kinds, each of which dies and comes back; in each of three ways.

    python benchmarks/mixed.py    # a quarter of an hour; writes benchmarks/results/mixed.md and mixed.png

A peer of one device, two ranks of DDP, two of FSDP2, and two of DeepSpeed's ZeRO-3 with offload train the example's
model, 0.22 million parameters, with unlike batches and speeds. One after the other is killed, all its ranks at once,
and started again. Peers compare what all should have by digest: every four steps, with an outer step every 64.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

from bench_bars import Bar, at_most, is_so
from bench_results import RESULTS, Run, report, write
from bench_stats import markdown_table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: samples of each device's batch, and seconds that one takes longer than it must
KINDS = {
    "one device": (8, 0.0),
    "DDP": (6, 0.02),
    "FSDP2": (4, 0.0),
    "ZeRO-3 with offload": (5, 0.04),
}
#: samples of a round, and the outer optimizer
WAYS = {
    "averaging gradients": (128, ""),
    "DiLoCo": (320, "ours.DiLoCo(lr=0.7, momentum=0.6)"),
    "StreamingDiLoCo": (80, "ours.StreamingDiLoCo(lr=0.7, momentum=0.6, fragments=4)"),
}
COLOURS = dict(zip(KINDS, ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), strict=True))
TOGETHER_S, AWAY_S, PATIENCE_S = 12.0, 4.0, 120.0
SMOOTHED = 20


@dataclass(slots=True)
class Peer:
    """One kind of peer, through its lives."""

    folder: Path
    kind: str
    way: str
    lives: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"{self.kind.split()[0]}-{self.lives}"

    def start(self, join: str) -> None:
        self.lives += 1
        (batch, delay_s), (target, outer) = KINDS[self.kind], WAYS[self.way]
        command = [sys.executable, str(Path(__file__).with_name("mixed_peer.py")), str(self.folder), self.name]
        command += [self.kind, str(target), str(batch), "--delay", str(delay_s), "--outer", outer, "--join", join]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environment |= {"LIGHTNING_HIVEMIND_EVENTS": str(self.folder / f"{self.name}.events.jsonl")}
        environment.pop("INITIAL_PEERS", None)
        with open(self.folder / f"{self.name}.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def kill(self) -> None:
        """All its ranks, as when its machine is gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def address(self) -> str:
        path = self.folder / f"{self.name}.address"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def said(self, event: str, life: int | None = None) -> list[dict[str, Any]]:
        """Of that life, or of all."""
        lives = range(1, self.lives + 1) if life is None else (life,)
        paths = [self.folder / f"{self.kind.split()[0]}-{one}.events.jsonl" for one in lives]
        lines = (line for path in paths if path.exists() for line in whole_lines(path))
        found = (json.loads(line) for line in lines if event in line)  # asked often, of files that grow
        return [one for one in found if one["event"] == event]

    def losses(self, life: int) -> list[dict[str, float]]:
        path = self.folder / f"{self.kind.split()[0]}-{life}.losses.jsonl"
        return [json.loads(line) for line in whole_lines(path)] if path.exists() else []


@dataclass(slots=True)
class Found:
    """Of one run. ``deaths``: by kind, when it was killed, and when its gradients or changes were in a step again."""

    way: str
    began: float
    peers: list[Peer]
    log: list[str] = field(default_factory=list)
    deaths: dict[str, tuple[float, float]] = field(default_factory=dict)
    held_out: float = 0.0

    def note(self, text: str) -> None:
        self.log.append(f"{time.time() - self.began:6.1f} s  {text}")
        print(f"{self.way}: {self.log[-1]}", flush=True)

    @property
    def steps(self) -> list[tuple[int, float, int]]:
        """Each step's number, when the first peer had it, and how many peers were in it."""
        found: dict[int, tuple[float, int]] = {}
        for one in (one for peer in self.peers for one in peer.said("EpochCommitted")):
            when, count = found.get(one["epoch"], (one["time"], 0))
            found[one["epoch"]] = (min(when, one["time"]), max(count, one["contributors"]))
        return [(epoch, when, count) for epoch, (when, count) in sorted(found.items())]

    @property
    def longest_s(self) -> float:
        """From one step to the next, while there was somebody to make them."""
        times = [when for _, when, _ in self.steps]
        return max(later - earlier for earlier, later in pairwise(times))


def whole_lines(path: Path) -> list[str]:
    """Not one that is being written, or that its writer did not live to end."""
    return [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def wait_for(what: str, condition: Callable[[], object], peers: Sequence[Peer]) -> None:
    deadline, folder = time.monotonic() + PATIENCE_S, peers[0].folder
    while not condition():
        for one in peers:
            if one.process is not None and one.process.poll() is not None:
                raise RuntimeError(f"{one.name} has ended before: {what}. See {folder}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {PATIENCE_S:.0f} s: {what}. See {folder}")
        time.sleep(0.1)


def run(way: str, folder: Path) -> Found:
    peers = [Peer(folder, kind, way) for kind in KINDS]
    found = Found(way, time.time(), peers)
    try:
        for peer in peers:
            peer.start(peers[0].address)
            wait_for(f"{peer.name} is there", partial(peer.said, "SwarmReady"), peers)
            found.note(f"{peer.kind} is in the swarm")
        for place, peer in enumerate(peers):
            wait_for("a step of all", partial(all_in_step, found, time.time()), peers)
            time.sleep(TOGETHER_S)
            peer.kill()
            killed = time.time()
            found.note(f"{peer.kind} is killed, at step {found.steps[-1][0]}")
            time.sleep(AWAY_S)
            peer.start(peers[place - 1].address)
            wait_for(f"{peer.name} is back", partial(contributes, peer), peers)
            found.deaths[peer.kind] = killed, time.time()
            found.note(f"{peer.kind} is back, and in step {found.steps[-1][0]}")
        time.sleep(TOGETHER_S)
        (folder / "stop").touch()
        for peer in peers:
            assert peer.process is not None
            if peer.process.wait(PATIENCE_S):
                raise RuntimeError(f"{peer.name} ended with {peer.process.returncode}: see {folder}")
        found.note(f"all have ended, after step {found.steps[-1][0]}")
        (result,) = folder.glob("*.result")
        found.held_out = float(result.read_text(encoding="utf-8"))
        return found
    finally:
        for peer in peers:
            peer.kill()


def all_in_step(found: Found, since: float) -> bool:
    return any(when > since and count == len(found.peers) for _, when, count in found.steps)


def contributes(peer: Peer) -> bool:
    """In its present life."""
    return any(one["samples"] for one in peer.said("EpochCommitted", peer.lives))


def plot(runs: Sequence[Found], path: Path) -> None:
    """Of each run: losses of the peers over time, with their deaths; below how many peers were in each step."""
    figure, axes = plt.subplots(
        2, len(runs), figsize=(5.5 * len(runs), 6), sharex="col", sharey="row", height_ratios=(4, 1), squeeze=False
    )
    for (losses, steps), found in zip(axes.T, runs, strict=True):
        for peer in found.peers:
            colour = COLOURS[peer.kind]
            for life in range(1, peer.lives + 1):
                points = peer.losses(life)
                parts = [points[begin : begin + SMOOTHED] for begin in range(0, len(points), SMOOTHED)]
                when = [part[-1]["time"] - found.began for part in parts]
                mean = [sum(one["loss"] for one in part) / len(part) for part in parts]
                losses.plot(when, mean, color=colour, linewidth=1.0, label=peer.kind if life == 1 else None)
            killed, back = (one - found.began for one in found.deaths[peer.kind])
            for one in (losses, steps):
                one.axvspan(killed, back, color=colour, alpha=0.15, linewidth=0)
        steps.plot([when - found.began for _, when, _ in found.steps], [count for *_, count in found.steps], ".", ms=2)
        losses.set_title(f"{found.way}: held-out loss {found.held_out:.2f}", loc="left")
        steps.set_xlabel("s; shaded: killed, until it is in a step again")
    axes[0, 0].set_ylabel("training loss, nats per byte")
    axes[1, 0].set_ylabel("peers in a step")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def bars_of(runs: Sequence[Found]) -> list[Bar]:
    bars = []
    for found in runs:
        unlike = sum(len(peer.said("ParametersDiffered")) for peer in found.peers)
        bars.append(is_so(f"{found.way}: peers that differed", "none", str(unlike), holds=not unlike))
        bars.append(at_most(f"{found.way}: longest time without a step", 8.0, [found.longest_s], " s"))
    bars.append(at_most("held-out loss in the end", 2.0, [found.held_out for found in runs], " nats per byte"))
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/mixed.*")
    options = parser.parse_args()
    began, runs = Run(), []
    for way in options.ways.split(","):
        runs.append(run(way, Path(tempfile.mkdtemp(prefix="mixed-"))))  # which is kept: the logs are there
    rows = []
    for found in runs:
        for peer in found.peers:
            commits = peer.said("EpochCommitted")
            killed, back = found.deaths[peer.kind]
            inside = sum(one["samples"] > 0 for one in commits)
            samples = sum(one["samples"] for one in commits)
            rows.append([found.way, peer.kind, str(inside), str(samples), f"{back - killed:.1f}"])
        steps = found.steps
        rows.append([found.way, "all", str(len(steps)), "", f"longest without a step: {found.longest_s:.1f}"])
    heads = ["way", "peer", "in steps", "samples in them", "s from its death until it was in a step again"]
    logs = [line for found in runs for line in (f"## {found.way}", "", "```", *found.log, "```", "")]
    bars, facts = bars_of(runs), began.facts()
    table = "\n".join([markdown_table(heads, rows), "", "![losses over time](mixed.png)", "", *logs]).rstrip()
    text = report("Peers of unlike kinds", facts, table, bars)
    print(text)
    if options.write:
        write("mixed", text, facts, bars)
        plot(runs, RESULTS / "mixed.png")
    else:
        plot(runs, Path(tempfile.gettempdir()) / "mixed.png")
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
