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
    speed.look([[sock]])
    found = speed.of_line([[sock]])
    assert 1e5 < found < 6e6  # (a machine that stands still makes it slower)
    assert speed.of_line([[sock]]) == speed.to([sock]) == found, "it is remembered"


def test_connections_to_one_peer_add_up(connect: Connect) -> None:
    socks, speed = [connect(3e6), connect(3e6)], Speed()
    for sock in socks:
        push(sock, 3 << 20)
    speed.look([socks])
    assert speed.to(socks) == pytest.approx(speed.to(socks[:1]) + speed.to(socks[1:]))
    assert speed.to(socks[:1]) < 5e6


def test_what_is_not_known_counts_as_fast(connect: Connect) -> None:
    sock, speed = connect(FAST), Speed()
    assert speed.to([]) == speed.to([sock]) == speed.of_line([[sock]]) == FAST
    push(sock, 1000)
    speed.look([[sock]])
    assert speed.to([sock]) == speed.of_line([[sock]]) == FAST
    sock.close()
    speed.look([[sock]])
    speed.look([])
    assert speed.to([sock]) == speed.of_line([[sock]]) == FAST
    assert sent(socket.socket(socket.AF_UNIX)) is None


class Kernel:
    """What it says of connections, as if; and a speed that looks at them, each to another peer."""

    def __init__(self, socks: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
        self.socks, self.speed = socks, Speed()
        self.now = dict.fromkeys(socks, Sent(0, 0.0))
        monkeypatch.setattr("lightning_hivemind.engine.native.wire.speed.sent", self.now.__getitem__)

    @property
    def rate(self) -> float:
        """Of the line."""
        return self.speed.of_line([[sock] for sock in self.socks])

    def passes(self, *sent_to: tuple[int, float], waits: bool = True) -> None:
        """Bytes and busy seconds since the last look, of each; and whether more of them wait."""
        for sock, (count, busy_s) in zip(self.socks, sent_to, strict=True):
            before = self.now[sock]
            self.now[sock] = Sent(before.arrived + count, before.busy_s + busy_s, waits and busy_s > 0)
        self.speed.look([[sock] for sock in self.socks])


Kernels = Callable[[int], Kernel]


@pytest.fixture
def kernel(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Makes one, of so many connections."""
    return lambda peers: Kernel([connect(FAST) for _ in range(peers)], monkeypatch)


def test_a_slow_line_is_found_with_the_first_second_of_it(kernel: Kernels) -> None:
    line = kernel(1)
    assert line.rate == FAST
    for _ in range(8):
        line.passes((15_000, 0.125))
    assert line.rate == pytest.approx(120e3)


def test_a_line_of_very_few_bytes_a_second_stays_known(kernel: Kernels) -> None:
    line = kernel(2)
    for _ in range(1000):
        line.passes((500, 0.1), (500, 0.1))
    assert line.rate == pytest.approx(10e3)


def test_short_messages_over_a_long_way_say_nothing(kernel: Kernels) -> None:
    """Of each the kernel counts the way there and back."""
    line = kernel(1)
    for _ in range(20_000):
        line.passes((100, 0.2), waits=False)
        assert line.rate == FAST
    line.passes((4 << 20, 1.0), waits=False)
    assert line.rate == 4 << 20


def test_the_end_of_what_was_much_counts_with_it(kernel: Kernels) -> None:
    line = kernel(1)
    line.passes((60_000, 0.5))
    line.passes((60_000, 0.5), waits=False)
    assert line.rate == pytest.approx(120e3)


def test_who_has_all_of_its_own_early_leaves_the_line_to_the_others(kernel: Kernels) -> None:
    """Each connection's own speed depends on how many there were beside it: they do not add up to the line's."""
    line = kernel(3)
    for _ in range(5):
        line.passes((100_000, 0.1), (100_000, 0.1), (100_000, 0.1))
    for _ in range(5):
        line.passes((0, 0.0), (150_000, 0.1), (150_000, 0.1))
    assert line.rate == pytest.approx(3e6)
    assert sum(line.speed.to([sock]) for sock in line.socks) > 1.15 * 3e6


def test_a_line_that_becomes_slower_or_quicker_is_found_to_be(kernel: Kernels) -> None:
    line = kernel(2)
    for rate in (5e6, 1e6, 5e6):
        for _ in range(100):
            line.passes((int(rate / 20), 0.1), (int(rate / 20), 0.1))
        assert line.rate == pytest.approx(rate, rel=0.2)


def test_one_peer_whose_own_line_is_slow_does_not_make_this_one_slow(kernel: Kernels) -> None:
    line = kernel(3)
    for _ in range(20):
        for _ in range(5):
            line.passes((200_000, 0.1), (200_000, 0.1), (20_000, 0.1))
        for _ in range(20):
            line.passes((0, 0.0), (0, 0.0), (20_000, 0.1))
    assert line.rate == pytest.approx(4.2e6, rel=0.01)
    assert 4 * line.speed.to(line.socks[2:]) < line.speed.to(line.socks[:1])


def test_that_several_are_slow_does_not_make_it_slow_either(kernel: Kernels) -> None:
    line = kernel(4)
    for _ in range(20):
        for _ in range(5):
            line.passes((200_000, 0.1), (200_000, 0.1), (20_000, 0.1), (20_000, 0.1))
        for _ in range(20):
            line.passes((0, 0.0), (0, 0.0), (20_000, 0.1), (20_000, 0.1))
    assert line.rate == pytest.approx(4.4e6, rel=0.05)


def test_who_sends_to_one_of_several_only_can_send_as_much(kernel: Kernels) -> None:
    """A peer that hands its gradients to another one, and then has a quicker line."""
    line = kernel(2)
    for _ in range(20):
        line.passes((50_000, 0.1), (50_000, 0.1))
    assert line.rate == pytest.approx(1e6)
    for _ in range(100):
        line.passes((300_000, 0.1), (0, 0.0))
    assert line.rate == pytest.approx(3e6, rel=0.1)


def test_a_line_on_which_nothing_arrives_any_more_becomes_slow(kernel: Kernels) -> None:
    line = kernel(2)
    for _ in range(10):
        line.passes((500_000, 0.1), (500_000, 0.1))
    for _ in range(100):
        line.passes((0, 0.1), (0, 0.1))
    assert line.rate < 1e6
