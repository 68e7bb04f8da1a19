"""Makes a connection to a peer that has said, over libp2p, where it listens."""

from __future__ import annotations

import ipaddress
import socket
import ssl

from lightning_hivemind.engine.native.wire.connection import close, tune, write
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.sink import Introduction
from lightning_hivemind.engine.native.wire.tls import check_pinned
from lightning_hivemind.errors import WireError
from lightning_hivemind.network.inherited import not_inherited

Endpoint = tuple[str, int]


def dial(
    introduction: Introduction, greeting: Kind, *, context: ssl.SSLContext | None, timeout_s: float
) -> tuple[socket.socket, Endpoint]:
    """Try the endpoints in order. Some may mean another machine here than there, so any failure leads on.

    Args:
        greeting: HELLO or REVERSED.
        context: None connects in the clear, to private addresses only.
        timeout_s: for each endpoint, and of the connection.

    Raises:
        ConnectionRefusedError: nobody listens at any of them.
        OSError, WireError: what else went wrong at one of them.
    """
    failures: list[Exception] = []
    for endpoint in introduction.endpoints:
        try:
            plain = socket.create_connection(endpoint, timeout=timeout_s)
        except (OSError, UnicodeError) as error:  # a host may be anything
            failures.append(error)
            continue
        try:
            if context is None:
                _check_private(plain)
            return greet(plain, introduction, greeting, context=context, timeout_s=timeout_s), endpoint
        except (OSError, WireError) as error:
            close(plain)
            failures.append(error)
    others = [one for one in failures if not isinstance(one, ConnectionRefusedError)]
    raise (others or failures or [ConnectionError("it accepts no connections (client_mode)")])[0]


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
    sock = plain
    try:
        tune(plain, timeout_s)
        if context is not None:
            sock = not_inherited(context.wrap_socket(plain))
        if isinstance(sock, ssl.SSLSocket):
            check_pinned(sock, introduction.fingerprint)
        write(sock, Header(kind=greeting, length=len(introduction.token)), (introduction.token,))
    except BaseException:
        close(sock)
        raise
    return sock
