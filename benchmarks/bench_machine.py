"""What the numbers were measured on, and how much processor time a tree of processes has used. No names of machines."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

PACKAGES = ("lightning-hivemind", "torch", "lightning", "hivemind", "numpy")


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, versions and the commit, in words."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": str(usable),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def cpu_seconds_below(pid: int) -> float:
    """Processor seconds so far of everything that descends from a process, itself not included."""
    total = 0.0
    for process in psutil.Process(pid).children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile: its parent has its time in the children_* fields
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    """Short hash of the checkout, with ``+`` if the package's sources differ from it."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../src")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
