"""How a connection to one other peer is made, and made again: the ways that there are, tried in turn."""

from __future__ import annotations

import contextlib
import enum
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from lightning_hivemind.engine.native.wire.connection import close, why
from lightning_hivemind.engine.native.wire.dial import Endpoint, dial, greet
from lightning_hivemind.engine.native.wire.frames import Kind
from lightning_hivemind.engine.native.wire.sink import Introduce, Introduction, OpenStream, PeerId
from lightning_hivemind.errors import LightningHivemindError

log = logging.getLogger("lightning_hivemind")

RETRY_S = 0.1
#: of who throws out whoever comes, it is asked so often whether it still listens
PROBES = 3
#: what libp2p carries was perhaps only a slow moment's way: so often a better one is looked for
IMPROVE_S = 30.0
#: connections in a row that ended as soon as they were made
MOST_BROKEN = 5
ENDED = "its process has ended: nobody listens at its address"


class Gone(Exception):
    """The peer cannot be reached: its process has ended, or nobody answered for too long."""


class Way(enum.Enum):
    """Each is tried where the one before does not lead to a peer that answers over libp2p."""

    DIAL = enum.auto()
    #: it is asked, over libp2p, to dial this peer: there may be a router before it and none before this one
    INVITE = enum.auto()
    #: libp2p carries the connection: slower, but it gets through where its own port or nothing else does
    STREAM = enum.auto()


class Reach:
    """See the module. Connections are made in one thread, but for those with which a better way is looked for.

    Args:
        stream: None where libp2p carries no connections.
        context: for TLS; None connects in the clear.
        patience_s: for an attempt, and the time-out of the connection.
        listens: this peer can be dialled, too.
        way: to begin with.
    """

    def __init__(
        self,
        peer: PeerId,
        *,
        introduce: Introduce,
        stream: OpenStream | None,
        context: ssl.SSLContext | None,
        patience_s: float,
        listens: bool,
        way: Way,
    ) -> None:
        self.peer, self._introduce, self._stream, self._context = peer, introduce, stream, context
        self._patience_s = patience_s
        #: that leads to the peer, or is to be tried next
        self.way = way
        self._ways = [Way.DIAL, *[Way.INVITE] * listens, *[Way.STREAM] * (stream is not None)]
        #: what was connected last, by which way, and where that was if it was dialled
        self.sock: socket.socket | None = None
        self._made_by = way
        self._endpoint: Endpoint | None = None
        self._connected_at, self._broken = -float("inf"), 0
        self._changed = threading.Condition()
        self._closed = threading.Event()
        #: how many wait for the other peer to dial, and what came of it
        self._waiting = 0
        self._given: socket.socket | None = None

    def connect(self) -> socket.socket:
        """A connection; raises :class:`Gone` when none can be made, or none lives."""
        start = time.monotonic()
        self._broken = self._broken + 1 if start - self._connected_at < self._patience_s else 0
        if self._broken > MOST_BROKEN:
            raise Gone("its connections end as soon as they are made (does it run another release of this package?)")
        untried = set(self._ways)
        while True:
            if self._is_gone():
                raise Gone(ENDED)
            answered, way = False, self.way
            try:
                with self._may_be_dialled():
                    introduction = self._introduce(self.peer, way is Way.INVITE)
                    answered = True
                    untried.discard(way)
                    sock = self._go(way, introduction, self._patience_s / 2)
                break
            except (OSError, LightningHivemindError) as error:
                if answered and isinstance(error, ConnectionRefusedError) and self._endpoint is not None:
                    raise Gone(ENDED) from None
                another = answered and self._endpoint is None  # it lives, and this is not the way to it
                if another:
                    self.way = self._ways[(self._ways.index(way) + 1) % len(self._ways)]
                late = time.monotonic() + RETRY_S >= start + self._patience_s
                if self._closed.is_set() or (late and not (another and untried)):
                    raise Gone(f"cannot be reached: {why(error)}") from error
                self._closed.wait(RETRY_S)
        with self._changed:
            self.sock, self._connected_at = sock, time.monotonic()
            self.way = self._made_by = way
            if self._closed.is_set():
                close(sock)
        if way is Way.STREAM:
            threading.Thread(target=self._improve, args=(sock,), name=f"dials {self.peer[-6:]}", daemon=True).start()
        return sock

    def another(self) -> socket.socket:
        """One more connection, by the way of the last. Raises OSError or LightningHivemindError if there is none."""
        if self._made_by is Way.STREAM or self._closed.is_set():
            raise ConnectionError("libp2p carries the connection, or there is none any more")
        return self._one_more(self._made_by)

    def give(self, sock: socket.socket) -> None:
        """A connection that the other peer, which cannot be dialled, has made for this peer to send on."""
        with self._changed:
            unused = self._given if self._waiting else sock
            if self._waiting:
                self._given = sock
                self._changed.notify_all()
            if unused is not None:
                close(unused)

    @property
    def improved(self) -> bool:
        """There is a better way now than the one by which the last connection was made."""
        return self.way is not self._made_by

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """No more connections; whoever waits for one gets an error."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    # ------------------------------------------------------------------ one attempt

    def _go(self, way: Way, introduction: Introduction, timeout_s: float) -> socket.socket:
        if way is Way.STREAM:
            return self._carried(introduction, 2 * timeout_s)
        if not introduction.endpoints:
            return self._await(timeout_s)
        sock, self._endpoint = self._dial(introduction, timeout_s)
        return sock

    def _dial(self, introduction: Introduction, timeout_s: float) -> tuple[socket.socket, Endpoint]:
        sock, endpoint = dial(introduction, Kind.HELLO, context=self._context, timeout_s=timeout_s)
        sock.settimeout(self._patience_s)
        return sock, endpoint

    def _carried(self, introduction: Introduction, timeout_s: float) -> socket.socket:
        assert self._stream is not None
        plain = self._stream(self.peer, timeout_s)
        sock = greet(plain, introduction, Kind.HELLO, context=self._context, timeout_s=timeout_s)
        sock.settimeout(self._patience_s)
        log.info(
            "peer %s is reached through libp2p only, which is slower: if you can, forward the port that follows that of"
            " host_maddrs at one of you",
            self.peer,
        )
        return sock

    @contextlib.contextmanager
    def _may_be_dialled(self) -> Iterator[None]:
        """What the other peer makes meanwhile is kept for :meth:`_await`."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                if not self._waiting and self._given is not None:
                    close(self._given)
                    self._given = None

    def _await(self, timeout_s: float) -> socket.socket:
        """Until the other peer, which was asked over libp2p, has dialled."""
        with self._changed:
            self._changed.wait_for(lambda: self._given is not None or self._closed.is_set(), timeout_s)
            if self._closed.is_set():
                raise ConnectionAbortedError("closing")
            if self._given is None:
                raise TimeoutError
            sock, self._given = self._given, None
            return sock

    def _is_gone(self) -> bool:
        """Whether nobody listens any more where the peer was: quicker to know than that libp2p does not answer.

        A process that is being ended closes one connection after another: it may listen a moment longer than it is
        connected. Who comes then is thrown out; a peer that lives waits for its caller to speak.
        """
        if (endpoint := self._endpoint) is None:
            return False
        for _ in range(PROBES):
            try:
                with socket.create_connection(endpoint, timeout=self._patience_s) as probe:
                    probe.settimeout(RETRY_S)
                    probe.recv(1)
            except ConnectionRefusedError:
                return True
            except ConnectionResetError:
                pass
            except OSError:
                return False
            if self._closed.wait(RETRY_S / PROBES):
                break
        return False

    # ------------------------------------------------------------------ while libp2p carries the connection

    def _improve(self, carried: socket.socket) -> None:
        """Until there is a better way."""
        while not self._closed.wait(IMPROVE_S) and self.sock is carried:
            for way in self._ways[:-1]:
                if self._leads(way):
                    with self._changed:
                        if self.sock is carried:
                            self.way = way
                    return

    def _leads(self, way: Way) -> bool:
        """Whether that way does by now."""
        try:
            close(self._one_more(way))
        except Exception as error:  # the peer is where it was, whatever this was
            log.debug("there is no better way to %s: %s", self.peer, why(error))
            return False
        return True

    def _one_more(self, way: Way) -> socket.socket:
        with self._may_be_dialled():
            introduction = self._introduce(self.peer, way is Way.INVITE)
            if introduction.endpoints:
                return self._dial(introduction, self._patience_s)[0]
            return self._await(self._patience_s)
