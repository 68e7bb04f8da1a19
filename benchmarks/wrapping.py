"""CPU time that a swarm's strategy adds to a micro-batch while no round is running, for each kind of peer.

    python benchmarks/wrapping.py    # four minutes; writes benchmarks/results/wrapping.md

Trainers with the same tiny model live side by side and train in turns of 100 batches, 3000 in all: with the bare local
strategy, which accumulates gradients, or makes a step of each batch, as it does if nothing is said; and with the same
inside of ``HivemindStrategy``, which accumulates. Found is the CPU time of a rank's whole process, threads in the
background included. Ranks of bare DDP that accumulate do not average their gradients after a batch, if nothing else is
said; in a swarm (docs/explanation/decisions.md says why), and with steps, they do: so the bar is against ranks that
average, and what a swarm adds to those that do not stands beside it, averaging included.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

from bench_bars import Bar, at_most
from bench_results import Run, report, write
from bench_stats import markdown_table, number

TURNS, BATCHES, PATIENCE_S = 31, 100, 120.0
#: of the first turn, in which everything happens for the first time, nothing counts
WARM = 1
#: by the name of the local strategy: devices
KINDS = {"one process": ("auto", 1), "DDP, two ranks": ("ddp", 2), "FSDP2, two ranks": ("fsdp2", 2)}
LIMIT_MS = 0.5
#: and the options of each
CONTENDERS = {"apart": ["--apart"], "accumulates": [], "steps": ["--steps"], "swarm": ["--swarm"]}
#: against which of them a swarm is held, and what their micro-batch is
BARE = {
    "accumulates": "a micro-batch that is accumulated",
    "steps": "a batch of which it steps",
    "apart": "a micro-batch that ranks accumulate without averaging",
}


def cpu_ms(local_strategy: str, devices: int) -> dict[str, list[float]]:
    """Milliseconds of CPU per batch of a rank, turn by turn, by contender."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "INITIAL_PEERS": ""}
    with tempfile.TemporaryDirectory(prefix="wrapping-") as name:
        folder, running = Path(name), []
        try:
            contenders = {
                one: options for one, options in CONTENDERS.items() if one != "apart" or local_strategy == "ddp"
            }
            for contender, options in contenders.items():
                command = [sys.executable, str(Path(__file__).with_name("wrapping_peer.py")), name, contender]
                command += [local_strategy, str(devices), str(TURNS), str(BATCHES), *options]
                with open(folder / f"{contender}.log", "wb") as log:
                    running.append(
                        subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                    )
            found: dict[str, list[float]] = {contender: [] for contender in contenders}
            for turn in range(TURNS):
                for contender in sorted(contenders, reverse=bool(turn % 2)):
                    (folder / f"{contender}-{turn}.turn").touch()
                    said = [folder / f"{contender}-{turn}-{rank}.cpu" for rank in range(devices)]
                    deadline = time.monotonic() + PATIENCE_S
                    while not all(path.exists() for path in said):
                        if time.monotonic() > deadline:
                            raise TimeoutError((folder / f"{contender}.log").read_text(encoding="utf-8")[-2000:])
                        time.sleep(0.01)
                    found[contender].append(1e3 * mean(float(one.read_text(encoding="utf-8")) for one in said))
        finally:
            for one in running:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
    return {contender: turns[WARM:] for contender, turns in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/wrapping.md")
    options = parser.parse_args()
    began, rows, bars = Run(), [], list[Bar]()
    for kind, (local_strategy, devices) in KINDS.items():
        found = cpu_ms(local_strategy, devices)
        cells = [number(median(found[one])) if one in found else "-" for one in CONTENDERS]
        for bare, of in BARE.items():
            if bare not in found:
                cells.append("-")
                continue
            added = [one - other for one, other in zip(found["swarm"], found[bare], strict=True)]
            cells.append(number(median(added)))
            if bare != "apart":  # which does less: what averaging costs is no wrapping
                bars.append(at_most(f"{kind}: added to {of}", LIMIT_MS, added, " ms"))
        rows.append([kind, *cells])
    facts = began.facts()
    heads = ["peer", "bare, accumulates without averaging: ms of CPU", "bare, accumulates", "bare, steps", "in a swarm"]
    heads += [f"added to {of}" for of in BARE.values()]
    text = report("What a swarm adds to a micro-batch", facts, markdown_table(heads, rows), bars)
    print(text)
    if options.write:
        write("wrapping", text, facts, bars)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    sys.exit(main())
