"""Messages over a real socket, whatever pieces they come in."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from lightning_hivemind.peer.link import Link


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    """A bare socket, and the link at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare = socket.create_connection(server.getsockname())
        link = Link(server.accept()[0], 0.05)
    with bare:
        yield bare, link
    link.close()
    link.close()


def test_several_messages_that_come_at_once_are_received_one_by_one(ends: tuple[socket.socket, Link]) -> None:
    bare, link = ends
    other = Link(bare, 0.05)
    sent = [b"a", b"", b"x" * 300_000]
    other.send(sent)
    assert [link.receive() for _ in sent] == sent
    assert link.receive() is None


def test_a_message_that_comes_byte_by_byte_is_received_once_it_is_whole(ends: tuple[socket.socket, Link]) -> None:
    bare, link = ends
    for byte in b"\0\0\0\2ab"[:-1]:
        bare.send(bytes([byte]))
        assert link.receive() is None
    bare.send(b"b")
    assert link.receive() == b"ab"


def test_it_waits_as_long_as_it_should(ends: tuple[socket.socket, Link]) -> None:
    began = time.monotonic()
    assert ends[1].receive() is None
    assert time.monotonic() - began >= 0.04


@pytest.mark.parametrize("begun", [b"", b"\0\0", b"\0\0\0\2a"])
def test_the_end_is_told_also_within_a_message(ends: tuple[socket.socket, Link], begun: bytes) -> None:
    bare, link = ends
    assert not link.has_ended()
    bare.send(begun)
    bare.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        link.receive()
    link.send([b"still"])
    assert bare.recv(9, socket.MSG_WAITALL) == b"\0\0\0\5still"


def test_who_says_no_more_still_hears(ends: tuple[socket.socket, Link]) -> None:
    bare, link = ends
    link.say_no_more()
    assert bare.recv(1) == b""
    bare.sendall(b"\0\0\0\1a")
    assert link.receive() == b"a"


def test_whether_it_has_ended_is_known_without_reading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare = socket.create_connection(server.getsockname())
        link = Link(server.accept()[0], 10.0)
    bare.sendall(b"\0\0\0\1a")
    time.sleep(0.05)
    assert not link.has_ended(), "there is something to read"
    assert link.receive() == b"a"
    bare.close()
    time.sleep(0.05)
    assert link.has_ended()
    link.close()
    assert link.has_ended()
