#!/usr/bin/env python3
"""All checks that need a GPU, and what came of each; run by an interpreter that has a torch with CUDA.

    make gpu-check PYTHON=/path/to/python       # with pytest, hivemind, lightning; and deepspeed for its rows

On a machine without a GPU it lists what remains unmeasured.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ["tests/unit/native/test_transfer.py", "tests/swarm/test_gpu.py", "tests/swarm/test_gpu_parts.py"]


class Results:
    """A plugin of pytest that notes what came of each check."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            self.of[report.nodeid] = ("skipped", report.longrepr[2].removeprefix("Skipped: "))
        elif report.failed:
            self.of[report.nodeid] = ("failed", f"in {report.duration:.0f} s, see above")
        elif report.when == "call":
            self.of[report.nodeid] = ("passed", f"in {report.duration:.0f} s")


def main() -> int:
    try:
        import pytest
        import torch
    except ImportError as error:
        print(f"gpu-check: {sys.executable} has no {error.name}: install it there, or name another one (PYTHON=...)")
        return 2
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    os.chdir(ROOT)
    results = Results()
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", *CHECKS, *sys.argv[1:]], plugins=[results]))
    print("\n" + "\n".join(described(torch)))
    for name, (came, why) in results.of.items():
        print(f"{came:8} {name.removeprefix('tests/')}: {why}")
    print(", ".join(f"{count} {came}" for came, count in Counter(came for came, _ in results.of.values()).items()))
    if not torch.cuda.is_available():
        print("no GPU is here: what is skipped above remains unmeasured")
    return code


def described(torch: Any) -> list[str]:
    """What it ran on."""
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    versions = [f"{name} {version(name)}" for name in ("torch", "lightning", "hivemind", "deepspeed")]
    return [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in gpus] + [
        f"CUDA {torch.version.cuda}, {', '.join(versions)}"
    ]


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is missing"


if __name__ == "__main__":
    sys.exit(main())
