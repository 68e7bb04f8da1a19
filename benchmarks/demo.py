"""The demo as it is, with its bar: what three peers on this machine reach in five minutes.

    python benchmarks/demo.py    # five minutes; writes benchmarks/results/demo.md and .json

It needs what `make demo` installs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_bars import Bar, at_most, is_so
from bench_results import Run, report, write
from bench_stats import markdown_table, number

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
#: nats per byte
HELD_OUT_LOSS = 2.0


def main() -> int:
    run = Run()
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        ended = subprocess.run([sys.executable, str(DEMO), "--out", folder])
        found = Path(folder) / "summary.json"
        if not found.exists():
            print("the demo came to no result", file=sys.stderr)
            return 1
        result = json.loads(found.read_text(encoding="utf-8"))
    peers = result["peers"]
    losses = [one["held_out_loss"] for one in peers]
    equal = result["largest_difference"] == 0.0
    bars: list[Bar] = [
        at_most("demo: worst held-out loss after five minutes", HELD_OUT_LOSS, [max(losses)]),
        is_so("demo: parameters of all peers", "equal", "equal" if equal else "unlike", holds=equal),
        is_so("demo: ends well", "yes", "yes" if not ended.returncode else "no", holds=not ended.returncode),
    ]
    rows = [
        [one["name"], *(number(one[key]) for key in ("loss_before", "loss_after", "held_out_loss", "samples_per_s"))]
        + [str(one[key]) for key in ("samples", "steps", "incomplete_rounds")]
        for one in peers
    ]
    heads = ["peer", "loss before", "after", "held-out", "samples/s", "samples", "steps", "incomplete rounds"]
    facts = run.facts(step=f"{number(result['seconds_per_step'])} s", losses="nats per byte")
    text = report("The demo", facts, markdown_table(heads, rows), bars)
    print(text)
    write("demo", text, facts, bars, result=result)
    return int(any(bar.holds is False for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
