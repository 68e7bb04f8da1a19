"""Connections over real sockets: what arrives, who may come in, who is found to be dead."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest

from lightning_hivemind.engine.native.wire import lanes
from lightning_hivemind.engine.native.wire import links as links_module
from lightning_hivemind.engine.native.wire import outlet as outlet_module
from lightning_hivemind.engine.native.wire import reach as reach_module
from lightning_hivemind.engine.native.wire.connection import TOKEN_BYTES, close, wake
from lightning_hivemind.engine.native.wire.dial import dial
from lightning_hivemind.engine.native.wire.frames import PIECE_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.engine.native.wire.sink import Introduction
from lightning_hivemind.engine.native.wire.speed import Line
from lightning_hivemind.engine.native.wire.tls import Certificate, client_context
from lightning_hivemind.errors import WireError
from swarm.town import WAIT_S, Town, wait_for
from unit.forked import in_a_child

DETECT_S = 2.0
LARGEST = 32 << 20


class Ledger:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, Header, bytes]] = []
        self.losses: list[tuple[str, str]] = []

    def room(self, peer: str, header: Header) -> memoryview | None:
        if header.length > LARGEST:
            raise WireError(f"{header.length} bytes are more than the schema has")
        return memoryview(bytearray(header.length)) if header.kind is not Kind.STATE else None

    def moved(self, peer: str, header: Header) -> None:
        pass

    def arrived(self, peer: str, header: Header, payload: memoryview | None) -> None:
        self.frames.append((peer, header, bytes(payload) if payload is not None else b""))

    def lost(self, peer: str, reason: str, *, connects: bool = False) -> None:
        self.losses.append((peer, reason))


class Slow(Ledger):
    """Takes no second chunk before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.asked = threading.Event(), False

    def room(self, peer: str, header: Header) -> memoryview | None:
        if header.chunk:
            self.asked = True
            assert self.may.wait(WAIT_S)
        return super().room(peer, header)


class City(Town):
    """A town that keeps what everybody gets."""

    def __init__(self, *, secure: bool) -> None:
        super().__init__(secure=secure, detect_s=DETECT_S)
        self.ledgers: dict[str, Ledger] = {}

    def settle(self, name: str, *, listens: bool = True, carries: bool = False) -> Links:
        self.ledgers[name] = Ledger()
        return self.add(name, self.ledgers[name], listens=listens, carries=carries)


class Impostor:
    """Listens where a peer should, with a certificate of its own. ``heard``: of each handshake, what came after it."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._listener, self._context = socket.create_server(("127.0.0.1", 0)), Certificate.create().server
        self.port: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # once it is closed
            while True:
                plain, _ = self._listener.accept()
                plain.settimeout(DETECT_S)
                with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as sock:
                    self.heard.append(b"")
                    while part := sock.recv(1000):
                        self.heard[-1] += part

    def close(self) -> None:
        close(self._listener)
        self._thread.join(WAIT_S)


class Tap:
    """Lies between the others and a peer. ``seen``: what they say to it, by connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen: list[bytearray] = []
        self._target, self._listener = target, socket.create_server(("127.0.0.1", 0))
        self.port: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # once it is closed
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._target)
                self.seen.append(bytearray())
                for one_way in ((here, there, self.seen[-1]), (there, here, bytearray())):
                    threading.Thread(target=self._carry, args=one_way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                seen += part
                target.sendall(part)
        wake(target)

    def close(self) -> None:
        close(self._listener)


def drop(links: Links, peer: str) -> None:
    """Close what there is with ``peer``; it may connect again."""
    with links._lock:
        outlet = links._outlets.pop(peer, None)
        inlets = [one for one in links._inlets if one.peer == peer]
    if outlet is not None:
        outlet.close()
    for inlet in inlets:
        wake(inlet.sock)


@pytest.fixture(params=[True, False], ids=["TLS", "in the clear"])
def town(request: pytest.FixtureRequest) -> Iterator[City]:
    place = City(secure=request.param)
    before = set(threading.enumerate())
    yield place
    place.close()
    wait_for(lambda: set(threading.enumerate()) <= before, "the threads have ended")


@pytest.mark.parametrize("kinds", [(Kind.INPUT, Kind.RESULT), (Kind.PARCEL, Kind.MESSAGE)])
def test_frames_arrive_whole_and_in_order_in_both_directions(town: City, kinds: tuple[Kind, Kind]) -> None:
    first, second = town.settle("first"), town.settle("second")
    payloads = [os.urandom(size) for size in (0, 1, 100_000, 5 << 20, 17)]
    for number, payload in enumerate(payloads, 1):
        half = len(payload) // 2
        for place, to, kind in ((first, "second", kinds[0]), (second, "first", kinds[1])):
            parts = (memoryview(payload)[:half], payload[half:]) if kind is Kind.MESSAGE else (payload,)
            place.send(to, Header(kind=kind, chunk=number, length=len(payload)), parts)
    for name, other, kind in (("second", "first", kinds[0]), ("first", "second", kinds[1])):
        ledger = town.ledgers[name]
        wait_for(lambda ledger=ledger: len(ledger.frames) == len(payloads), f"{name} has everything")
        assert [payload for _, _, payload in ledger.frames] == payloads
        assert [(peer, header.kind, header.chunk) for peer, header, _ in ledger.frames] == [
            (other, kind, number) for number in range(1, len(payloads) + 1)
        ]


def test_messages_overtake_chunks_that_wait_and_go_between_the_pieces_of_one(town: City) -> None:
    first = town.settle("first")
    slow = town.ledgers["slow"] = Slow()
    town.add("slow", slow)
    chunk = os.urandom(LARGEST)
    for number in range(3):
        first.send("slow", Header(kind=Kind.INPUT, chunk=number, length=len(chunk)), (chunk,))
    wait_for(lambda: slow.frames, "the first")
    first.send("slow", Header(kind=Kind.MESSAGE, length=3), (b"now",))  # the second one's first piece is there
    slow.may.set()
    wait_for(lambda: len(slow.frames) == 4, "everything")
    assert [header.kind for _, header, _ in slow.frames] == [Kind.INPUT, Kind.MESSAGE, Kind.INPUT, Kind.INPUT]
    assert all(payload == chunk for _, header, payload in slow.frames if header.kind is Kind.INPUT)


def test_messages_do_not_overtake_one_another(town: City) -> None:
    """A plan and what was decided with it, say."""
    first = town.settle("first")
    ledger = town.ledgers["other"] = Slow()
    ledger.may.set()
    town.add("other", ledger)
    said = [str(number).encode() for number in range(300)]
    said[7] = bytes(3 * PIECE_BYTES)
    for one in said:
        first.send("other", Header(kind=Kind.MESSAGE, length=len(one)), (one,))
    wait_for(lambda: len(ledger.frames) == len(said), "everything")
    assert [payload for _, _, payload in ledger.frames] == said


def test_a_round_and_a_state_take_turns_and_questions_wait_for_neither(town: City) -> None:
    first = town.settle("first")
    slow = town.ledgers["slow"] = Slow()
    town.add("slow", slow)
    data = os.urandom(LARGEST)
    for number in range(8):
        first.send("slow", Header(kind=Kind.INPUT, chunk=number, length=len(data)), (data,))
    for number in range(1, 4):
        first.send("slow", Header(kind=Kind.STATE, chunk=number, length=len(data)), (data,))
    wait_for(lambda: slow.asked, "the second one's first piece is there")
    first.send("slow", Header(kind=Kind.REQUEST, length=3), (b"ask",))
    first.send("slow", Header(kind=Kind.STATE, length=4), (b"what",))
    slow.may.set()
    wait_for(lambda: len(slow.frames) == 13, "everything")
    assert [(header.kind, header.length) for _, header, _ in slow.frames[1:3]] == [(Kind.REQUEST, 3), (Kind.STATE, 4)]
    long = [header.kind for _, header, _ in slow.frames if header.length == LARGEST]
    turns = [Kind.STATE, *3 * [Kind.INPUT], Kind.STATE, *3 * [Kind.INPUT], Kind.STATE]
    # (the second chunk may have begun before there was any state to send)
    assert long in ([Kind.INPUT, *turns, Kind.INPUT], [Kind.INPUT, Kind.INPUT, *turns])


def test_a_message_longer_than_a_piece_waits_for_the_chunk(town: City) -> None:
    first = town.settle("first")
    slow = town.ledgers["slow"] = Slow()
    town.add("slow", slow)
    chunk, message = os.urandom(LARGEST), os.urandom(PIECE_BYTES + 1000)
    for number in range(2):
        first.send("slow", Header(kind=Kind.INPUT, chunk=number, length=len(chunk)), (chunk,))
    wait_for(lambda: slow.frames, "the first")
    first.send("slow", Header(kind=Kind.MESSAGE, length=len(message)), (message,))
    slow.may.set()
    wait_for(lambda: len(slow.frames) == 3, "everything")
    assert [payload for _, _, payload in slow.frames] == [chunk, chunk, message]
    assert not slow.losses


def test_a_chunk_that_waits_is_not_sent_twice_and_not_at_all_once_its_round_is_over(town: City) -> None:
    first = town.settle("first")
    slow = town.ledgers["slow"] = Slow()
    town.add("slow", slow)
    chunk, rounds = bytes(32 << 20), [bytes([number]) * 16 for number in range(3)]

    def send(round_id: bytes, number: int) -> None:
        first.send("slow", Header(kind=Kind.INPUT, round=round_id, chunk=number, length=len(chunk)), (chunk,))

    for number in (0, 1, 2, 1, 2):
        send(rounds[1], number)
    send(rounds[2], 3)
    send(rounds[2], 4)
    wait_for(lambda: slow.frames, "the first")
    send(rounds[1], 1)  # it is being sent
    first.forget(rounds[2])
    first.send("slow", Header(kind=Kind.INPUT, round=rounds[0], length=2), (b"ok",))
    slow.may.set()
    wait_for(lambda: slow.frames[-1][2] == b"ok", "what was sent last")
    assert [(header.round, header.chunk) for _, header, _ in slow.frames] == [
        (rounds[1], 0), (rounds[1], 1), (rounds[1], 2), (rounds[0], 0)
    ]  # fmt: skip
    first.send("slow", Header(kind=Kind.STATE, round=rounds[2], chunk=1, length=len(chunk)), (chunk,))
    first.forget(rounds[2])  # (a download has a number as a round has)
    send(rounds[1], 2)  # it has arrived: whoever asks again has lost it
    wait_for(lambda: len(slow.frames) == 5, "it once more")


@pytest.fixture(params=[{"lost": 0.001}])
def long_line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 ms, on which such a share of packets is lost, and the kernel's buffers are ``full`` for such a share."""
    packets, is_ = itertools.count(0, 100_000), {"lost": 0.0, "full": 0.0, "bbr": False, **request.param}

    def line_of(sock: socket.socket) -> Line:
        sent = next(packets)
        lost, full_s = int(is_["lost"] * sent), is_["full"] * sent
        return Line(round_trip_s=0.1, answer_s=0.1, packets=sent, lost=lost, busy_s=1.0 * sent, full_s=full_s)

    monkeypatch.setattr(lanes, "line_of", line_of)
    monkeypatch.setattr(lanes, "has_bbr", lambda sock: is_["bbr"])
    monkeypatch.setattr(lanes, "AGAIN_S", 0.1)
    monkeypatch.setattr(lanes, "BROKEN_S", 0.1)


def send_until(town: City, condition: Callable[[list[socket.socket]], bool], *, again: bool = False) -> int:
    """Chunks from "first" to "second" until the connections are so; returns how many, all of which have arrived.

    ``again``: what does not arrive within a second is sent again, as the protocol does.
    """
    first, ledger, sent = town.links["first"], town.ledgers["second"], 0

    def send(numbers: Iterable[int]) -> None:
        for number in numbers:
            header = Header(kind=Kind.INPUT, chunk=number, length=1 << 20)
            first.send("second", header, (bytes([number % 251]) * header.length,))

    def missing() -> set[int]:
        return {*range(1, sent + 1)} - {header.chunk for _, header, _ in ledger.frames}

    deadline = time.monotonic() + WAIT_S
    while not (sent and condition(first._outlets["second"].connections)):
        send(range(sent + 1, sent + 9))
        sent += 8
        since = time.monotonic()
        while missing():
            assert time.monotonic() < deadline, f"{missing()}, {first._outlets['second'].connections}"
            time.sleep(0.005)
            if again and time.monotonic() > since + 1.0:
                since = time.monotonic()
                send(missing())
    return sent


@pytest.mark.usefixtures("long_line")
@pytest.mark.parametrize("long_line", [{"full": 0.6, "bbr": True}, {"full": 0.6}], indirect=True, ids=str)
def test_a_long_line_that_is_wider_than_the_kernel_s_buffers_gets_more_connections(town: City) -> None:
    town.settle("first")
    town.settle("second")
    send_until(town, lambda connections: len(connections) == lanes.MOST)


@pytest.mark.usefixtures("long_line")
@pytest.mark.parametrize("dialled", [True, False])
def test_a_long_line_gets_more_connections_and_everything_comes_once(town: City, dialled: bool) -> None:
    town.settle("first")
    town.settle("second", listens=dialled)
    sent = send_until(town, lambda connections: len(connections) == lanes.MOST)
    frames = town.ledgers["second"].frames
    assert sorted(header.chunk for _, header, _ in frames) == list(range(1, sent + 1))
    assert all(payload == bytes([header.chunk % 251]) * (1 << 20) for _, header, payload in frames)


@pytest.mark.usefixtures("long_line")
def test_one_of_many_connections_may_break(town: City) -> None:
    town.settle("first")
    town.settle("second")
    send_until(town, lambda connections: len(connections) > 2)
    before = town.links["first"]._outlets["second"].connections
    for broken in before[:2]:
        wake(broken)
    town.ledgers["second"].frames.clear()
    send_until(town, lambda connections: len(connections) > 2 and not {*connections} & {*before[:2]}, again=True)
    assert town.ledgers["first"].losses == town.ledgers["second"].losses == []


def test_many_peers_share_the_line_already() -> None:
    assert [lanes.useful(0.1, outlets) for outlets in (1, 2, 5, 100)] == [lanes.MOST, lanes.MOST // 2, 1, 1]
    assert [lanes.useful(round_trip_s, 1) for round_trip_s in (0.0, 0.009, 0.035)] == [1, 1, 4]


@pytest.mark.usefixtures("long_line")
@pytest.mark.parametrize(
    "long_line", [{}, {"lost": 1e-4}, {"lost": 0.001, "bbr": True}, {"full": 0.4}], indirect=True, ids=str
)
def test_one_connection_fills_a_long_line_that_loses_nothing(town: City) -> None:
    stays_alone(town)


@pytest.mark.usefixtures("long_line")
def test_one_connection_fills_a_line_with_bbr(town: City, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "has_bbr", lambda sock: True)
    stays_alone(town)


@pytest.mark.usefixtures("long_line")
def test_a_slow_line_that_is_only_full_is_not_shared_out(town: City, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LEAST_RATE", 1e12)
    stays_alone(town)


def test_a_short_line_needs_one_connection(town: City) -> None:
    stays_alone(town)


def stays_alone(town: City) -> None:
    town.settle("first")
    town.settle("second")
    for _ in range(5):
        town.ledgers["second"].frames.clear()
        send_until(town, lambda connections: len(connections) == 1)
        time.sleep(0.1)


def test_what_nobody_wants_passes_by_and_the_next_frame_is_read(town: City) -> None:
    first = town.settle("first")
    town.settle("second")
    ledger = town.ledgers["second"]
    first.send("second", Header(kind=Kind.STATE, length=1 << 20), (bytes(1 << 20),))
    wait_for(lambda: [payload for _, _, payload in ledger.frames] == [b""], "it passes by")
    first.send("second", Header(kind=Kind.INPUT, length=2), (b"ok",))
    wait_for(lambda: len(ledger.frames) == 2, "both")
    assert ledger.frames[1][2] == b"ok"


def test_a_peer_whose_process_ends_is_lost_at_once(town: City) -> None:
    first, second = town.settle("first"), town.settle("second")
    assert first.connected() == second.connected() == frozenset()
    first.send("second", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["second"].frames, "a connection")
    assert first.connected() == {"second"}
    second.close()
    wait_for(lambda: town.ledgers["first"].losses, "the loss")  # by its reason, not by the time that has passed
    assert first.connected() == frozenset()
    assert town.ledgers["first"].losses == [("second", "its process has ended: nobody listens at its address")]


def test_a_peer_whose_process_ends_is_lost_at_once_though_the_first_word_to_it_seems_to_get_there(
    town: City, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its system answers that nobody is there; the next ping, half a second later, would find that."""
    monkeypatch.setattr(outlet_module, "PING_S", 3 * WAIT_S)
    test_a_peer_whose_process_ends_is_lost_at_once(town)


def test_nothing_of_it_is_open_in_a_forked_worker_that_may_outlive_this_process(town: City) -> None:
    """Else a peer that was killed would seem to live: its connections open, its port listening."""
    for name in ("a", "b"):
        town.settle(name)
    town.links["a"].send("b", Header(kind=Kind.MESSAGE, length=1), (b"x",))
    wait_for(lambda: town.ledgers["b"].frames, "a message")
    town.links["b"].send("a", Header(kind=Kind.MESSAGE, length=1), (b"y",))
    wait_for(lambda: town.ledgers["a"].frames, "an answer")
    ports = {port for _, port in town.ports.values()}

    def of_these() -> list[str]:
        """Of this process: sockets that have one of the two ports, at either end."""
        found = psutil.Process().net_connections("tcp")
        return [str(one) for one in found if ports & {end.port for end in (one.laddr, one.raddr) if end}]

    assert len(of_these()) >= 2 + 4, "two that listen, both ends of two connections"
    assert in_a_child(lambda: not of_these())
    town.links["a"].send("b", Header(kind=Kind.MESSAGE, length=1), (b"z",))
    wait_for(lambda: len(town.ledgers["b"].frames) == 2, "a message afterwards")


def test_a_connection_that_breaks_is_made_again(town: City) -> None:
    first, second = town.settle("first"), town.settle("second")
    first.send("second", Header(kind=Kind.INPUT, chunk=1, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["second"].frames, "a connection")
    drop(second, "first")
    deadline = time.monotonic() + WAIT_S
    while len(town.ledgers["second"].frames) < 2:
        first.send("second", Header(kind=Kind.INPUT, chunk=2, length=2), (b"hi",))  # one may be lost on the way
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert town.ledgers["first"].losses == town.ledgers["second"].losses == []


def test_frames_that_are_too_large_close_that_connection_only_and_are_told_of_once(
    town: City, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = town.settle("first"), town.settle("second"), town.settle("third")
    warn, closed = second._warn, list[str]()

    def counted(who: str, error: Exception) -> None:
        warn(who, error)
        closed.append(who)

    monkeypatch.setattr(second, "_warn", counted)
    third.send("second", Header(kind=Kind.INPUT, chunk=1, length=2), (b"hi",))
    deadline = time.monotonic() + WAIT_S
    while len(closed) < 3:
        first.send("second", Header(kind=Kind.INPUT, length=LARGEST + 1), (b"more is said than comes",))
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert set(closed) == {"first"}
    assert caplog.text.count("a connection of first was closed") == 1
    wait_for(lambda: town.ledgers["second"].frames, "the third's frame")
    third.send("second", Header(kind=Kind.INPUT, chunk=2, length=2), (b"hi",))
    wait_for(lambda: len(town.ledgers["second"].frames) == 2, "the third's second frame")
    assert {peer for peer, _, _ in town.ledgers["second"].frames} == {"third"}
    assert second is town.links["second"]


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(200), os.urandom(200)], ids=["HTTP", "zeros", "random"]
)
def test_a_stranger_is_shown_out_and_nobody_else_notices(town: City, garbage: bytes) -> None:
    first = town.settle("first")
    town.settle("second")
    with socket.create_connection(town.ports["second"], timeout=WAIT_S) as stranger:
        stranger.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # a TLS alert, perhaps; then the end
    first.send("second", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["second"].frames, "a frame")
    assert town.ledgers["second"].losses == []


def test_strangers_that_say_nothing_shut_nobody_out(town: City, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one more than there may be, the oldest goes: who is known says so within milliseconds."""
    monkeypatch.setattr("lightning_hivemind.engine.native.wire.links.STRANGERS", 3)
    first = town.settle("first")
    town.settle("second")
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(town.ports["second"], timeout=WAIT_S)) for _ in range(4)
        ]
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b"", "the oldest has to go"
        first.send("second", Header(kind=Kind.INPUT, length=2), (b"hi",))
        wait_for(lambda: town.ledgers["second"].frames, "a frame")
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)  # there is room for it


def test_who_cannot_accept_a_connection_for_a_moment_accepts_the_next(
    town: City, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many open files, or threads."""
    monkeypatch.setattr("lightning_hivemind.engine.native.wire.links.ACCEPT_AGAIN_S", 0.01)
    first, second = town.settle("first"), town.settle("second")
    take_in, refused = second._take_in, list[object]()

    def take_in_or_fail(inlet: Any) -> None:
        if not refused:
            refused.append(inlet)
            close(inlet.sock)
            raise OSError(errno.EMFILE, "too many open files")
        take_in(inlet)

    monkeypatch.setattr(second, "_take_in", take_in_or_fail)

    def said() -> bool:
        first.send("second", Header(kind=Kind.RESULT, length=1), (b"y",))
        return any(frame[2] == b"y" for frame in town.ledgers["second"].frames)

    wait_for(said, "it gets through")
    assert refused
    assert "too many open files" in caplog.text


def test_an_unforeseen_error_closes_that_connection_and_the_next_works(
    town: City, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = town.settle("first"), town.settle("second")
    ledger = town.ledgers["second"]
    room, failed = ledger.room, list[bool]()

    def room_or_fail(peer: str, header: Header) -> memoryview | None:
        if header.kind is Kind.INPUT and not failed:
            failed.append(True)
            raise MemoryError("induced")
        return room(peer, header)

    ledger.room = room_or_fail  # type: ignore[method-assign]
    first.send("second", Header(kind=Kind.INPUT, chunk=1, length=1), (b"x",))
    wait_for(lambda: failed, "the error")

    def said() -> bool:
        first.send("second", Header(kind=Kind.RESULT, length=1), (b"y",))
        return any(frame[2] == b"y" for frame in ledger.frames)

    wait_for(said, "the next got through")
    assert "induced" in caplog.text


def test_nothing_goes_to_a_public_address_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No public address can be reached here: one is put in the place of the socket's."""
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("8.8.8.8", 4000), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Introduction(endpoints=(server.getsockname()[:2],), fingerprint=b"", token=b"secret")
        with pytest.raises(WireError, match="a public address, and insecure_lan=True sends in the clear"):
            dial(there, Kind.HELLO, context=None, timeout_s=WAIT_S)
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(100) == b""


def test_who_lies_between_two_peers_reads_nothing_unless_they_send_in_the_clear(town: City) -> None:
    first, second = town.settle("first"), town.settle("second")
    payloads = {"first": os.urandom(1000), "second": os.urandom(1000)}
    with contextlib.ExitStack() as stack:
        taps = {name: Tap(town.ports[name]) for name in payloads}
        for name, tap in taps.items():
            stack.callback(tap.close)
            town.ports[name] = tap.port
        first.send("second", Header(kind=Kind.INPUT, length=1000), (payloads["second"],))
        second.send("first", Header(kind=Kind.RESULT, length=1000), (payloads["first"],))
        for name, tap in taps.items():
            wait_for(lambda name=name: town.ledgers[name].frames, f"the frame of {name}")  # type: ignore[misc]
            assert max(map(len, tap.seen)) > 1000, "it came by another way"
            assert any(payloads[name] in one for one in tap.seen) == (not town.secure)


def test_who_shows_another_certificate_than_was_announced_is_told_nothing() -> None:
    """With the token it could come to the peer in the other one's place; and the frame is none of its business."""
    town, impostor = City(secure=True), Impostor()
    first, _ = town.settle("first", listens=False), town.settle("second")
    town.ports["second"] = impostor.port
    first.send("second", Header(kind=Kind.INPUT, length=6), (b"secret",))
    ledger = town.ledgers["first"]
    wait_for(lambda: ledger.losses or any(impostor.heard), "the loss")
    impostor.close()
    assert impostor.heard, "no connection got so far as to show a certificate"
    assert set(impostor.heard) == {b""}
    ((peer, reason),) = ledger.losses
    assert (peer, "another certificate than the peer announced" in reason) == ("second", True)
    assert not town.ledgers["second"].frames
    town.close()


def test_a_client_that_is_called_tells_nothing_to_whoever_shows_another_certificate() -> None:
    """It dials for the other one to send on."""
    town, impostor = City(secure=True), Impostor()
    peer, client = town.settle("peer"), town.settle("client", listens=False)
    town.ports["peer"] = impostor.port
    peer.send("client", Header(kind=Kind.INPUT, length=6), (b"secret",))
    wait_for(lambda: town.ledgers["peer"].losses or any(impostor.heard), "the loss")
    impostor.close()
    assert impostor.heard, "no connection got so far as to show a certificate"
    assert set(impostor.heard) == {b""}
    assert not client._inlets
    town.close()


def test_a_token_serves_once() -> None:
    town = City(secure=False)
    town.settle("second")
    token = town.links["second"].expect("first")
    hello = Header(kind=Kind.HELLO, length=len(token)).pack() + token
    frame = Header(kind=Kind.INPUT, length=2).pack() + b"hi"
    with (
        socket.create_connection(town.ports["second"], timeout=WAIT_S) as good,
        socket.create_connection(town.ports["second"], timeout=WAIT_S) as thief,
    ):
        good.sendall(hello + frame)
        wait_for(lambda: town.ledgers["second"].frames, "the frame of the first")
        thief.sendall(hello + frame)
        assert thief.recv(100) == b"", "the second use of a token was taken"
    assert [peer for peer, _, _ in town.ledgers["second"].frames] == ["first"]
    town.links["second"].close()


def test_a_peer_that_falls_silent_is_lost() -> None:
    """Frozen or cut off: its connections stay, nothing comes, and connecting anew leads nowhere."""
    town = City(secure=False)
    town.settle("second")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        token = town.links["second"].expect("first")
        town.links["first"] = town.links["second"]  # whoever asks for it is sent to a listener that never answers
        town.certificates["first"], town.ports["first"] = None, deaf.getsockname()
        with socket.create_connection(town.ports["second"], timeout=WAIT_S) as silent:
            silent.sendall(Header(kind=Kind.HELLO, length=len(token)).pack() + token)
            wait_for(lambda: town.ledgers["second"].losses, "the loss")
    assert town.ledgers["second"].losses[0] == ("first", "silent for too long")
    town.links["second"].close()


def test_frames_go_both_ways_between_a_peer_and_a_client_that_cannot_be_dialled(town: City) -> None:
    peer, client = town.settle("peer"), town.settle("client", listens=False)
    payload = os.urandom(1 << 20)
    peer.send("client", Header(kind=Kind.INPUT, chunk=1, length=len(payload)), (payload,))
    client.send("peer", Header(kind=Kind.RESULT, chunk=2, length=len(payload)), (payload,))
    for name, other, chunk in (("client", "peer", 1), ("peer", "client", 2)):
        ledger = town.ledgers[name]
        wait_for(lambda ledger=ledger: ledger.frames, f"{name} has its frame")
        ((sender, header, data),) = ledger.frames
        assert (sender, header.chunk, data) == (other, chunk, payload)


@pytest.mark.parametrize("by", ["peer", "client"])
def test_a_connection_of_a_client_that_breaks_is_made_again(town: City, by: str) -> None:
    peer, client = town.settle("peer"), town.settle("client", listens=False)
    peer.send("client", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["client"].frames, "a connection")
    drop(town.links[by], "client" if by == "peer" else "peer")
    deadline, before = time.monotonic() + WAIT_S, len(town.ledgers["client"].frames)
    while len(town.ledgers["client"].frames) == before or not town.ledgers["peer"].frames:
        peer.send("client", Header(kind=Kind.INPUT, length=2), (b"hi",))  # one may be lost on the way
        client.send("peer", Header(kind=Kind.INPUT, length=2), (b"hi",))
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert town.ledgers["peer"].losses == town.ledgers["client"].losses == []


def test_a_connection_that_is_given_up_keeps_its_number_while_a_thread_is_at_it(town: City) -> None:
    """Else TLS writes what it still has to say into whatever connection gets that number next."""
    first = town.settle("first")
    slow = town.ledgers["slow"] = Slow()
    links = town.add("slow", slow)
    first.send("slow", Header(kind=Kind.INPUT, chunk=1, length=2), (b"hi",))
    wait_for(lambda: any(one.peer for one in links._inlets) and slow.asked, "the reader is in room()")
    (inlet,) = links._inlets
    sock = inlet.sock
    drop(links, "first")
    assert sock.fileno() != -1
    slow.may.set()
    wait_for(lambda: sock.fileno() == -1, "its thread has closed it")


def test_a_client_whose_process_ends_is_lost(town: City) -> None:
    peer, client = town.settle("peer"), town.settle("client", listens=False)
    peer.send("client", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["client"].frames, "a connection")
    client.close()
    wait_for(lambda: town.ledgers["peer"].losses, "the loss")
    assert [name for name, _ in town.ledgers["peer"].losses] == ["client"]


def test_two_clients_are_lost_to_one_another_at_once_and_not_waited_for(town: City) -> None:
    one = town.settle("one", listens=False)
    town.settle("other", listens=False)
    one.send("other", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["one"].losses, "the loss", timeout_s=DETECT_S)
    ((name, reason),) = town.ledgers["one"].losses
    assert (name, "client_mode" in reason) == ("other", True)


@pytest.mark.parametrize("router", ["drops", "rejects"])
def test_a_peer_behind_a_router_is_asked_to_dial(town: City, router: str) -> None:
    """It listens, and nobody gets through to it; it does not know that."""
    peer, hidden = town.settle("peer"), town.settle("hidden")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        town.ports["hidden"] = deaf.getsockname()  # accepts connections, and answers nothing
        if router == "rejects":
            deaf.close()
        elif not town.secure:
            pytest.skip("in the clear, whoever accepts a connection is taken for the peer")
        peer.send("hidden", Header(kind=Kind.INPUT, length=2), (b"hi",))
        wait_for(lambda: town.ledgers["hidden"].frames, "the frame")
        hidden.send("peer", Header(kind=Kind.INPUT, length=2), (b"ho",))
        wait_for(lambda: town.ledgers["peer"].frames, "the answer")
    assert town.ledgers["peer"].losses == town.ledgers["hidden"].losses == []


def test_where_nothing_else_gets_through_libp2p_carries_the_connections_until_something_does(
    town: City, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach_module, "IMPROVE_S", 0.05)
    pair = {"one": town.settle("one", carries=True), "other": town.settle("other", carries=True)}
    town.behind_routers |= set(pair)
    payload = os.urandom(5 << 20)
    for name, links in pair.items():
        (to,) = set(pair) - {name}
        links.send(to, Header(kind=Kind.INPUT, length=len(payload)), (payload,))
    for ledger in town.ledgers.values():
        wait_for(lambda ledger=ledger: ledger.frames, "the frame")
        assert ledger.frames[0][2] == payload
    ways = [links._outlets[to].reach for links, to in zip(pair.values(), ("other", "one"), strict=True)]
    assert [reach.sock is not None and reach.sock.family for reach in ways] == [socket.AF_UNIX] * 2
    town.behind_routers.clear()
    for reach in ways:
        wait_for(lambda reach=reach: reach.sock.family == socket.AF_INET, "a connection of its own")
    for name, links in pair.items():
        (to,) = set(pair) - {name}
        links.send(to, Header(kind=Kind.RESULT, length=3), (b"now",))
        wait_for(lambda to=to: any(data == b"now" for _, _, data in town.ledgers[to].frames), "the next frame")
    assert not any(ledger.losses for ledger in town.ledgers.values())


def test_a_peer_that_libp2p_does_not_carry_either_is_lost(town: City) -> None:
    one = town.settle("one", carries=True)
    town.settle("other")
    town.behind_routers |= {"one", "other"}
    town.links["other"].take = close  # type: ignore[method-assign]
    one.send("other", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["one"].losses, "the loss")
    assert town.ledgers["one"].losses[0][0] == "other"


def test_who_sends_garbage_all_day_is_told_of_once(town: City, caplog: pytest.LogCaptureFixture) -> None:
    town.settle("first")
    for number in range(5):
        with socket.create_connection(town.ports["first"], timeout=WAIT_S) as stranger:
            stranger.sendall(bytes([number]) * 200)
            with contextlib.suppress(OSError):
                while stranger.recv(1000):
                    pass
        wait_for(lambda: not town.links["first"]._inlets, "it is gone")
    told = [record for record in caplog.records if "a connection of a stranger was closed" in record.message]
    assert len(told) == 1


def test_that_somebody_has_another_release_is_told_between_all_the_garbage(
    town: City, caplog: pytest.LogCaptureFixture
) -> None:
    town.settle("first")
    newer = bytearray(Header(kind=Kind.HELLO, length=TOKEN_BYTES).pack() + bytes(TOKEN_BYTES))
    newer[4] += 1  # behind the magic
    for said in (bytes(200), bytes(newer)):
        stranger = socket.create_connection(town.ports["first"], timeout=WAIT_S)
        if town.secure:
            stranger = client_context().wrap_socket(stranger)
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(said)
            while stranger.recv(1000):
                pass
        wait_for(lambda: not town.links["first"]._inlets, "it is gone")
    assert "use the same release on all peers" in caplog.text


def test_of_connections_that_starve_one_another_the_one_that_is_silent_takes_nothing_with_it() -> None:
    """A peer that is heard on another connection all the while is neither lost nor cut off from what is sent to it."""
    town = City(secure=False)
    links = town.settle("first")
    town.settle("second").send("first", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: town.ledgers["first"].frames and links.connected(), "both directions")
    outlet, (silent,) = links._outlets["second"], links._inlets
    here, there = socket.socketpair()
    other = links_module._Inlet(here, "second", since=time.monotonic() - 2 * DETECT_S)
    links._inlets.add(other)
    links._ended(silent, TimeoutError())
    assert links._outlets["second"] is outlet
    assert not outlet.reach.closed

    # but one that was made since then may be another way to where it is now: what is sent goes that way, too
    other.since = time.monotonic()
    links._ended(silent, TimeoutError())
    assert outlet.reach.closed
    wait_for(lambda: "second" in links.connected(), "there are both directions again, though nothing was to be sent")

    links._ended(other, TimeoutError())
    assert ("second", "silent for too long") in town.ledgers["first"].losses
    close(here)
    close(there)
    town.close()


def test_tokens_that_nobody_uses_do_not_pile_up(town: City) -> None:
    links = town.settle("first")
    tokens = [links.expect("second") for _ in range(200)]
    links.expect("third")
    assert len(links._expected) == links_module.MOST_TOKENS + 1
    assert tokens[-1] in links._expected


def test_a_peer_that_connects_again_and_again_has_so_many_connections_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest goes, and the peer is not taken for lost."""
    monkeypatch.setattr(links_module, "MOST_OF_ONE", 3)
    town = City(secure=False)
    town.settle("first", listens=False)
    links, ledger = town.settle("second"), town.ledgers["second"]
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(5):
            token = links.expect("first")
            one = stack.enter_context(socket.create_connection(town.ports["second"], timeout=WAIT_S))
            one.sendall(Header(kind=Kind.HELLO, length=len(token)).pack() + token)
            one.sendall(Header(kind=Kind.INPUT, chunk=number, length=2).pack() + b"hi")
            made.append(one)
            wait_for(lambda number=number: len(ledger.frames) == number + 1, "its frame")  # type: ignore[misc]
        for old in made[:2]:
            with contextlib.suppress(ConnectionResetError):
                while old.recv(1000):
                    pass
        assert len([one for one in links._inlets if one.peer == "first"]) == 3
        assert not ledger.losses
    town.close()


def test_a_client_that_asks_again_and_again_to_be_dialled_has_no_more_connections_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_module, "MOST_OF_ONE", 3)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = Introduction(endpoints=(server.getsockname(),), fingerprint=b"", token=b"t" * 32)
        links = Links(Ledger(), certificate=None, introduce=lambda peer, dials: client, detect_s=10 * WAIT_S)
        for _ in range(5):
            links.invite("client")
            stack.enter_context(server.accept()[0])
            wait_for(lambda: "client" not in links._inviting, "it is dialled")
        wait_for(lambda: [one.peer for one in links._inlets] == ["client"] * 3, "three connections")
        links.close()


@pytest.mark.parametrize("how", ["sends", "hears"])
def test_where_there_are_no_threads_a_peer_is_lost_and_found_again(
    town: City, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    first, second = town.settle("first"), town.settle("second")
    made, left = links_module.Outlet, ["second" if how == "sends" else "first"]

    def no_thread(reach: Any, *rest: Any, **options: Any) -> Any:
        if reach.peer in left:
            left.pop()
            raise RuntimeError("can't start new thread")
        return made(reach, *rest, **options)

    ledger = town.ledgers["first" if how == "sends" else "second"]
    monkeypatch.setattr(links_module, "Outlet", no_thread)
    first.send("second", Header(kind=Kind.PING))
    wait_for(lambda: ledger.losses, "it is lost")
    assert ledger.losses[0][1] == "can't start new thread"
    for one, other in ((first, "second"), (second, "first")):
        one.send(other, Header(kind=Kind.INPUT, length=2), (b"hi",))
        frames = town.ledgers[other].frames
        wait_for(lambda frames=frames: any(one[2] == b"hi" for one in frames), "a frame")  # type: ignore[misc]


def test_who_is_invited_when_there_are_no_threads_is_invited_again(town: City, monkeypatch: pytest.MonkeyPatch) -> None:
    first = town.settle("first")
    town.settle("client", listens=False)

    def no_thread(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", no_thread)
        first.invite("client")
    assert not first._inviting
    first.send("client", Header(kind=Kind.INPUT, length=2), (b"hi",))
    wait_for(lambda: any(frame[2] == b"hi" for frame in town.ledgers["client"].frames), "it dials, and is heard")


@pytest.mark.parametrize("most", [{"MOST_WAITING": 100}, {"MOST_WAITING_BYTES": 100 * PIECE_BYTES}], ids=str)
def test_who_reads_no_answers_is_lost_before_they_fill_the_memory(
    most: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in most.items():
        monkeypatch.setattr(outlet_module, name, value)
    town = City(secure=False)
    first, slow = town.settle("first"), Slow()
    town.ledgers["slow"] = slow
    town.add("slow", slow)
    first.send("slow", Header(kind=Kind.INPUT, chunk=1, length=1 << 20), (bytes(1 << 20),))  # it reads no further
    wait_for(lambda: slow.asked, "it has to read that")
    payload = bytes(PIECE_BYTES)
    for _ in range(200):
        first.send("slow", Header(kind=Kind.STATE, length=len(payload)), (payload,))
    count, size_bytes = outlet_module.MOST_WAITING, outlet_module.MOST_WAITING_BYTES
    reason = f"{count} messages wait for it, or {size_bytes} bytes of them"
    assert town.ledgers["first"].losses == [("slow", reason)]
    slow.may.set()
    town.close()


def test_who_has_not_answered_in_time_is_told_once_and_reached_all_the_same(
    town: City, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, say, before there was a connection to it: a round would wait for it for all of ``matchmaking_time``."""
    first, answers = town.settle("a"), threading.Event()
    town.settle("b")
    expect = town.settle("c").expect
    monkeypatch.setattr(town.links["c"], "expect", lambda name: expect(name) if answers.wait(WAIT_S) else b"")
    losses = town.ledgers["a"].losses

    def look(for_s: float) -> None:
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            first.look(time.monotonic())
            time.sleep(0.05)

    message = (Header(kind=Kind.MESSAGE, length=1), (b"x",))
    first.send("c", *message)
    look(DETECT_S + 0.3)
    assert losses == [], "nobody else is there to go on with"
    first.send("b", *message)
    wait_for(lambda: town.ledgers["b"].frames, "a message")
    look(0.5)
    assert losses == [("c", "it has not answered yet")]
    answers.set()
    wait_for(lambda: town.ledgers["c"].frames, "the message, at last")
    look(0.2)
    assert len(losses) == 1
