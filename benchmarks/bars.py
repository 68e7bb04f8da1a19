"""The table of all bars: what was asked for, what was found, by which command and of which commit.

    python benchmarks/bars.py    # reads benchmarks/results/*.json, writes benchmarks/results/bars.md; measures nothing

Status 1 if a bar does not hold. Of a benchmark that has not run yet there is no file, and no bar.
"""

from __future__ import annotations

import json
import sys

from bench_bars import Bar, cells_of
from bench_results import RESULTS
from bench_stats import markdown_table


def main() -> int:
    rows, missed, unknown = [], 0, 0
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for one in content.get("bars", []):
            bar = Bar(**one)
            missed += bar.holds is False
            unknown += bar.holds is None
            rows.append([*cells_of(bar), f"`{content['command']}`", content["commit"]])
    heads = ["bar", "asked for", "found", "holds", "measured by", "commit"]
    counts = f"{len(rows)} bars, {missed} do not hold, {unknown} were not measured."
    text = "\n".join(["# Bars", "", counts, "", markdown_table(heads, rows), ""])
    print(text)
    (RESULTS / "bars.md").write_text(text, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
