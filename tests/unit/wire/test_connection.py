"""Writing to a line that is slow, and to one that stands still."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_hivemind.engine.native.wire import connection
from lightning_hivemind.engine.native.wire.connection import (
    Follower,
    close,
    has_ended,
    read_exactly,
    receive,
    tune,
    write,
)
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, PIECE_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.speed import Line, Sent, line_of, sent
from lightning_hivemind.engine.native.wire.tls import Certificate, client_context
from swarm.town import wait_for

SIZE, BUFFER, TIMEOUT_S = 256 << 10, 16 << 10, 0.3
TLS_RECORD = 16 << 10
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["TLS", "plain"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Who writes and who reads, with little room in between."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        writes = socket.create_connection(listener.getsockname())
        reads, _ = listener.accept()
    writes.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    if request.param == "TLS":
        certificate = Certificate.create()
        wrapped: list[socket.socket] = []

        def accept() -> None:
            wrapped.append(certificate.server.wrap_socket(reads, server_side=True))

        accepting = threading.Thread(target=accept)
        accepting.start()
        writes = client_context().wrap_socket(writes)
        accepting.join()
        (reads,) = wrapped
    if sent(writes) is None:
        pytest.skip("the system does not say what has arrived")
    tune(writes, TIMEOUT_S)
    yield writes, reads
    close(writes)
    close(reads)


def test_a_slow_line_is_not_a_dead_one(pair: Pair) -> None:
    writes, reads = pair
    data, found = bytes(range(256)) * (SIZE // 256), bytearray()

    def read_slowly() -> None:
        reads.settimeout(30.0)
        while len(found) < HEADER_BYTES + SIZE:
            found.extend(reads.recv(4096))
            time.sleep(0.02)  # at most 200 KB/s: of 64 KiB within the time-out nobody could

    reading = threading.Thread(target=read_slowly)
    reading.start()
    began = time.monotonic()
    write(writes, Header(kind=Kind.RESULT, length=SIZE), (data,))
    reading.join(30.0)
    assert time.monotonic() - began > 2 * TIMEOUT_S
    assert bytes(found[HEADER_BYTES:]) == data


def test_a_frame_of_more_parts_than_a_system_takes_at_once_arrives(pair: Pair) -> None:
    writes, reads = pair
    data, found = bytes(range(256)) * (SIZE // 256), bytearray(HEADER_BYTES + SIZE)
    parts = [data[:5], b"", *(data[at : at + 7] for at in range(5, 14_005, 7)), data[14_005:]]
    reading = threading.Thread(target=read_exactly, args=(reads, memoryview(found)))
    reading.start()
    write(writes, Header(kind=Kind.RESULT, length=SIZE), parts)
    reading.join(30.0)
    assert found[HEADER_BYTES:] == data


def test_a_line_that_stands_still_is_given_up(pair: Pair) -> None:
    writes, reads = pair
    stops = threading.Thread(target=read_exactly, args=(reads, memoryview(bytearray(4096))))
    stops.start()
    with pytest.raises(TimeoutError):
        write(writes, Header(kind=Kind.RESULT, length=8 * SIZE), (bytes(8 * SIZE),))
    stops.join()


def congestion(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.fixture
def plain() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        writes = socket.create_connection(listener.getsockname())
        reads, _ = listener.accept()
    yield writes
    close(writes)
    close(reads)


def seen(round_trip_s: float, answer_s: float, lost: int = 0) -> Line:
    return Line(round_trip_s=round_trip_s, answer_s=answer_s, packets=0, lost=lost)


NEAR, FULL, FAR_AND_FULL = seen(0.1e-3, 1e-3), seen(0.1e-3, 0.2), seen(30e-3, 0.2, lost=5)


@pytest.mark.parametrize(
    ("looks", "bbr"),
    [
        pytest.param([(1e8, NEAR)], False, id="near"),
        pytest.param([(1e8, seen(0.1e-3, 1e-3, lost=9))], False, id="near, and lost some"),
        pytest.param([(1e7, FULL)], True, id="full"),
        pytest.param([(1e8, seen(50e-3, 52e-3))], True, id="far"),
        pytest.param([(1e6, seen(5e-3, 6e-3, lost=1))], True, id="loses what is not too much for it"),
        pytest.param([(50e3, seen(90e-3, 95e-3, lost=1))], True, id="loses so much that it looks thin"),
        pytest.param([(50e3, FAR_AND_FULL)], False, id="thin"),
        pytest.param([(50e3, FULL)], False, id="near and thin"),
        pytest.param([(50e3, FAR_AND_FULL), (50e3, seen(30e-3, 31e-3, lost=9))], False, id="thin, and not full now"),
        pytest.param([(1e6, seen(30e-3, 0.2)), (50e3, FAR_AND_FULL)], False, id="shared by many since"),
        pytest.param([(50e3, FAR_AND_FULL), (1e6, seen(30e-3, 40e-3))], True, id="not thin any more"),
    ],
)
def test_bbr_is_for_lines_that_are_not_thin_and_on_which_an_answer_takes_its_time_or_packets_are_lost(
    plain: socket.socket, monkeypatch: pytest.MonkeyPatch, looks: list[tuple[float, Line]], bbr: bool
) -> None:
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        tune(plain, TIMEOUT_S)
        assert congestion(plain) != b"bbr", "nothing is known of it yet"
        before = congestion(plain)
    except (OSError, AttributeError):
        pytest.skip("the system has no BBR, or does not let one choose")
    times = itertools.accumulate((10_000_000 / rate for rate, _ in looks), initial=0.0)
    seen_so_far = iter([Sent(10_000_000 * number, busy_s) for number, busy_s in enumerate(times)])
    monkeypatch.setattr(connection, "sent", lambda _: next(seen_so_far))
    follower = Follower(plain)
    for _, line in looks:
        monkeypatch.setattr(connection, "line_of", lambda _, line=line: line)
        follower.look()
    assert congestion(plain) == (b"bbr" if bbr else before)


def test_the_system_s_own_choice_stands_where_it_is_not_bbr(plain: socket.socket) -> None:
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except (OSError, AttributeError):
        pytest.skip("the system does not let one choose")
    tune(plain, TIMEOUT_S)
    assert congestion(plain) == b"reno"


def test_where_only_bbr_and_reno_are_allowed_a_line_that_needs_no_bbr_has_reno() -> None:
    """As for a user who is not root, where BBR is the system's default."""

    class Restricted:
        has = b"bbr"

        def getsockopt(self, *_: int) -> bytes:
            return self.has

        def setsockopt(self, level: int, option: int, name: bytes) -> None:
            if name not in (b"bbr", b"reno"):
                raise PermissionError
            self.has = name

    sock = Restricted()
    connection._control(sock, by_loss=True)  # type: ignore[arg-type]
    assert sock.has == b"reno"
    connection._control(sock, by_loss=False)  # type: ignore[arg-type]
    assert sock.has == b"bbr"


def test_the_end_of_a_connection_is_seen_without_reading_from_it(pair: Pair) -> None:
    writes, reads = pair
    assert not has_ended(writes)
    close(reads)
    wait_for(lambda: has_ended(writes), "the end")
    close(writes)
    assert has_ended(writes)


def test_how_long_an_answer_takes_is_seen(plain: socket.socket) -> None:
    line = line_of(plain)
    if line is None:
        pytest.skip("the system does not say")
    assert 0.0 < line.round_trip_s <= line.answer_s < 0.5


@pytest.mark.parametrize(
    ("bytes_per_s", "piece"),
    [(1e9, PIECE_BYTES), (8.8e6, PIECE_BYTES), (5e6, 150_000), (0.4e6, 16 << 10), (1e3, 16 << 10)],
)
def test_pieces_are_as_large_as_a_line_carries_in_a_moment(
    plain: socket.socket, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, piece: int
) -> None:
    busy_s = 10_000_000 / bytes_per_s
    times = [(0, 0.0), (10_000_000, busy_s), (10_000_100, busy_s + 1.0), (10**10, busy_s + 2.0)]
    seen_so_far = iter([Sent(*one) for one in times])
    monkeypatch.setattr(connection, "sent", lambda _: next(seen_so_far))
    line = Follower(plain)
    line.look()
    assert line.piece_bytes == piece
    line.look()
    assert line.piece_bytes == piece, "a hundred bytes say nothing"
    line.look()
    assert line.piece_bytes == PIECE_BYTES, "it has become quick"


class Drips:
    """A connection on which what comes is let through drop by drop, until it is told to stop."""

    def __init__(self, source: socket.socket, drop: int, every_s: float) -> None:
        self._source, self._drop, self._every_s = source, drop, every_s
        self.stopped = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._into = socket.create_connection(listener.getsockname())
            self.end, _ = listener.accept()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.stopped.is_set():
            self._into.sendall(self._source.recv(self._drop))
            time.sleep(self._every_s)

    def close(self) -> None:
        self.stopped.set()
        for sock in (self._source, self._into, self.end):
            close(sock)


@pytest.mark.parametrize("stops", [False, True])
def test_a_record_of_tls_may_take_longer_than_the_time_out_as_long_as_some_of_it_comes(stops: bool) -> None:
    """1 Mbit/s, shared by twenty peers: 16 KiB take almost three seconds."""
    ours, theirs = socket.socketpair()
    drips = Drips(ours, TLS_RECORD // 10, TIMEOUT_S / 5)
    certificate, made = Certificate.create(), list[socket.socket]()
    accepting = threading.Thread(target=lambda: made.append(client_context().wrap_socket(drips.end)))
    accepting.start()
    # what the client says goes back past the drops
    answers = threading.Thread(target=_carry, args=(drips._into, ours), daemon=True)
    answers.start()
    writes = certificate.server.wrap_socket(theirs, server_side=True)
    accepting.join()
    (reads,) = made
    if sent(reads) is None:
        pytest.skip("the system does not say what has arrived")
    tune(reads, TIMEOUT_S)
    began = time.monotonic()
    writes.sendall(bytes(TLS_RECORD))
    if stops:
        drips.stopped.set()
        with pytest.raises(TimeoutError):
            read_exactly(reads, memoryview(bytearray(TLS_RECORD)))
        assert time.monotonic() - began < 3 * TIMEOUT_S
    else:
        read_exactly(reads, memoryview(bytearray(TLS_RECORD)))
        assert time.monotonic() - began > TIMEOUT_S
    drips.close()
    close(writes)


def test_silence_lasts_for_the_whole_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out of TLS is over when a record is not whole: then some of it was perhaps heard a moment ago."""
    monkeypatch.setattr(connection, "silent_s", lambda sock: 1.1)
    reads, writes = socket.socketpair()
    with reads, writes:
        reads.settimeout(2.0)
        late = threading.Timer(2.1, lambda: writes.sendall(b"x"))
        late.start()
        assert receive(reads, memoryview(bytearray(1))) == 1
        late.join()
        reads.settimeout(1.2)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            receive(reads, memoryview(bytearray(1)))
        assert 1.3 <= time.monotonic() - began < 2.2


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
