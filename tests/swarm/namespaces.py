"""Two machines on one: network namespaces joined by a cable, each with an address of its own and no other network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

#: RFC 1918 network for the cable; namespaces see nothing else, so it cannot collide with the machine's own.
_ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network of its own; ``address`` is where the other namespace reaches it."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs ``words`` inside."""
        return ["ip", "netns", "exec", self.name, *words]


def why_unavailable() -> str | None:
    """A reason to skip tests that need namespaces; None where they can be made."""
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2) for network namespaces"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    probe = f"lhm-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"network namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else None


@contextlib.contextmanager
def joined_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces that reach one another; afterwards every process in them is killed and both are gone."""
    names = tuple(f"lhm-{os.getpid()}-{side}" for side in "ab")
    first, second = (Namespace(name, address) for name, address in zip(names, _ADDRESSES, strict=True))
    try:
        for space in (first, second):
            _run("ip", "netns", "add", space.name)
            _run(*space.command("ip", "link", "set", "lo", "up"))
        _run(
            *first.command("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second.name)
        )
        for space in (first, second):
            _run(*space.command("ip", "addr", "add", f"{space.address}/24", "dev", "cable"))
            _run(*space.command("ip", "link", "set", "cable", "up"))
        yield first, second
    finally:
        for space in (first, second):
            _remove(space)


def _remove(space: Namespace) -> None:
    inside = subprocess.run(["ip", "netns", "pids", space.name], capture_output=True, text=True)
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space.name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
