"""The seam between connections and what they carry: implemented by the driver, called from the connections' threads."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_hivemind.engine.native.wire.frames import Header

PeerId = str
Payload = Sequence[memoryview | bytes]


class Sink(Protocol):
    """Where frames go. Every method may be called from any thread and must return quickly."""

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        """Memory of exactly ``header.length`` bytes for what follows; None to let it pass by unused.

        Raises:
            WireError: such a frame cannot be. The connection is closed, and nothing more of it is read.
        """

    def moved(self, peer: PeerId, header: Header) -> None:
        """A part of it has arrived."""

    def arrived(self, peer: PeerId, header: Header, payload: memoryview | None) -> None:
        """All of it is in the memory that :meth:`room` gave."""

    def lost(self, peer: PeerId, reason: str, *, connects: bool = False) -> None:
        """There is no connection to ``peer`` any more, and none could be made; or (``connects``) not yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction:
    """How to reach a peer, as it says itself over libp2p, which has authenticated it.

    Attributes:
        endpoints: hosts and ports, best first; empty if it cannot be dialled: then it dials this peer.
        fingerprint: of its certificate; empty for connections in the clear.
        token: proves to it, once, who dials.
    """

    endpoints: tuple[tuple[str, int], ...]
    fingerprint: bytes
    token: bytes


#: asks a peer over libp2p how it can be reached, or (True) to dial this one instead; may block, may raise OSError
Introduce = Callable[[PeerId, bool], Introduction]
#: opens a connection that libp2p carries to a peer, within so many seconds; blocks, may raise OSError
OpenStream = Callable[[PeerId, float], socket.socket]
