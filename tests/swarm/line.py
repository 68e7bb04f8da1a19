"""A line between two namespaces as long, as narrow and as bad as one wants: a process that carries its packets.

    python -m swarm.line NAMESPACE NAMESPACE RTT_S MBIT_S LOSS

What it carries is real: TCP of the kernel at both ends, which sees the delay, the losses and a queue that overflows.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm.namespaces import Namespace, namespaces, run

DEVICE = "line"
#: of linux/if_tun.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 2048
#: what a router keeps while the line is busy; more is thrown away
QUEUE_S = 0.05
#: between two looks while packets are on their way
TICK_S = 0.0005


@dataclass(kw_only=True)
class Direction:
    """Packets that go one way, in the order in which they come."""

    source: int
    sink: int
    delay_s: float
    bytes_s: float
    loss: float
    chance: random.Random
    free_at: float = 0.0
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now: float) -> None:
        """Everything that was sent."""
        while True:
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            begins = max(now, self.free_at)
            if self.chance.random() < self.loss or begins > now + QUEUE_S:
                continue
            self.free_at = begins + len(packet) / self.bytes_s
            self.under_way.append((self.free_at + self.delay_s, packet))

    def bring(self, now: float) -> None:
        """Everything that is due."""
        while self.under_way and self.under_way[0][0] <= now:
            with suppress(OSError):  # the other end is not up yet
                os.write(self.sink, self.under_way.popleft()[1])


def carry(ends: tuple[int, int], rtt_s: float, mbit_s: float, loss: float) -> None:
    """Until this process is killed."""
    common = {"delay_s": rtt_s / 2, "bytes_s": mbit_s * 1e6 / 8, "loss": loss}
    ways = [Direction(source=a, sink=b, chance=random.Random(a), **common) for a, b in (ends, ends[::-1])]
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while True:
        busy = any(way.under_way for way in ways)
        poll.poll(1000 * TICK_S if busy else None)
        now = time.monotonic()
        for way in ways:
            way.take(now)
            way.bring(now)


def open_device() -> int:
    """The namespace's end of the line."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


@contextmanager
def line(*, rtt_s: float, mbit_s: float, loss: float) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces at its ends; afterwards every process in them is killed and both are gone."""
    with namespaces("10.78.0.1", "10.78.0.2") as (first, second):
        words = [first.name, second.name, str(rtt_s), str(mbit_s), str(loss)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", "swarm.line", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as carrier:
            assert carrier.stdout is not None
            try:
                assert carrier.stdout.readline().strip() == "up"
                for one, other in ((first, second), (second, first)):
                    run(*one.command("ip", "addr", "add", one.address, "peer", other.address, "dev", DEVICE))
                    run(*one.command("ip", "link", "set", DEVICE, "up"))
                yield first, second
            finally:
                carrier.kill()


def main() -> None:
    first, second, *numbers = sys.argv[1:]
    ends = []
    for name in (first, second):
        Namespace(name, "").enter()
        ends.append(open_device())
    print("up", flush=True)
    rtt_s, mbit_s, loss = map(float, numbers)
    carry((ends[0], ends[1]), rtt_s, mbit_s, loss)


if __name__ == "__main__":
    main()
