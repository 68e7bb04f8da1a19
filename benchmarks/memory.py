"""Host memory that a swarm takes at each rank of a peer, above the same local strategy without a swarm.

    PYTHONPATH=tests python benchmarks/memory.py    # five minutes; writes benchmarks/results/memory.md

A model of 25 million values in float32, with AdamW, makes global steps together with a peer of one device. What is
"device" memory on a GPU is host memory here, too: found is the difference of peaks, in bytes per value of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_bars import Bar, is_so
from bench_results import Run, report, write
from bench_stats import markdown_table
from memory_peer import PARAMETERS

STEPS, PATIENCE_S = 6, 300.0
#: by kind: devices, and what is added at rank 0, and at the others, in bytes per value. Of a round: the sum of
#: gradients, what a round has of it, and the average; of a model in parts, it whole, and chunks that arrive; and at
#: each rank the sum of its own part
KINDS = {
    "one device": (1, 12.0, 0.0),
    "DDP": (2, 12.0, 0.0),
    "FSDP2": (2, 22.0, 2.0),
    # these keep each rank's own gradient beside the averaged one: 4 by the number of ranks
    "FSDP": (2, 24.0, 4.0),
    "ZeRO-2": (2, 24.0, 4.0),
    "ZeRO-3": (2, 24.0, 4.0),
}
#: of a model in parts besides: a message to, or from, each other rank, and the next one
MESSAGES_BYTES = 2 * (32 << 20)


def started(folder: Path, name: str, kind: str, devices: int, *, swarm: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "INITIAL_PEERS": ""}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    command = [sys.executable, str(Path(__file__).with_name("memory_peer.py")), str(folder), name, kind, str(devices)]
    command += [str(STEPS), *(["--swarm"] if swarm else [])]
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def peaks(kind: str, devices: int, *, swarm: bool) -> list[float]:
    """By rank, bytes."""
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        folder, running = Path(name), list[subprocess.Popen[bytes]]()
        try:
            running.append(started(folder, "measured", kind, devices, swarm=swarm))
            if swarm:
                wait_for(folder, [folder / "addresses"], running)
                running.append(started(folder, "partner", "one device", 1, swarm=True))
            said = [folder / f"measured-{rank}.peak" for rank in range(devices)]
            wait_for(folder, said, running)
            return [float(one.read_text(encoding="utf-8")) for one in said]
        finally:
            for one in running:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()


def wait_for(folder: Path, files: list[Path], running: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in files):
        failed = any(one.poll() for one in running)
        if failed or time.monotonic() > deadline:
            logs = [path.read_text(encoding="utf-8", errors="replace")[-3000:] for path in folder.glob("*.log")]
            raise RuntimeError("\n".join(logs))
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/memory.md")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    began, rows, bars = Run(), [], list[Bar]()
    for kind in options.kinds:
        devices, *foretold = KINDS[kind]
        bare, swarm = peaks(kind, devices, swarm=False), peaks(kind, devices, swarm=True)
        added = [(one - other) / PARAMETERS for one, other in zip(swarm, bare, strict=True)]
        for rank in range(devices):
            messages = MESSAGES_BYTES if foretold[1] else 0
            formula = foretold[min(rank, 1)] * PARAMETERS + messages
            most = bare[rank] + formula
            rows.append([
                kind, str(rank), f"{bare[rank] / PARAMETERS:.1f}", f"{swarm[rank] / PARAMETERS:.1f}",
                f"{added[rank]:+.1f}", f"{formula / PARAMETERS:.1f}",
            ])  # fmt: skip
            bars.append(is_so(
                f"{kind}, rank {rank}: peak memory, of the bare one's with the formula", "<= 1.05",
                f"{swarm[rank] / most:.2f}", holds=swarm[rank] <= 1.05 * most,
            ))  # fmt: skip
    facts = began.facts(values=f"{PARAMETERS:,}")
    heads = ["peer", "rank", "bare, bytes per value", "in a swarm", "added", "formula"]
    text = report("Host memory that a swarm takes", facts, markdown_table(heads, rows), bars)
    print(text)
    if options.write:
        write("memory", text, facts, bars)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
