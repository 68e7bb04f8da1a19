"""Everything that this peer sends to one other peer: one thread that connects, and connects again when it must."""

from __future__ import annotations

import enum
import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_hivemind.engine.native.wire.connection import close, pieces, wake, why, write
from lightning_hivemind.engine.native.wire.dial import Endpoint, dial, greet
from lightning_hivemind.engine.native.wire.frames import PIECE_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.sink import Introduce, Introduction, OpenStream, Payload, PeerId
from lightning_hivemind.errors import LightningHivemindError

log = logging.getLogger("lightning_hivemind")

#: a connection on which nothing is to be sent says so often that it lives
PING_S = 0.5
RETRY_S = 0.1
#: what libp2p carries was perhaps only a slow moment's way: so often a better one is looked for
IMPROVE_S = 30.0


class Way(enum.Enum):
    """How a connection to a peer is made; the next is tried where one does not lead there."""

    DIAL = enum.auto()
    #: it is asked, over libp2p, to dial this peer: there may be a router before it and none before this one
    INVITE = enum.auto()
    #: libp2p carries the connection: slower, but it gets through where its own port or nothing else does
    STREAM = enum.auto()


class Gone(Exception):
    """The peer cannot be reached: its process has ended, or nobody answered for too long."""


Frame = tuple[Header, Payload]


class Outlet:
    """Sends frames in order, messages before chunks; never blocks the caller.

    Frames that were handed over while a connection broke may be lost: the protocol asks for them again. What is asked
    for again while it waits, or is being sent, over a slow line, is sent once.

    Args:
        way: to begin with.
        stream: None where libp2p carries no connections.
    """

    def __init__(
        self,
        peer: PeerId,
        *,
        introduce: Introduce,
        stream: OpenStream | None,
        context: ssl.SSLContext | None,
        patience_s: float,
        lost: Callable[[Outlet, str], None],
        way: Way = Way.DIAL,
    ) -> None:
        self.peer = peer
        #: that leads to the peer, or is to be tried next
        self.way = way
        self._ways = [Way.DIAL, Way.INVITE, Way.STREAM] if stream is not None else [Way.DIAL, Way.INVITE]
        self._introduce, self._stream = introduce, stream
        self._context, self._patience_s, self._lost = context, patience_s, lost
        self._urgent: deque[Frame] = deque()
        self._bulk: deque[Frame] = deque()
        #: of chunks that wait or are being sent
        self._unsent: set[Header] = set()
        self._sending: Header | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._sock: socket.socket | None = None
        self._given: socket.socket | None = None
        self._endpoint: Endpoint | None = None
        self._thread = threading.Thread(target=self._run, name=f"to {peer[-6:]}", daemon=True)
        self._thread.start()

    def send(self, header: Header, payload: Payload = ()) -> None:
        """Queue a frame. ``payload`` must not change until the round is over."""
        with self._changed:
            if header.kind in (Kind.INPUT, Kind.RESULT):
                if header in self._unsent:
                    return
                self._unsent.add(header)
            queue = self._urgent if header.kind is Kind.MESSAGE else self._bulk
            queue.append((header, payload))
            self._changed.notify()

    def forget(self, round_id: bytes) -> None:
        """That round is over: its chunks need not be sent any more."""
        with self._changed:
            self._unsent.difference_update(header for header, _ in self._bulk if header.round == round_id)
            self._bulk = deque(frame for frame in self._bulk if frame[0].round != round_id)

    def give(self, sock: socket.socket) -> None:
        """A connection that the other peer, which cannot be dialled, has made for this peer to send on."""
        with self._changed:
            if self._closed.is_set():
                close(sock)
                return
            if self._given is not None:
                close(self._given)
            self._given = sock
            self._changed.notify()

    @property
    def connection(self) -> socket.socket | None:
        """What it sends on now, or did last."""
        return self._sock

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            if self._sock is not None:
                wake(self._sock)
            if self._given is not None:
                close(self._given)
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        reason = ""
        try:
            while not self._closed.is_set():
                with self._connect() as sock:
                    self._pump(sock)
        except Gone as error:
            reason = str(error)
        except Exception as error:  # whatever it is, the peer must not wait for ever for what is sent to it
            reason = f"{type(error).__name__}: {error}"
        if not self._closed.is_set():
            self._lost(self, reason)

    def _pump(self, sock: socket.socket) -> None:
        """Send until the connection breaks."""
        try:
            while not self._closed.is_set() and not (self.way is Way.STREAM and self._given is not None):
                for piece in pieces(*(self._next() or (Header(kind=Kind.PING), ()))):
                    while (message := self._message()) is not None:
                        write(sock, *message)
                    write(sock, *piece)
        except OSError:
            with self._changed:
                self._sent()  # or lost: connected again, or found to be gone, by the caller

    def _next(self) -> Frame | None:
        with self._changed:
            self._sent()
            if not self._urgent and not self._bulk and not self._closed.is_set():
                self._changed.wait(PING_S)
            queue = self._urgent or self._bulk
            if not queue:
                return None
            frame = queue.popleft()
            self._sending = frame[0]
            return frame

    def _message(self) -> Frame | None:
        """One that may go between two pieces, because it is no more than one itself."""
        with self._changed:
            fits = self._urgent and self._urgent[0][0].length <= PIECE_BYTES
            return self._urgent.popleft() if fits else None

    def _sent(self) -> None:
        if self._sending is not None:
            self._unsent.discard(self._sending)
            self._sending = None

    def _connect(self) -> socket.socket:
        """A connection, or Gone when there is none within the patience."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                if self._is_gone():
                    raise ConnectionRefusedError
                sock = self._reach(deadline)
                break
            except (OSError, LightningHivemindError) as error:
                if isinstance(error, ConnectionRefusedError) and self._endpoint is not None:
                    raise Gone("its process has ended: nobody listens at its address") from None
                if self._closed.is_set() or time.monotonic() + RETRY_S >= deadline:
                    raise Gone(f"cannot be reached: {why(error)}") from error
                time.sleep(RETRY_S)
        with self._changed:
            self._sock = sock
            if self._closed.is_set():
                close(sock)
        return sock

    def _reach(self, deadline: float) -> socket.socket:
        """One attempt; the next one is made in another way, if none has led there yet. Raises OSError or WireError."""
        if self._given is not None:  # later than it was waited for
            self.way = Way.INVITE if self._endpoint is None else Way.DIAL
            return self._await(deadline)
        introduction = self._introduce(self.peer, self.way is Way.INVITE)
        half = min(deadline, time.monotonic() + self._patience_s / 2)
        try:
            if self.way is Way.STREAM:
                return self._open_stream(introduction, half)
            if not introduction.endpoints:
                return self._await(half)
            timeout_s = max(RETRY_S, (half - time.monotonic()) / len(introduction.endpoints))
            sock, endpoint = dial(introduction, Kind.HELLO, context=self._context, timeout_s=timeout_s)
        except (OSError, LightningHivemindError):
            if self._endpoint is None:  # it answers over libp2p, so it is not gone
                self.way = self._ways[(self._ways.index(self.way) + 1) % len(self._ways)]
            raise
        sock.settimeout(self._patience_s)
        self._endpoint = endpoint
        return sock

    def _open_stream(self, introduction: Introduction, deadline: float) -> socket.socket:
        assert self._stream is not None
        timeout_s = max(RETRY_S, deadline - time.monotonic())
        plain = self._stream(self.peer, timeout_s)
        sock = greet(plain, introduction, Kind.HELLO, context=self._context, timeout_s=timeout_s)
        sock.settimeout(self._patience_s)
        log.info(
            "peer %s is reached through libp2p only, which is slower: if you can, forward the port that follows that of"
            " host_maddrs at one of you",
            self.peer,
        )
        threading.Thread(target=self._improve, args=(sock,), name=f"better to {self.peer[-6:]}", daemon=True).start()
        return sock

    def _improve(self, carried: socket.socket) -> None:
        """While libp2p carries the connection, dial now and then."""
        while not self._closed.wait(IMPROVE_S) and self._sock is carried:
            try:
                introduction = self._introduce(self.peer, False)
                sock, endpoint = dial(introduction, Kind.HELLO, context=self._context, timeout_s=self._patience_s)
                sock.settimeout(self._patience_s)
            except (OSError, LightningHivemindError, Gone):
                continue
            self._endpoint = endpoint
            self.give(sock)
            return

    def _is_gone(self) -> bool:
        """Whether nobody listens any more where the peer was: quicker to know than that libp2p does not answer."""
        if self._endpoint is None:
            return False
        try:
            socket.create_connection(self._endpoint, timeout=self._patience_s).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def _await(self, deadline: float) -> socket.socket:
        """Until the other peer, which was asked over libp2p, has dialled."""
        with self._changed:
            while self._given is None and not self._closed.is_set():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self._changed.wait(left_s)
            if self._given is None:
                raise ConnectionAbortedError("closing")
            sock, self._given = self._given, None
            return sock
