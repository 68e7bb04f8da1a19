"""Everything that this peer sends to one other peer: one thread that connects, and connects again when it must."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_hivemind.engine.native.wire.connection import close, pieces, wake, why, write
from lightning_hivemind.engine.native.wire.dial import Endpoint, dial
from lightning_hivemind.engine.native.wire.frames import PIECE_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.sink import Introduce, Payload, PeerId
from lightning_hivemind.errors import LightningHivemindError

#: a connection on which nothing is to be sent says so often that it lives
PING_S = 0.5
RETRY_S = 0.1


class Gone(Exception):
    """The peer cannot be reached: its process has ended, or nobody answered for too long."""


Frame = tuple[Header, Payload]


class Outlet:
    """Sends frames in order, messages before chunks; never blocks the caller.

    Frames that were handed over while a connection broke may be lost: the protocol asks for them again. What is asked
    for again while it waits, or is being sent, over a slow line, is sent once.
    """

    def __init__(
        self,
        peer: PeerId,
        *,
        introduce: Introduce,
        context: ssl.SSLContext | None,
        patience_s: float,
        lost: Callable[[Outlet, str], None],
    ) -> None:
        self.peer = peer
        self._introduce, self._context, self._patience_s, self._lost = introduce, context, patience_s, lost
        self._urgent: deque[Frame] = deque()
        self._bulk: deque[Frame] = deque()
        #: of chunks that wait or are being sent
        self._unsent: set[Header] = set()
        self._sending: Header | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._sock: socket.socket | None = None
        self._given: socket.socket | None = None
        self._endpoint: Endpoint | None = None
        #: it could not be dialled (a router in between, say), so it is asked to dial
        self._dials = False
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
            self._closed = True
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
            while not self._closed:
                with self._connect() as sock:
                    self._pump(sock)
        except Gone as error:
            reason = str(error)
        except Exception as error:  # whatever it is, the peer must not wait for ever for what is sent to it
            reason = f"{type(error).__name__}: {error}"
        if not self._closed:
            self._lost(self, reason)

    def _pump(self, sock: socket.socket) -> None:
        """Send until the connection breaks."""
        try:
            while not self._closed:
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
            if not self._urgent and not self._bulk and not self._closed:
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
                if self._closed or time.monotonic() + RETRY_S >= deadline:
                    raise Gone(f"cannot be reached: {why(error)}") from error
                self._dials = self._endpoint is None and not self._dials
                time.sleep(RETRY_S)
        with self._changed:
            self._sock = sock
            if self._closed:
                close(sock)
        return sock

    def _reach(self, deadline: float) -> socket.socket:
        """One attempt, by the one way or the other."""
        introduction = self._introduce(self.peer, self._dials)
        half = min(deadline, time.monotonic() + self._patience_s / 2)
        if not introduction.endpoints:
            return self._await(half if self._dials else deadline)
        timeout_s = max(RETRY_S, (half - time.monotonic()) / len(introduction.endpoints))
        sock, endpoint = dial(introduction, Kind.HELLO, context=self._context, timeout_s=timeout_s)
        sock.settimeout(self._patience_s)
        self._endpoint = endpoint
        return sock

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
            while self._given is None and not self._closed:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self._changed.wait(left_s)
            if self._given is None:
                raise ConnectionAbortedError("closing")
            sock, self._given = self._given, None
            return sock
