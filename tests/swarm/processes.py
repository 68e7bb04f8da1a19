"""Looking at processes from outside: what a peer consists of, and what of it is still there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarm.zygote import descendants

__all__ = ["Footprint", "descendants", "footprint", "parent_of", "state_of", "wait_until"]


@dataclass
class Footprint:
    """What a process tree held at one moment: processes, TCP/UDP ports it listens on, Unix sockets with a path."""

    processes: dict[int, str] = field(default_factory=dict)
    ports: dict[tuple[str, int], str] = field(default_factory=dict)
    sockets: set[str] = field(default_factory=set)

    def merge(self, other: Footprint) -> None:
        self.processes |= other.processes
        self.ports |= other.ports
        self.sockets |= other.sockets

    def named(self, part: str) -> list[int]:
        """Pids of the processes whose command line contains ``part``."""
        return [pid for pid, command in self.processes.items() if part in command]


def footprint(pids: list[int]) -> Footprint:
    """What these processes hold now; those that end meanwhile are left out."""
    inodes: set[str] = set()
    found = Footprint()
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
            found.processes[pid] = command
    for (protocol, port), inode in _listening().items():
        if inode in inodes:
            found.ports[protocol, port] = inode
    for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[6] in inodes and fields[7].startswith("/"):
            found.sockets.add(fields[7])
    return found


def _listening() -> dict[tuple[str, int], str]:
    """(protocol, port) -> inode of all listening TCP and bound UDP sockets."""
    found = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if name.startswith("udp") or fields[3] == "0A":
                    found[name, int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return found


def still_there(before: Footprint) -> list[str]:
    """In words: ports and socket files of ``before`` that still exist (the very same socket, not a later one)."""
    now = _listening()
    left = [f"{protocol} port {port}" for (protocol, port), i in before.ports.items() if now.get((protocol, port)) == i]
    return left + [f"socket file {path}" for path in sorted(before.sockets) if os.path.exists(path)]


def state_of(pid: int) -> str:
    """One letter as in ``ps`` (R, S, D, T: stopped, Z: zombie), or ``""`` when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Pid of the parent, or 0 when there is no such process."""
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    except OSError:
        return 0


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str | Callable[[], str]) -> None:
    """Wait for ``condition``; raises ``TimeoutError`` that says ``what`` was waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s:.0f} s still not: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)
