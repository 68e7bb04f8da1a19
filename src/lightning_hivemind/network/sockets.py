"""One private, short directory per peer for the unix sockets of hivemind, and whoever still uses it.

hivemind puts its sockets into ``/tmp`` and leaves some of them behind. In a directory of their own they can be removed
as one, and the processes that belong to a peer can be told from all others by that directory on their command line.

One more is made by Python's multiprocessing, in ``/tmp/pymp-...``, as soon as hivemind sends a future to a child: the
trainer passes file descriptors over it. It serves the trainer for its whole life, so it goes only when that has died.
Where the trainer was started by multiprocessing it lies among those of whoever started it, and goes alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from multiprocessing import resource_sharer, util
from pathlib import Path

from lightning_hivemind.errors import DaemonError

_PREFIX = "lhm-"
_LOCK = "lock"
_LOG = "p2pd.log"
_LISTENER = "listener"
#: sun_path holds 104 bytes on macOS (108 on Linux); the longest name hivemind puts here has 26.
_LONGEST_DIRECTORY = 104 - 28
#: A directory younger than this may belong to a peer that is just being started.
_STALE_AFTER_S = 60.0


class SocketDirectory:
    """A new directory ``lhm-...``, mode 0700. Its lock is held for as long as this process or a fork of it lives."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._owner_pid = os.getpid()
        self._lock: int | None = lock

    @classmethod
    def create(cls) -> SocketDirectory:
        """Make it in /tmp (or the system's temporary directory). Also removes those that dead peers left.

        Raises:
            DaemonError: no directory can be written whose name is short enough for a unix socket.
        """
        for parent in dict.fromkeys(("/tmp", tempfile.gettempdir())):
            try:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            except OSError:
                continue
            if len(os.fsencode(path)) > _LONGEST_DIRECTORY:
                path.rmdir()
                continue
            lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_stale(Path(parent))
            return cls(path, lock)
        raise DaemonError(
            f"No directory for unix sockets: neither /tmp nor TMPDIR={tempfile.gettempdir()!r} can be written, or "
            f"the path is longer than {_LONGEST_DIRECTORY} bytes. Nothing was started. Set TMPDIR to a short, "
            "writable path."
        )

    @property
    def maddr_prefix(self) -> str:
        """What hivemind puts before the name of a socket."""
        return f"/unix{self.path}/"

    @property
    def log_path(self) -> Path:
        """Where the daemon's output is kept while it runs."""
        return self.path / _LOG

    def daemon_output(self, lines: int) -> list[str]:
        """The last ``lines`` that the daemon printed; empty if it printed nothing."""
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        except FileNotFoundError:
            return []

    def daemon_pids(self) -> list[int]:
        """Processes, of whatever parent, that have this directory on their command line: its libp2p daemons."""
        needle = self.maddr_prefix
        return [pid for pid, command in _commands() if f"-listen={needle}" in command and pid != os.getpid()]

    def kill_daemons(self, timeout_s: float) -> None:
        """Kill what :meth:`daemon_pids` names, and wait until it is gone (or for ``timeout_s``)."""
        deadline = time.monotonic() + timeout_s
        while pids := self.daemon_pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def note_listener(self) -> None:
        """Write down where this process passes file descriptors, so that it can be removed when it was killed."""
        address = getattr(resource_sharer._resource_sharer, "_address", None)  # type: ignore[attr-defined]
        if isinstance(address, str):
            directory = os.path.dirname(address)
            lines = [address, *[directory] * _was_made_here(directory)]
            try:
                (self.path / _LISTENER).write_text("\n".join(lines), encoding="utf-8")
            except OSError as error:
                raise DaemonError(
                    f"{self.path}: cannot be written: {error}. Nothing was started. Free some room there, or set TMPDIR"
                    " to a short path where there is some."
                ) from error

    def remove(self) -> None:
        """Remove it with all sockets in it. Safe to call twice, and from several children of its maker at once.

        Called from a child whose parent, the maker, is gone, it also removes that one's multiprocessing socket.
        """
        if self._owner_pid not in (os.getpid(), os.getppid()):
            _remove_listener(self.path)
        shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        """Remove it and give up the lock; for the process that made it."""
        self.remove()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_stale(parent: Path) -> None:
    """Remove directories of peers all of whose processes are gone (all were killed at once): nobody holds the lock."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
                continue
            if time.time() - info.st_mtime < _STALE_AFTER_S:
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # removed by its owner meanwhile, or not one of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_listener(path)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _was_made_here(directory: str) -> bool:
    """Whether this process made multiprocessing's directory: children, and forks, have that of their maker."""
    mine = [one for one in list(util._finalizer_registry.values()) if one._pid == os.getpid()]  # type: ignore[attr-defined]
    return any(isinstance(given, str) and given == directory for one in mine for given in one._args or ())


def _remove_listener(directory: Path) -> None:
    """Remove the dead maker's multiprocessing socket, and, if it was its own, the directory with its children's."""
    try:
        listener, *own = map(Path, (directory / _LISTENER).read_text(encoding="utf-8").splitlines())
        for socket in [listener, *(found for one in own for found in one.glob("listener-*"))]:
            if socket.exists() and stat.S_ISSOCK(socket.lstat().st_mode):
                socket.unlink(missing_ok=True)
        for one in own:
            if one.name.startswith("pymp-"):
                one.rmdir()
    except (OSError, ValueError):  # never made, or not whole; removed by another child; the directory is still in use
        return


def _commands() -> list[tuple[int, str]]:
    """(pid, command line) of every process that can be seen; zombies have none."""
    proc = Path("/proc")
    if not (proc / "self" / "cmdline").exists():
        listing = subprocess.run(["ps", "-axo", "pid=,command="], capture_output=True, text=True, check=True).stdout
        rows = (line.strip().split(None, 1) for line in listing.splitlines())
        return [(int(row[0]), row[1]) for row in rows if len(row) == 2]
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended while we looked
                continue
            found.append((int(entry.name), command))
    return found
