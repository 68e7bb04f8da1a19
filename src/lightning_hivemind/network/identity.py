"""The file with a peer's private key, which makes its peer id."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time

from hivemind.p2p import PeerID

from lightning_hivemind.errors import DaemonError

log = logging.getLogger("lightning_hivemind")

#: The processes of a peer whose trainer was killed are gone within this, and a restarted one should not fail on them.
LEAVE_S = 3.0

#: of a key; what is longer is none
MOST_BYTES = 1 << 16


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
            return str(PeerID.from_identity(file.read(MOST_BYTES)).to_base58())
    except OSError as error:
        raise DaemonError(f"identity_path={path!r}: cannot be read: {error}. Nothing was started.") from error
    except Exception as error:  # protobuf and cryptography raise types of their own
        raise DaemonError(
            f"identity_path={path!r}: holds no libp2p private key ({type(error).__name__}: {error}). Nothing was "
            "started. Name a file that does not exist yet to have one made."
        ) from error


def _lock(file: int) -> bool:
    """False while another process has it; True also where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.debug("the identity's file cannot be locked: %s", error)
    return True


class IdentityLock:
    """Held by the live peer that uses an identity, for as long as it lives; two on one machine would train apart."""

    def __init__(self, path: str | None) -> None:
        self._path = path and os.path.expanduser(path)
        self._file: int | None = None

    def take(self) -> None:
        """Take it, if there is a file to lock already. Does nothing if it is held.

        Raises:
            DaemonError: another peer has it.
        """
        if self._path is None or self._file is not None or not os.path.exists(self._path):
            return
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        deadline = time.monotonic() + LEAVE_S
        while not _lock(file):
            if time.monotonic() > deadline:
                os.close(file)
                raise DaemonError(
                    f"identity_path={self._path!r}: another live peer uses this identity. Nothing is left running. Give"
                    " each peer its own file, or stop the other one."
                )
            time.sleep(0.05)
        self._file = file

    def release(self) -> None:
        """Give it up, in all forks of this process at once. Safe to call twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Hold it no longer in this process; those that were forked from it, or of which it is a fork, may."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def without_self(initial_peers: tuple[str, ...], identity_path: str | None) -> tuple[str, ...]:
    """``initial_peers`` without this peer's own addresses: a peer with a fixed identity may be started with a list of
    all. Where nothing is left it is the first peer, and says so in the log."""
    if identity_path is None or not os.path.exists(os.path.expanduser(identity_path)):
        return initial_peers
    own = f"/p2p/{read_peer_id(os.path.expanduser(identity_path))}"
    others = tuple(address for address in initial_peers if not address.endswith(own))
    if initial_peers and not others:
        log.warning(
            "initial_peers names only this peer itself (identity_path=%r): starting as the first. If that file was"
            " copied from another peer, give this one a file of its own.",
            identity_path,
        )
    return others
