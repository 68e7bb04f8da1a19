"""The file with a peer's private key, which makes its peer id."""

from __future__ import annotations

import logging
import os

from hivemind.p2p import PeerID

from lightning_hivemind.errors import DaemonError

log = logging.getLogger("lightning_hivemind")


def check_identity(path: str | None) -> None:
    """See that the file holds a key, or can be made. Nothing is written.

    Raises:
        DaemonError: its directory is missing or not writable, or the file cannot be read, or holds no key.
    """
    if path is None:
        return
    path = os.path.expanduser(path)
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise DaemonError(f"identity_path={path!r}: the directory {directory!r} does not exist. Create it first.")
    if os.path.isdir(path):
        raise DaemonError(f"identity_path={path!r}: is a directory. Name a file in it.")
    if os.path.exists(path):
        read_peer_id(path)
    elif not os.access(directory, os.W_OK | os.X_OK):
        raise DaemonError(f"identity_path={path!r}: {directory!r} is not writable, and the file does not exist yet.")


def read_peer_id(path: str) -> str:
    """The peer id that the key in this file makes.

    Raises:
        DaemonError: it cannot be read, or is no key.
    """
    try:
        with open(path, "rb") as file:
            return str(PeerID.from_identity(file.read()).to_base58())
    except OSError as error:
        raise DaemonError(f"identity_path={path!r}: cannot be read: {error}. Nothing was started.") from error
    except Exception as error:  # protobuf and cryptography raise types of their own
        raise DaemonError(
            f"identity_path={path!r}: holds no libp2p private key ({type(error).__name__}: {error}). Nothing was "
            "started. Name a file that does not exist yet to have one made."
        ) from error


def without_self(initial_peers: tuple[str, ...], identity_path: str | None) -> tuple[str, ...]:
    """``initial_peers`` without this peer's own addresses: a peer with a fixed identity may be started with a list of
    all. Where nothing is left it is the first peer, and says so in the log."""
    if identity_path is None or not os.path.exists(os.path.expanduser(identity_path)):
        return initial_peers
    own = f"/p2p/{read_peer_id(os.path.expanduser(identity_path))}"
    others = tuple(address for address in initial_peers if not address.endswith(own))
    if initial_peers and not others:
        log.warning(
            "initial_peers names only this peer itself (identity_path=%r): starting as the first", identity_path
        )
    return others
