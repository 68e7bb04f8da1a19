"""Encrypted connections that are pinned to one certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import threading
from pathlib import Path

import pytest

from lightning_hivemind.engine.native.wire.tls import Certificate, check_pinned, client_context
from lightning_hivemind.errors import WireError


def connect(certificate: Certificate, context: ssl.SSLContext | None = None) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """A handshake over a real pair of sockets: (client, server). Raises SSLError where the server refuses it."""
    mine, theirs = socket.socketpair()
    served: list[ssl.SSLSocket] = []

    def serve() -> None:
        with contextlib.suppress(ssl.SSLError), theirs:
            served.append(certificate.server.wrap_socket(theirs, server_side=True))

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        client = (context or client_context()).wrap_socket(mine)
    finally:
        mine.close()
        serving.join(10.0)
    return client, served[0]


def test_the_announced_certificate_is_accepted() -> None:
    certificate = Certificate.create()
    client, server = connect(certificate)
    with client, server:
        check_pinned(client, certificate.fingerprint)
        client.sendall(b"secret")
        assert server.recv(6) == b"secret"
        assert client.version() == "TLSv1.3"


def older(context: ssl.SSLContext) -> ssl.SSLContext:
    """One that speaks TLS 1.2 at most, and would be content with that."""
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def test_a_client_that_speaks_nothing_newer_than_tls_1_2_is_refused() -> None:
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        connect(Certificate.create(), older(client_context()))


def test_a_server_that_speaks_nothing_newer_than_tls_1_2_is_refused() -> None:
    certificate = Certificate.create()
    older(certificate.server)
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        connect(certificate)


def test_another_certificate_is_refused() -> None:
    client, server = connect(Certificate.create())
    with client, server, pytest.raises(WireError, match="another certificate"):
        check_pinned(client, Certificate.create().fingerprint)


def test_no_key_is_left_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Certificate.create()
    assert list(tmp_path.iterdir()) == []
