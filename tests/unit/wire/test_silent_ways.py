"""A connection whose way is lost without a word, while another one to the same peer lives."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from lightning_hivemind.engine.native.wire.connection import wake
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from swarm.town import wait_for
from unit.wire.test_links import City, Tap


class Router(Tap):
    """With a new address it drops what comes from there for the connections that were before.

    What goes there over them is answered by a reset: the other end knows no connection from the new address.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._address = 0
        super().__init__(target)

    def change_address(self) -> None:
        self._address += 1

    def _carry(self, source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        address, outwards = self._address, any(seen is one for one in self.seen)
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                if self._address == address:
                    target.sendall(part)
                elif outwards:
                    source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    source.close()
                    return
        if self._address == address:
            wake(target)


@pytest.fixture
def home() -> Iterator[tuple[City, Router]]:
    """ "home" accepts no connections, and reaches "server" through a router."""
    town = City(secure=True)
    town.settle("home", listens=False)
    town.settle("server")
    router = Router(town.ports["server"])
    town.ports["server"] = router.port
    yield town, router
    town.close()
    router.close()


def hear(town: City, of: str) -> int:
    return len(town.ledgers[of].frames)


def both_send(town: City) -> None:
    for one, other in (("home", "server"), ("server", "home")):
        town.links[one].send(other, Header(kind=Kind.INPUT, length=2), (b"hi",))


@pytest.mark.parametrize("phase_s", [0.0, 0.15, 0.3, 0.45], ids=str)
def test_both_hear_one_another_again_when_a_router_has_a_new_address(home: tuple[City, Router], phase_s: float) -> None:
    town, router = home
    both_send(town)
    wait_for(lambda: bool(hear(town, "home") and hear(town, "server")), "both ways")
    time.sleep(0.5 + phase_s)  # pings go at times of their own
    router.change_address()
    deadline = time.monotonic() + 10.0
    time.sleep(3.0)  # until then some of what was under way may come
    before = {one: hear(town, one) for one in ("home", "server")}
    while time.monotonic() < deadline and not all(hear(town, one) >= before[one] + 3 for one in before):
        both_send(town)
        time.sleep(0.25)
    assert all(hear(town, one) >= before[one] + 3 for one in before), "one hears nothing of the other"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
def test_the_system_gives_up_what_nobody_confirms(home: tuple[City, Router]) -> None:
    """It drops a connection by itself: pings fit into its buffer, and would for a quarter of an hour."""
    town, _ = home
    both_send(town)
    wait_for(lambda: bool(hear(town, "home") and hear(town, "server")), "both ways")
    for one, other in (("home", "server"), ("server", "home")):
        (sock,) = town.links[one]._outlets[other].connections
        limit_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit_ms == 2000 * town.links[one]._detect_s
