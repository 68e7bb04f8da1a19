"""The line between two machines, measured over this one's loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from lightning_hivemind.advice import line
from lightning_hivemind.errors import ArgumentError


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(line, "SECONDS", 0.2)
    monkeypatch.setattr(line, "PATIENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=_serve, args=(listener,), daemon=True)
        serving.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        serving.join(5)


def _serve(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed by the fixture
        line.serve(listener)


def test_both_ways_and_the_time_there_and_back_are_measured(listening: int) -> None:
    found = line.measure("127.0.0.1", listening)
    assert found.up_mbit_s > 100
    assert found.down_mbit_s > 100
    assert 0 < found.rtt_s < 0.5


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100])
def test_a_stranger_does_no_harm(listening: int, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listening)) as stranger:
        stranger.sendall(said)
    assert line.measure("127.0.0.1", listening).up_mbit_s > 100


def test_where_nobody_listens_it_is_said_what_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ArgumentError, match=f"--listen {port}"):
        line.measure("127.0.0.1", port)


def test_who_ends_in_the_middle_is_found(listening: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with pytest.raises(ArgumentError, match="cannot be measured"):
            line.measure("127.0.0.1", other.getsockname()[1])
