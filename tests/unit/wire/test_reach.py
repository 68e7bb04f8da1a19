"""Whether a peer to which a connection broke still lives is known from its port, before libp2p is asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lightning_hivemind.engine.native.wire import reach as reach_module
from lightning_hivemind.engine.native.wire.reach import PROBES, Gone, Reach, Way
from lightning_hivemind.engine.native.wire.sink import Introduction


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)  # for whoever still waits to accept


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def reach(listener: socket.socket, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Reach:
    """Of a peer that was reached at that port before; libp2p does not get through."""
    monkeypatch.setattr(reach_module, "RETRY_S", 1.0)  # however busy this machine is

    def introduce(peer: str, dials: bool) -> Introduction:
        asked.append(peer)
        raise ConnectionError("libp2p does not get through")

    found = Reach("p", introduce=introduce, stream=None, context=None, patience_s=0.5, listens=False, way=Way.DIAL)
    found._endpoint = listener.getsockname()
    return found


def test_a_process_that_is_being_ended_and_still_listens_is_gone_once_it_does_not(
    reach: Reach, listener: socket.socket, asked: list[str]
) -> None:
    threading.Timer(0.03, listener.close).start()
    with pytest.raises(Gone, match="its process has ended"):
        reach.connect()
    assert asked == [], "an answer of its daemon would take long, or for ever"


def test_a_peer_that_takes_the_connection_lives_and_is_asked(
    reach: Reach, listener: socket.socket, asked: list[str]
) -> None:
    with pytest.raises(Gone, match="libp2p does not get through"):
        reach.connect()
    assert "p" in asked


def test_a_daemon_of_one_s_own_that_is_gone_is_no_end_of_the_other_peer(
    reach: Reach, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Introduction:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(reach, "_introduce", refused)
    with pytest.raises(Gone, match=r"cannot be reached: .*refused"):
        reach.connect()


def test_who_throws_out_whoever_comes_is_asked_too(reach: Reach, listener: socket.socket, asked: list[str]) -> None:
    """A router that takes connections for a peer, say."""
    thrown_out: list[int] = []

    def throw_out() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            thrown_out.append(len(asked))
            sock.close()

    threading.Thread(target=throw_out, daemon=True).start()
    with pytest.raises(Gone, match="libp2p does not get through"):
        reach.connect()
    assert thrown_out.count(0) == PROBES, "before the first question"
