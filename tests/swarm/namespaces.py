"""Several machines on one: network namespaces joined by cables, and without any other network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network of its own; ``address`` is where a namespace at the other end of its (first) cable reaches it."""

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
    with _namespaces("ab") as (first, second):
        _cable(0, first, second)
        yield first, second


@contextlib.contextmanager
def star_of_namespaces() -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    """A namespace that reaches two others, which do not reach one another; and their end, as above."""
    with _namespaces("abc") as (middle, left, right):
        _cable(0, middle, left)
        _cable(1, middle, right)
        yield middle, left, right


@contextlib.contextmanager
def _namespaces(sides: str) -> Iterator[list[Namespace]]:
    # RFC 1918; they see no other network, so this cannot collide with the machine's own
    addresses = ("10.77.0.1", "10.77.0.2", "10.77.1.2")
    made = [Namespace(f"lhm-{os.getpid()}-{side}", address) for side, address in zip(sides, addresses, strict=False)]
    try:
        for space in made:
            _run("ip", "netns", "add", space.name)
            _run(*space.command("ip", "link", "set", "lo", "up"))
        yield made
    finally:
        for space in made:
            _remove(space)


def _cable(number: int, first: Namespace, second: Namespace) -> None:
    """Between the two: 10.77.``number``.1 and .2."""
    name = f"cable{number}"
    _run(*first.command("ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", second.name))
    for end, space in ((1, first), (2, second)):
        _run(*space.command("ip", "addr", "add", f"10.77.{number}.{end}/24", "dev", name))
        _run(*space.command("ip", "link", "set", name, "up"))


def _remove(space: Namespace) -> None:
    inside = subprocess.run(["ip", "netns", "pids", space.name], capture_output=True, text=True)
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space.name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
