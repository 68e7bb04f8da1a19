"""The directory of a peer's sockets: private, short, removed with its peer, and later if its peer could not."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_hivemind.errors import DaemonError
from lightning_hivemind.network import sockets
from lightning_hivemind.network.sockets import SocketDirectory


@pytest.fixture
def directory() -> Iterator[SocketDirectory]:
    one = SocketDirectory.create()
    yield one
    one.release()


def test_it_is_private_and_short_enough_for_a_socket(directory: SocketDirectory) -> None:
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert len(str(directory.path / "p2pclient-0123456789a.sock")) < 104
    assert directory.maddr_prefix == f"/unix{directory.path}/"


def test_it_can_be_removed_and_released_twice(directory: SocketDirectory) -> None:
    directory.remove()
    directory.remove()
    directory.release()
    directory.release()
    assert not directory.path.exists()


def make_old(path: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


def test_a_directory_whose_processes_are_all_dead_is_removed_by_the_next_peer() -> None:
    code = (
        "import os, signal; from lightning_hivemind.network.sockets import SocketDirectory;"
        "print(SocketDirectory.create().path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    dead = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert dead.returncode < 0
    left = Path(dead.stdout.strip())
    assert left.exists()
    SocketDirectory.create().release()
    assert left.exists(), "a young directory may belong to a peer that is just starting"
    make_old(left)
    SocketDirectory.create().release()
    assert not left.exists()


@pytest.mark.parametrize("noted", ["", "\n", "/nowhere/listener-x", "nonsense\0"])
def test_what_a_dead_peer_could_not_write_down_stops_nobody(directory: SocketDirectory, noted: str) -> None:
    """It was killed, or the disk was full, in the middle of it."""
    (directory.path / "listener").write_text(noted, encoding="utf-8")
    assert directory._lock is not None
    os.close(directory._lock)
    directory._lock = None
    make_old(directory.path)
    SocketDirectory.create().release()
    assert not directory.path.exists()


def test_an_old_directory_of_a_live_peer_is_kept(directory: SocketDirectory) -> None:
    make_old(directory.path)
    SocketDirectory.create().release()
    assert directory.path.exists()


def test_a_fork_keeps_the_directory_alive() -> None:
    one = SocketDirectory.create()
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert one._lock is not None
        os.close(one._lock)
        one._lock = None
        lock = os.open(one.path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    one.release()


def test_its_daemons_are_known_by_their_command_line_and_no_others_are_killed(directory: SocketDirectory) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    ours = subprocess.Popen(
        [sys.executable, "-c", code, f"-listen={directory.maddr_prefix}p2pd-x.sock"], stdout=subprocess.PIPE
    )
    other = subprocess.Popen([sys.executable, "-c", code, "-listen=/unix/tmp/lhm-other/x"], stdout=subprocess.PIPE)
    try:
        for process in (ours, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        assert directory.daemon_pids() == [ours.pid]
        directory.kill_daemons(timeout_s=5.0)
        assert ours.wait(5) == -9
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.communicate()


def test_no_writable_place_is_said_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise PermissionError("read-only")

    monkeypatch.setattr(sockets.tempfile, "mkdtemp", full)
    with pytest.raises(DaemonError, match="Set TMPDIR"):
        SocketDirectory.create()


IS_KILLED = """
import os, signal

def is_killed(directory):
    \"\"\"This process, the maker; a child of it removes the directory.\"\"\"
    if os.fork() == 0:
        while os.getppid() == directory._owner_pid:
            pass
        directory.remove()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_dead_maker_s_socket_is_removed_alone_where_others_live_in_its_directory(tmp_path: Path, method: str) -> None:
    """What a script starts with multiprocessing has the script's directory, and so have the script's other children."""
    script = tmp_path / "script.py"
    script.write_text(
        IS_KILLED
        + """
import multiprocessing as mp, sys, time
from multiprocessing import reduction, resource_sharer
from lightning_hivemind.network.sockets import SocketDirectory

def train(told):
    directory = SocketDirectory.create()
    reduction.ForkingPickler.dumps(mp.Pipe()[0])  # what sending a future does
    directory.note_listener()
    told.send((resource_sharer._resource_sharer._address, str(directory.path)))
    is_killed(directory)

def ends(told):
    told.send("the others go on")

if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    reduction.ForkingPickler.dumps(mp.Pipe()[0])
    own = resource_sharer._resource_sharer._address
    heard, told = context.Pipe()
    trainer = context.Process(target=train, args=(told,))
    trainer.start()
    listener, directory = heard.recv()
    assert os.path.dirname(listener) == os.path.dirname(own)
    while os.path.exists(directory) or os.path.exists(listener):
        time.sleep(0.02)
    assert os.path.exists(own)
    other = context.Process(target=ends, args=(told,))
    other.start()
    print(heard.recv())
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script, method], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.stdout == "the others go on\n"


def test_the_multiprocessing_socket_of_a_dead_maker_is_removed_with_its_directory(tmp_path: Path) -> None:
    code = (
        IS_KILLED
        + """
import multiprocessing as mp
from multiprocessing import reduction, resource_sharer
from lightning_hivemind.network.sockets import SocketDirectory
directory = SocketDirectory.create()
reduction.ForkingPickler.dumps(mp.Pipe()[0])  # what sending a future does
directory.note_listener()
if os.fork() == 0:
    directory.remove()  # the maker lives: its socket stays
    os._exit(0)
os.wait()
assert os.path.exists(resource_sharer._resource_sharer._address) and not directory.path.exists()
directory.path.mkdir()
directory.note_listener()
print(directory.path, resource_sharer._resource_sharer._address, flush=True)
is_killed(directory)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=600)
    directory, listener = map(Path, done.stdout.strip().splitlines()[-1].split())
    deadline = time.monotonic() + 10
    while directory.exists() or listener.parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
