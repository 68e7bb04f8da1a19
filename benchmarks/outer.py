"""How well outer optimization learns, and with how many bytes, against a step for every batch.

    python benchmarks/outer.py    # 20 minutes; writes benchmarks/results/outer.md

Four peers in processes of their own train the example's model at 0.22 million parameters, each with batches of four,
1000 of them each; found is the loss on text that nobody trains on. Bytes are what passed over loopback, all of it:
values, protocol, signs of life, DHT. Streaming, peers train on during a round, so that there are fewer of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from bench_bars import Bar, at_most
from bench_results import Run, report, write
from bench_stats import markdown_table, number
from outer_peer import BATCH, PEERS

STEPS, INNER = 1000, 10
EACH = PEERS * BATCH
OUTER, INT4 = "0.7,0.6", "ours.Blockwise4BitQuantization(block=256)"
FRAGMENTS = 4
END_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How the peers train, and for how long."""

    name: str
    rounds: int
    target: int
    outer: str = ""
    codec: str = ""
    warm: bool = False
    fragments: int = 1


SYNCHRONOUS = Way(name="a gradient per batch", rounds=STEPS, target=EACH)
FEW = Way(name=f"gradients of {INNER} batches", rounds=STEPS // INNER, target=INNER * EACH)
DILOCO = replace(FEW, name=f"DiLoCo, H={INNER}", outer=OUTER)
DILOCO_INT4 = replace(DILOCO, name=f"DiLoCo, H={INNER}, int4", codec=INT4)
AVERAGING = replace(DILOCO, name=f"parameters every {INNER} batches", outer="1.0,0.0")
STREAMING_INT4 = replace(
    DILOCO_INT4,
    name=f"StreamingDiLoCo, H={INNER}, {FRAGMENTS} fragments, int4",
    rounds=FRAGMENTS * DILOCO.rounds,
    target=DILOCO.target // FRAGMENTS,
    fragments=FRAGMENTS,
)
WAYS = [SYNCHRONOUS, FEW, AVERAGING, DILOCO, DILOCO_INT4, STREAMING_INT4]
WARM = [replace(way, warm=True, name=f"{way.name}, warm") for way in (SYNCHRONOUS, DILOCO_INT4)]


@dataclass(frozen=True, slots=True)
class Found:
    loss: float
    bytes: int
    seconds: float
    rounds: int


def loopback_bytes() -> int:
    """That have passed over the loopback device."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    raise RuntimeError("there is no loopback device")


def peer(folder: Path, number: int, way: Way, options: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).with_name("outer_peer.py")), str(folder), str(number)]
    command += [str(way.rounds), str(way.target), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with open(folder / f"{number}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def wait_for(paths: Sequence[Path], running: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        for one in running:
            if one.poll() not in (None, 0):
                raise RuntimeError(f"a peer ended with status {one.returncode}: see {paths[0].parent}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{[path.name for path in paths]} not there in {timeout_s:.0f} s: see {paths[0].parent}")
        time.sleep(0.05)


def run(way: Way, warm: Path, seed: int) -> Found:
    """Train that way. The folder is kept if something goes wrong."""
    folder = Path(tempfile.mkdtemp(prefix="outer-"))
    options = ["--outer", way.outer, "--codec", way.codec, "--seed", str(seed), "--warm", str(warm) if way.warm else ""]
    if way.fragments > 1:
        options += ["--fragments", str(way.fragments), "--batches", str(STEPS)]
    peers: list[subprocess.Popen[bytes]] = []
    try:
        for place in range(PEERS):
            join = (folder / "0.address").read_text(encoding="utf-8") if place else ""
            peers.append(peer(folder, place, way, [*options, "--join", join]))
            wait_for([folder / f"{place}.address"], peers, END_S)
        wait_for([folder / f"{place}.ready" for place in range(PEERS)], peers, END_S)
        before, began = loopback_bytes(), time.monotonic()
        (folder / "go").touch()
        results = [folder / f"{place}.result" for place in range(PEERS)]
        wait_for(results, peers, END_S)
        found = Found(
            mean(float(one.read_text(encoding="utf-8")) for one in results),
            loopback_bytes() - before,
            time.monotonic() - began,
            int((folder / "0.rounds").read_text(encoding="utf-8")),
        )
        print(f"{way.name}, seed {seed}: {found}", flush=True)
        return found
    finally:
        for one in peers:
            one.kill()
            one.wait()


def warmed_up(folder: Path) -> Path:
    """Weights after as many steps of one process that has everybody's samples."""
    one = peer(folder, 0, SYNCHRONOUS, ["--alone", "--seed", "0"])
    if one.wait(END_S):
        raise RuntimeError(f"warming up failed: see {folder}")
    return folder / "warm.pt"


def worse(found: dict[Way, list[Found]], way: Way, than: Way) -> list[float]:
    """By how many percent the loss is above that of the other way, for each seed."""
    return [100 * (one.loss / other.loss - 1) for one, other in zip(found[way], found[than], strict=True)]


def bars_of(found: dict[Way, list[Found]]) -> list[Bar]:
    share = [one.bytes / other.bytes for one, other in zip(found[DILOCO_INT4], found[SYNCHRONOUS], strict=True)]
    return [
        at_most(
            "DiLoCo int4 from scratch against a gradient per batch", 15, worse(found, DILOCO_INT4, SYNCHRONOUS), " %"
        ),
        at_most("... after a warm start", 5, worse(found, WARM[1], WARM[0]), " %"),
        at_most("... against gradients of as many rounds", -15, worse(found, DILOCO_INT4, FEW), " %"),
        at_most("... bytes against a gradient per batch", 1 / 70, share),
        at_most("int4 against float32", 1, worse(found, DILOCO_INT4, DILOCO), " %"),
        at_most("streaming against plain DiLoCo", 5, worse(found, STREAMING_INT4, DILOCO_INT4), " %"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="of the data")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/outer.md")
    options = parser.parse_args()
    began, found = Run(), dict[Way, list[Found]]()
    with tempfile.TemporaryDirectory(prefix="outer-warm-") as folder:
        warm = warmed_up(Path(folder))
        for seed in range(1, options.seeds + 1):
            for way in (*WAYS, *WARM):
                found.setdefault(way, []).append(run(way, warm, seed))
    rows = []
    for way, all_found in found.items():
        against = WARM[0] if way.warm else SYNCHRONOUS
        cells = [mean(one.loss for one in all_found), mean(worse(found, way, against))]
        cells += [mean(one.bytes for one in all_found) / 1e6, mean(one.seconds for one in all_found)]
        rounds = mean(one.rounds for one in all_found)
        rows.append([way.name, f"{rounds:.0f}", *map(number, cells)])
    heads = ["way", "rounds", "held-out loss", "% above a gradient per batch", "MB in all", "seconds"]
    bars, facts = bars_of(found), began.facts()
    text = report("Outer optimization", facts, markdown_table(heads, rows), bars)
    print(text)
    if options.write:
        write("outer", text, facts, bars)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
