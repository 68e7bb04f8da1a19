"""How fast a line sends, as the kernel has seen it."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from lightning_hivemind.engine.native.wire.speed import FAST, Sent, Speed, sent

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not say")

SO_MAX_PACING_RATE = 47
Connect = Callable[[float], socket.socket]


def drain(sock: socket.socket) -> None:
    """Read to the end. (It is closed here: another thread's close would hit whoever gets its number next.)"""
    with sock, suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes a connection of so many bytes per second, of which everything is read."""
    opened: list[socket.socket] = []

    def make(rate: float) -> socket.socket:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            sock = socket.create_connection(server.getsockname())
            other, _ = server.accept()
        opened.append(sock)
        if rate < FAST:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate))
        threading.Thread(target=drain, args=(other,), daemon=True).start()
        return sock

    yield make
    for sock in opened:
        sock.close()


def push(sock: socket.socket, count: int) -> None:
    """Send, and wait until all of it has arrived."""
    known = sent(sock)
    assert known is not None
    sock.sendall(bytes(count))
    while (now := sent(sock)) is not None and now.arrived < known.arrived + count:
        pass


def test_a_slow_line_is_found_to_be_slow(connect: Connect) -> None:
    sock, speed = connect(4e6), Speed()
    push(sock, 4 << 20)
    speed.look([sock])
    found = speed.of([sock])
    assert 1e5 < found < 6e6  # (a machine that stands still makes it slower)
    assert speed.of([sock]) == found, "it is remembered"


def test_connections_share_the_line(connect: Connect) -> None:
    socks, speed = [connect(3e6), connect(3e6)], Speed()
    for sock in socks:
        push(sock, 3 << 20)
    speed.look(socks)
    assert speed.of(socks) == pytest.approx(speed.of(socks[:1]) + speed.of(socks[1:]))
    assert speed.of(socks[:1]) < 5e6


def test_what_is_not_known_counts_as_fast(connect: Connect) -> None:
    sock, speed = connect(FAST), Speed()
    assert speed.of([]) == speed.of([sock]) == FAST
    push(sock, 1000)
    speed.look([sock])
    assert speed.of([sock]) == FAST
    sock.close()
    speed.look([sock])
    assert speed.of([sock]) == FAST
    assert sent(socket.socket(socket.AF_UNIX)) is None


class Kernel:
    """What it says of a connection, as if: so many bytes after so many seconds each, and whether more of them wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = Sent(0, 0.0)
        monkeypatch.setattr("lightning_hivemind.engine.native.wire.speed.sent", lambda _: self.now)

    def sends(self, count: int, busy_s: float, *, waits: bool) -> None:
        self.now = Sent(self.now.arrived + count, self.now.busy_s + busy_s, waits)


def test_a_slow_line_is_found_with_the_first_second_of_it(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    sock, speed, kernel = connect(FAST), Speed(), Kernel(monkeypatch)
    assert speed.of([sock]) == FAST
    for _ in range(10):
        kernel.sends(12_000, 0.1, waits=True)
        speed.look([sock])
    assert speed.of([sock]) == pytest.approx(120e3)


def test_short_messages_over_a_long_way_say_nothing(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each the kernel counts the way there and back."""
    sock, speed, kernel = connect(FAST), Speed(), Kernel(monkeypatch)
    for _ in range(20_000):
        kernel.sends(100, 0.2, waits=False)
        speed.look([sock])
        assert speed.of([sock]) == FAST
    kernel.sends(4 << 20, 1.0, waits=False)
    speed.look([sock])
    assert speed.of([sock]) == 4 << 20


def test_the_end_of_what_was_much_counts_with_it(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    sock, speed, kernel = connect(FAST), Speed(), Kernel(monkeypatch)
    kernel.sends(60_000, 0.5, waits=True)
    speed.look([sock])
    kernel.sends(60_000, 0.5, waits=False)
    speed.look([sock])
    assert speed.of([sock]) == pytest.approx(120e3)
