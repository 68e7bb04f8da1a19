"""Streams as sockets, against a daemon that may answer anything. (Real ones: ``test_native_network.py``.)"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("hivemind")

from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hivemind.network.dialing import encode
from lightning_hivemind.network.raw_streams import MAX_MESSAGE_BYTES, RawStreams, _exactly, _receive, _varint
from swarm.town import wait_for

PEER = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"
OK = p2pd_pb2.Response(type=p2pd_pb2.Response.OK)


def info(address: str) -> p2pd_pb2.StreamInfo:
    return p2pd_pb2.StreamInfo(peer=PeerID.from_base58(PEER).to_bytes(), addr=encode(address), proto="run")


def opened(address: str) -> p2pd_pb2.Response:
    return p2pd_pb2.Response(type=p2pd_pb2.Response.OK, streamInfo=info(address))


DIRECT, RELAYED = "/ip4/203.0.113.7/tcp/31330", f"/ip4/203.0.113.7/tcp/31330/p2p/{PEER}/p2p-circuit"


def framed(message: p2pd_pb2.Response | p2pd_pb2.StreamInfo) -> bytes:
    data = message.SerializeToString()
    return _varint(len(data)) + data


class Daemon:
    """Answers every request with ``answer``, and repeats what comes afterwards."""

    def __init__(self, path: Path) -> None:
        self.answer, self.requests = framed(OK), list[p2pd_pb2.Request]()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock, contextlib.suppress(OSError):
                    self.requests.append(_receive(sock, p2pd_pb2.Request))
                    sock.sendall(self.answer)
                    while data := sock.recv(100):
                        sock.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lhm-", dir="/tmp") as path:  # a unix socket's name has 104 bytes at most
        yield Path(path)


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    one = Daemon(folder / "daemon.sock")
    yield one
    one.close()


@pytest.fixture
def taken() -> list[socket.socket]:
    return []


@pytest.fixture
def streams(folder: Path, daemon: Daemon, taken: list[socket.socket]) -> Iterator[RawStreams]:
    one = RawStreams(folder / "daemon.sock", folder, "run", taken.append)
    one.start()
    yield one
    one.close()


def test_after_its_answer_the_connection_to_the_daemon_is_the_stream(daemon: Daemon, streams: RawStreams) -> None:
    daemon.answer = framed(opened(DIRECT)) + b"at once"
    with streams.open(PEER, 5.0) as stream:
        assert _exactly(stream, 7) == b"at once"
        stream.sendall(b"there and back")
        assert _exactly(stream, 14) == b"there and back"
    asked = daemon.requests[-1].streamOpen
    assert (asked.peer, list(asked.proto), asked.timeout) == (PeerID.from_base58(PEER).to_bytes(), ["run"], 5)


ERROR = p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="no way"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (framed(ERROR), "libp2p: no way"),
        (framed(OK), "through a relay only"),
        (framed(opened(RELAYED)), "through a relay only"),
        (b"", "timed out"),
        (_varint(MAX_MESSAGE_BYTES + 1), "announces a message of more than"),
        (b"\xff" * 20, "announces a message of more than"),
        (_varint(3) + b"\xff\xff\xff", "cannot be understood"),
    ],
    ids=["error", "no stream", "a relay", "silence", "too long", "endless length", "garbage"],
)
def test_an_answer_that_is_none_is_an_error(daemon: Daemon, streams: RawStreams, answer: bytes, says: str) -> None:
    daemon.answer = answer
    with pytest.raises(OSError, match=says):
        streams.open(PEER, 0.5)


def test_without_a_daemon_there_is_an_error_and_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    streams = RawStreams(folder / "nobody.sock", folder, "run", lambda sock: None)
    with pytest.raises(FileNotFoundError):
        streams.start()
    with pytest.raises(FileNotFoundError):
        streams.open(PEER, 0.5)
    streams.close()
    assert set(threading.enumerate()) <= before


def test_what_the_daemon_brings_is_taken_and_garbage_is_not(
    folder: Path, daemon: Daemon, streams: RawStreams, taken: list[socket.socket]
) -> None:
    (registered,) = daemon.requests
    assert registered.streamHandler.addr.endswith(str(folder / "streams.sock").encode())
    for data in (b"\xff" * 20, _varint(1) + b"\xff", framed(info(RELAYED)) + b"hello"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as brought:
            brought.connect(str(folder / "streams.sock"))
            brought.sendall(data)
            brought.shutdown(socket.SHUT_WR)
            brought.settimeout(5.0)
            if data.endswith(b"hello"):
                wait_for(lambda: taken, "the stream")
                assert _exactly(taken[0], 5) == b"hello"
                taken[0].close()
            with contextlib.suppress(ConnectionResetError):
                assert brought.recv(1) == b"", "it is still open"


def test_afterwards_nobody_comes_any_more(folder: Path, daemon: Daemon, streams: RawStreams) -> None:
    streams.close()
    streams.close()
    wait_for(lambda: "accepts streams" not in {one.name for one in threading.enumerate()}, "its thread has ended")
    assert not (folder / "streams.sock").exists()
    assert daemon.requests[-1].type == p2pd_pb2.Request.REMOVE_STREAM_HANDLER


@given(st.integers(0, MAX_MESSAGE_BYTES))
@settings(max_examples=50)
def test_lengths_are_written_as_they_are_read(size: int) -> None:
    here, there = socket.socketpair()
    with here, there:
        data = p2pd_pb2.ErrorResponse(msg="x" * min(size, 50_000)).SerializeToString()
        here.sendall(_varint(len(data)) + data + b"!")
        assert _receive(there, p2pd_pb2.ErrorResponse).msg == "x" * min(size, 50_000)
        assert there.recv(1) == b"!"
