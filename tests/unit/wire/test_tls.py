"""Encrypted connections that are pinned to one certificate."""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
from pathlib import Path

import pytest

from lightning_hivemind.engine.native.wire.tls import Certificate, check_pinned, client_context
from lightning_hivemind.errors import WireError


def connect(certificate: Certificate) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """A handshake over a real pair of sockets: (client, server)."""
    mine, theirs = socket.socketpair()
    served: list[ssl.SSLSocket] = []
    serving = threading.Thread(target=lambda: served.append(certificate.server.wrap_socket(theirs, server_side=True)))
    serving.start()
    client = client_context().wrap_socket(mine)
    serving.join(10.0)
    return client, served[0]


def test_the_announced_certificate_is_accepted_and_nothing_older_than_tls_1_3() -> None:
    certificate = Certificate.create()
    client, server = connect(certificate)
    with client, server:
        check_pinned(client, certificate.fingerprint)
        client.sendall(b"secret")
        assert server.recv(6) == b"secret"
        assert client.version() == "TLSv1.3"


def test_another_certificate_is_refused() -> None:
    client, server = connect(Certificate.create())
    with client, server, pytest.raises(WireError, match="another certificate"):
        check_pinned(client, Certificate.create().fingerprint)


def test_no_key_is_left_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Certificate.create()
    assert list(tmp_path.iterdir()) == []
