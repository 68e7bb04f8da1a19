"""The table of all bars: what was asked for, what was found, by which command and of which commit.

    python benchmarks/bars.py    # reads benchmarks/results/*.json, writes benchmarks/results/bars.md; measures nothing

Status 1 if a bar does not hold, or was not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

from bench_bars import Bar, cells_of
from bench_results import RESULTS
from bench_stats import markdown_table

#: what has bars, and what runs it
BENCHMARKS = {
    "foundation": "python benchmarks/run.py",
    "shortest": "python benchmarks/run.py --shortest",
    "averaging": "python benchmarks/run.py --averaging 50,100 --peers 2,4",
    "forecast": 'make bench ARGS="--forecast 2,4,8"',
    "joiner": "python benchmarks/run.py --joiner 1,50",
    "faults": "python benchmarks/faults.py",
    "unequal": "python benchmarks/unequal.py",
    "forks": "python benchmarks/forks.py",
    "demo": "python benchmarks/demo.py",
    "outer": "python benchmarks/outer.py",
    "wrapping": "python benchmarks/wrapping.py",
    "memory": "python benchmarks/memory.py",
    "soak-calm": "python benchmarks/soak.py --every 0",
    "soak": "python benchmarks/soak.py",
    **{
        f"soak-{codec}": f"python benchmarks/soak.py --peers 6 --minutes 4 --every 4 --codec {codec}"
        for codec in (
            "Float16Compression",
            "BFloat16Compression",
            "Uniform8BitQuantization",
            "Quantile8BitQuantization",
            "BlockwiseQuantization",
            "Blockwise4BitQuantization",
            "TopKCompression",
            "SizeAdaptive",
            "PowerSGD",
        )
    },
}


@cache
def changes_since(commit: str) -> str:
    """Commits to the package since then; ``?`` where git does not know."""
    source, counts = Path(__file__).resolve().parents[1] / "src", []
    for one in commit.split(";"):
        command = ["git", "-C", str(source), "rev-list", "--count", f"{one.strip(' +')}..HEAD", "--", "."]
        counts.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "?")
    return "; ".join(counts)


def main() -> int:
    rows: list[list[str]] = []
    older: list[list[str]] = []
    missed = unknown = 0
    names = {path.stem for path in RESULTS.glob("*.json")}
    for name in (*BENCHMARKS, *sorted(names - set(BENCHMARKS))):  # (those of other codecs, say)
        path = RESULTS / f"{name}.json"
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if name in BENCHMARKS and not content.get("bars"):
            unknown += 1
            never = Bar(what=f"all of {name}", bar="", found="never run, or before there were bars", holds=None)
            rows.append([*cells_of(never), f"`{BENCHMARKS[name]}`", content.get("commit", ""), ""])
        for one in content.get("bars", []):
            bar = Bar(**one)
            commit = content["commit"]
            row = [*cells_of(bar), f"`{content['command']}`", commit, changes_since(commit)]
            if name not in BENCHMARKS:
                older.append(row)
                continue
            rows.append(row)
            missed += bar.holds is False
            unknown += bar.holds is None
    heads = ["bar", "asked for", "found", "holds", "measured by", "commit", "commits to src since"]
    counts = f"{len(rows)} bars, {missed} do not hold, {unknown} were not measured."
    if older:
        counts += f" ({len(older)} more are of other machines, or older: below.)"
    text = "\n".join(["# Bars", "", counts, "", markdown_table(heads, rows), ""])
    if older:
        text += "\n".join(["", "## Of other machines, or older", "", markdown_table(heads, older), ""])
    print(text)
    (RESULTS / "bars.md").write_text(text, encoding="utf-8")
    return 1 if missed or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
