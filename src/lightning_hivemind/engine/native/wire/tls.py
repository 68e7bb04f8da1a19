"""TLS 1.3 between peers that have no common authority: each connection is pinned to one certificate.

The certificate is made when the peer starts and never leaves the machine's memory with its key but for a moment in a
private file (Python's ``ssl`` reads keys from files only). Others learn its fingerprint over libp2p, which has
authenticated the peer; whoever connects proves who it is with a token from the same source.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lightning_hivemind.errors import WireError

#: clocks of volunteers' machines are off by hours; pinning does not need dates
_VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A self-signed certificate and the context that serves it."""

    fingerprint: bytes
    server: ssl.SSLContext

    @classmethod
    def create(cls) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lightning-hivemind")])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID)
            .not_valid_after(now + _VALID)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # no session is resumed: a ticket would be a second way in
        _load(context, private + certificate.public_bytes(serialization.Encoding.PEM))
        return cls(fingerprint_of(certificate.public_bytes(serialization.Encoding.DER)), context)


def client_context() -> ssl.SSLContext:
    """For connections whose certificate :func:`check_pinned` then compares; no authority is asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_pinned(connection: ssl.SSLSocket, fingerprint: bytes) -> None:
    """After the handshake, before anything is sent.

    Raises:
        WireError: it is not the peer that was meant. The connection must be closed.
    """
    shown = connection.getpeercert(binary_form=True)
    if shown is None or not hmac.compare_digest(fingerprint_of(shown), fingerprint):
        raise WireError(
            "another certificate than the peer announced over libp2p: somebody listens at its address, or it has"
            " started anew"
        )


def fingerprint_of(certificate: bytes) -> bytes:
    """SHA-256 of a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix="lightning-hivemind-", suffix=".pem")  # readable by this user only
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
        context.load_cert_chain(name)
    finally:
        Path(name).unlink()
