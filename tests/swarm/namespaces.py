"""Several machines on one: network namespaces joined by cables, and without any other network."""

from __future__ import annotations

import contextlib
import ctypes
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

    def drops_what_comes_to(self, port: int) -> None:
        """Without an answer, as a router in between that has not been told to forward that port."""
        self._drops([("dport", str(port))])

    def drops_what_comes_over(self, connections: list[tuple[int, int]]) -> None:
        """The same of these TCP connections, by the ports (here, there): what goes the other way arrives."""
        self._drops([("sport", str(there), "dport", str(here)) for here, there in connections])

    def _drops(self, packets: list[tuple[str, ...]]) -> None:
        # rules are read in order, and the first leads to the machine itself: the others have to come before it
        for rule in (
            ("add", "pref", "100", "lookup", "local"),
            ("del", "pref", "0"),
            *(("add", "pref", "10", "iif", "cable0", "ipproto", "tcp", *those, "blackhole") for those in packets),
        ):
            run("ip", "-n", self.name, "rule", *rule)

    def connections(self, pid: int) -> list[tuple[int, int]]:
        """The ports (here, there) of that process's TCP connections."""
        listed = run(*self.command("ss", "-tnpH", "state", "established"))
        fields = [line.split() for line in listed.splitlines() if f"pid={pid}," in line]
        return [(int(here.rpartition(":")[2]), int(there.rpartition(":")[2])) for _, _, here, there, *_ in fields]

    def cable(self, number: int, *, plugged: bool) -> None:
        """Pull that one out, or plug it in again: nothing is answered meanwhile, and nothing closed."""
        run(*self.command("ip", "link", "set", f"cable{number}", "up" if plugged else "down"))

    def enter(self) -> None:
        """From now on this process, and what it starts, has this network. It must have one thread only."""
        with open(f"/run/netns/{self.name}", "rb") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.name}")


def why_no_homes() -> str | None:
    """The same for :func:`homes`."""
    if (why := why_unavailable()) is not None:
        return why
    if shutil.which("tc") is None:
        return "needs `tc` (iproute2) for lines of limited width"
    try:
        with homes(1, 10.0):
            return None
    except AssertionError as error:
        return f"lines of limited width cannot be made here: {error}"


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
    with namespaces("10.77.0.1", "10.77.0.2") as (first, second):
        _cable(0, first, second)
        yield first, second


@contextlib.contextmanager
def star_of_namespaces(network: str = "10.77") -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    """A namespace that reaches two others, which do not reach one another; and their end, as above.

    ``network`` begins all addresses. Nothing leads out of it, so it may be a public one.
    """
    with namespaces(f"{network}.0.1", f"{network}.0.2", f"{network}.1.2") as (middle, left, right):
        _cable(0, middle, left, network)
        _cable(1, middle, right, network)
        yield middle, left, right


@contextlib.contextmanager
def homes(
    count: int,
    uplink_mbit_s: float,
    *,
    slower: dict[int, float] | None = None,
    downlinks: dict[int, float] | None = None,
) -> Iterator[list[Namespace]]:
    """So many namespaces around one switch, each sending no faster than that; and their end, as above.

    ``slower``: those, by number, that send no faster than this; ``downlinks``: that receive no faster.
    """
    with namespaces(*(f"10.77.0.{number + 1}" for number in range(count)), "") as (*found, switch):
        run(*switch.command("ip", "link", "add", "bridge", "type", "bridge"))
        run(*switch.command("ip", "link", "set", "bridge", "up"))
        for number, home in enumerate(found):
            plug = f"plug{number}"
            run(*switch.command("ip", "link", "add", plug, "type", "veth", "peer", "name", "line", "netns", home.name))
            run(*switch.command("ip", "link", "set", plug, "master", "bridge", "up"))
            run(*home.command("ip", "addr", "add", f"{home.address}/24", "dev", "line"))
            run(*home.command("ip", "link", "set", "line", "up"))
            _shape(home, "line", (slower or {}).get(number, uplink_mbit_s))
            if number in (downlinks or {}):
                _shape(switch, plug, (downlinks or {})[number])
        yield found


@contextlib.contextmanager
def namespaces(*addresses: str) -> Iterator[list[Namespace]]:
    """So many, not joined yet; afterwards every process in them is killed and they are gone."""
    # RFC 1918; they see no other network, so this cannot collide with the machine's own
    made = [Namespace(f"lhm-{os.getpid()}-{number}", address) for number, address in enumerate(addresses)]
    try:
        for space in made:
            run("ip", "netns", "add", space.name)
            run(*space.command("ip", "link", "set", "lo", "up"))
        yield made
    finally:
        for space in made:
            _remove(space)


def _cable(number: int, first: Namespace, second: Namespace, network: str = "10.77") -> None:
    """Between the two: ``network.number``.1 and .2."""
    name = f"cable{number}"
    run(*first.command("ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", second.name))
    for end, space in ((1, first), (2, second)):
        run(*space.command("ip", "addr", "add", f"{network}.{number}.{end}/24", "dev", name))
        run(*space.command("ip", "link", "set", name, "up"))


def _shape(space: Namespace, device: str, mbit_s: float) -> None:
    shape = ("rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "100ms")
    run(*space.command("tc", "qdisc", "add", "dev", device, "root", "tbf", *shape))


def _remove(space: Namespace) -> None:
    inside = subprocess.run(["ip", "netns", "pids", space.name], capture_output=True, text=True)
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space.name], capture_output=True)


def run(*words: str) -> str:
    """Run a command and return what it printed; raises AssertionError with what it said if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
