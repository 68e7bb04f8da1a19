"""Peers of the native engine in one process, over real sockets, introduced as libp2p would introduce them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.engine.native.wire.sink import Introduction, Sink
from lightning_hivemind.engine.native.wire.tls import Certificate

WAIT_S = 20.0


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.005)


class Town:
    """Knows everybody's address and certificate."""

    def __init__(self, *, secure: bool, detect_s: float = 2.0) -> None:
        self.secure, self._detect_s = secure, detect_s
        self.links: dict[str, Links] = {}
        self.ports: dict[str, tuple[str, int]] = {}
        self.certificates: dict[str, Certificate | None] = {}
        #: nothing but libp2p gets through between these
        self.behind_routers: set[str] = set()
        #: nobody listens there, and nobody else will
        self._closed_port = socket.socket()
        self._closed_port.bind(("127.0.0.1", 0))

    def add(
        self, name: str, sink: Sink, *, listens: bool = True, carries: bool = False, address: str = "127.0.0.1"
    ) -> Links:
        """A peer that can reach all others, and listens, or (as a client) cannot be dialled.

        ``carries``: where nothing else leads to another peer, libp2p does.
        """
        self.certificates[name] = certificate = Certificate.create() if self.secure else None

        def introduce(peer: str, dials: bool) -> Introduction:
            if peer not in self.links:
                raise ConnectionRefusedError(peer)
            shown, endpoints = self.certificates[peer], ()
            if {peer, name} <= self.behind_routers:
                endpoints = () if dials else (self._closed_port.getsockname(),)
            elif peer in self.ports and not dials:
                endpoints = (self.ports[peer],)
            else:
                self.links[peer].invite(name)
            return Introduction(
                endpoints=endpoints,
                fingerprint=shown.fingerprint if shown is not None else b"",
                token=self.links[peer].expect(name),
            )

        def stream(peer: str, timeout_s: float) -> socket.socket:
            here, there = socket.socketpair()
            self.links[peer].take(there)
            return here

        opens = stream if carries else None
        links = Links(sink, certificate=certificate, introduce=introduce, stream=opens, detect_s=self._detect_s)
        self.links[name] = links
        if listens:
            self.ports[name] = (address, links.listen(address))
        return links

    def close(self) -> None:
        for links in self.links.values():
            links.close()
        self._closed_port.close()
