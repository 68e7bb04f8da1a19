"""Makes a connection to a peer that has said, over libp2p, where it listens."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import ssl
import threading
import time

from lightning_hivemind.engine.native.wire.connection import close, tune, write
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.sink import Introduction
from lightning_hivemind.engine.native.wire.tls import check_pinned
from lightning_hivemind.errors import WireError
from lightning_hivemind.network.inherited import not_inherited

Endpoint = tuple[str, int]

#: until the next endpoint is tried, if the one before has not answered; and for one of several, at least
APART_S, LEAST_S = 0.2, 0.1


def dial(
    introduction: Introduction, greeting: Kind, *, context: ssl.SSLContext | None, timeout_s: float
) -> tuple[socket.socket, Endpoint]:
    """Try the endpoints in order, and the next before one has answered. Some may mean another machine here than there:
    the first that shows the certificate is taken. (In the clear one after the other: whoever accepts is taken.)

    Args:
        greeting: HELLO or REVERSED.
        context: None connects in the clear, to private addresses only.
        timeout_s: for all of it, and of the connection.

    Raises:
        ConnectionRefusedError: nobody listens at any of them.
        OSError, WireError: what else went wrong at one of them.
    """
    endpoints = introduction.endpoints
    failures: list[Exception] = []
    if context is None:
        for endpoint in endpoints:
            try:
                plain = _connect(endpoint, max(LEAST_S, timeout_s / len(endpoints)))
                try:
                    _check_private(plain)
                except WireError:
                    close(plain)
                    raise
                return greet(plain, introduction, greeting, context=None, timeout_s=timeout_s), endpoint
            except (OSError, WireError) as error:
                failures.append(error)
    else:
        race = _Race(introduction, context, timeout_s)
        while (made := race.next(failures)) is not None:
            try:
                write(made[0], Header(kind=greeting, length=len(introduction.token)), (introduction.token,))
                race.close()
                return made
            except OSError as error:
                close(made[0])
                failures.append(error)
    others = [one for one in failures if not isinstance(one, ConnectionRefusedError)]
    raise (others or failures or [ConnectionError("it accepts no connections (client_mode)")])[0]


class _Race:
    """Connections to several endpoints at once, each in a thread of its own, up to where one must say who it is."""

    def __init__(self, introduction: Introduction, context: ssl.SSLContext, timeout_s: float) -> None:
        self._introduction, self._context, self._until = introduction, context, time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._left = list(introduction.endpoints)
        self._apart_s = min(APART_S, timeout_s / (2 * len(self._left))) if self._left else 0.0
        self._running = 0
        self._over = threading.Event()
        self._found: queue.SimpleQueue[tuple[socket.socket, Endpoint] | Exception] = queue.SimpleQueue()

    def next(self, failures: list[Exception]) -> tuple[socket.socket, Endpoint] | None:
        """The next that is whom it should be; None if there is no other. What went wrong is added to ``failures``."""
        while self._left or self._running:
            if self._left:
                self._start(self._left.pop(0))
            wait_s = self._apart_s if self._left else self._until - time.monotonic()
            try:
                found = self._found.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                if not self._left:
                    failures.append(TimeoutError())
                    break
                continue
            self._running -= 1
            if not isinstance(found, Exception):
                return found
            failures.append(found)
        self.close()
        return None

    def close(self) -> None:
        """What is still being made is closed once it is."""
        self._over.set()
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._found.get_nowait()
                if not isinstance(found, Exception):
                    close(found[0])

    def _start(self, endpoint: Endpoint) -> None:
        self._running += 1
        try:
            threading.Thread(target=self._make, args=(endpoint,), name=f"dials {endpoint[0]}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._found.put(ConnectionError(str(error)))

    def _make(self, endpoint: Endpoint) -> None:
        try:
            plain = _connect(endpoint, max(LEAST_S, self._until - time.monotonic()))
            sock = secured(plain, self._introduction, context=self._context, timeout_s=self._timeout_s)
        except Exception as error:
            self._found.put(error)
            return
        self._found.put((sock, endpoint))
        if self._over.is_set():
            self.close()


def _connect(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection(endpoint, timeout=timeout_s)
    except UnicodeError as error:  # a host may be anything
        raise ConnectionError(f"{endpoint[0]!r} is no host: {error}") from error


def _check_private(plain: socket.socket) -> None:
    host = ipaddress.ip_address(plain.getpeername()[0].partition("%")[0])
    if (getattr(host, "ipv4_mapped", None) or host).is_global:
        raise WireError(f"{host} is a public address, and insecure_lan=True sends in the clear")


def greet(
    plain: socket.socket,
    introduction: Introduction,
    greeting: Kind,
    *,
    context: ssl.SSLContext | None,
    timeout_s: float,
) -> socket.socket:
    """Say who this is on a connection just made, and check who answers; it is closed if that fails. See :func:`dial`.

    Raises:
        OSError, WireError: the other end is none of ours, or gone.
    """
    sock = secured(plain, introduction, context=context, timeout_s=timeout_s)
    try:
        write(sock, Header(kind=greeting, length=len(introduction.token)), (introduction.token,))
    except BaseException:
        close(sock)
        raise
    return sock


def secured(
    plain: socket.socket, introduction: Introduction, *, context: ssl.SSLContext | None, timeout_s: float
) -> socket.socket:
    """Encrypted, if it shall be, and with who was introduced at the other end; else it is closed. Raises as above."""
    sock = plain
    try:
        tune(plain, timeout_s)
        if context is not None:
            sock = not_inherited(context.wrap_socket(plain))
        if isinstance(sock, ssl.SSLSocket):
            check_pinned(sock, introduction.fingerprint)
    except BaseException:
        close(sock)
        raise
    return sock
