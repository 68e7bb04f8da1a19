"""A peer names many hosts, of which most mean nothing here."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_hivemind.engine.native.wire.connection import close, read_exactly
from lightning_hivemind.engine.native.wire.dial import Endpoint, dial
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, Kind
from lightning_hivemind.engine.native.wire.sink import Introduction
from lightning_hivemind.engine.native.wire.tls import Certificate, client_context
from lightning_hivemind.errors import WireError

TOKEN = b"t" * 32


class Peer:
    """Answers after a while, as over a long line, and says who has come with a token."""

    def __init__(self, certificate: Certificate, after_s: float) -> None:
        self.greeted: list[bytes] = []
        self._certificate, self._after_s = certificate, after_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: Endpoint = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        time.sleep(self._after_s)
        with contextlib.suppress(OSError):
            secure = self._certificate.server.wrap_socket(sock, server_side=True)
            frame = memoryview(bytearray(HEADER_BYTES + len(TOKEN)))
            read_exactly(secure, frame)
            self.greeted.append(bytes(frame[HEADER_BYTES:]))

    def close(self) -> None:
        close(self._listener)


@pytest.fixture
def deaf() -> Iterator[list[Endpoint]]:
    """Somebody accepts connections there, and says nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname() for _ in range(11)]


def test_the_last_of_many_hosts_is_reached_over_a_long_line(deaf: list[Endpoint]) -> None:
    certificate = Certificate.create()
    peer, other = Peer(certificate, 0.3), Peer(Certificate.create(), 0.0)
    endpoints = (*deaf[:5], other.endpoint, *deaf[5:], peer.endpoint)
    introduction = Introduction(endpoints=endpoints, fingerprint=certificate.fingerprint, token=TOKEN)
    sock, endpoint = dial(introduction, Kind.HELLO, context=client_context(), timeout_s=1.5)
    assert endpoint == peer.endpoint
    until = time.monotonic() + 10.0
    while not peer.greeted:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert peer.greeted == [TOKEN]
    assert not other.greeted, "who shows another certificate is told nothing"
    close(sock)
    peer.close()
    other.close()


def test_of_two_ways_to_one_peer_one_is_taken_and_the_token_is_said_once() -> None:
    certificate = Certificate.create()
    peer = Peer(certificate, 0.3)
    introduction = Introduction(endpoints=(peer.endpoint,) * 4, fingerprint=certificate.fingerprint, token=TOKEN)
    sock, _ = dial(introduction, Kind.HELLO, context=client_context(), timeout_s=1.5)
    time.sleep(1.0)
    assert peer.greeted == [TOKEN]
    close(sock)
    peer.close()


def test_where_nobody_answers_it_takes_no_longer_than_it_may(deaf: list[Endpoint]) -> None:
    introduction = Introduction(endpoints=tuple(deaf), fingerprint=b"", token=TOKEN)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        dial(introduction, Kind.HELLO, context=client_context(), timeout_s=0.5)
    assert time.monotonic() - began < 2.0


def test_where_nobody_listens_that_is_the_answer() -> None:
    with contextlib.ExitStack() as stack:
        closed = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in closed:
            one.bind(("127.0.0.1", 0))
        endpoints = tuple(one.getsockname() for one in closed)
        introduction = Introduction(endpoints=endpoints, fingerprint=b"", token=TOKEN)
        with pytest.raises(ConnectionRefusedError):
            dial(introduction, Kind.HELLO, context=client_context(), timeout_s=5.0)
    wrong = Peer(Certificate.create(), 0.0)
    introduction = Introduction(endpoints=(wrong.endpoint,), fingerprint=b"another", token=TOKEN)
    with pytest.raises(WireError):
        dial(introduction, Kind.HELLO, context=client_context(), timeout_s=5.0)
    wrong.close()
