"""What is open in a process, and not in those that are forked from it: a killed trainer is seen to be gone at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from lightning_hivemind.network.identity import IdentityLock
from lightning_hivemind.network.inherited import not_inherited
from unit.forked import in_a_child

# Takes the lock, forks what outlives it (as a DataLoader's worker does), and waits to be killed.
PARENT = """
import os, sys, time
from lightning_hivemind.network.identity import IdentityLock
from lightning_hivemind.network.inherited import not_inherited
lock = IdentityLock(sys.argv[1])
lock.take()
not_inherited(lock)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_a_connection_is_open_here_and_closed_in_children() -> None:
    ours, theirs = socket.socketpair()
    with not_inherited(ours), theirs:
        assert in_a_child(lambda: ours.fileno() == -1 and theirs.fileno() != -1)
        ours.sendall(b"still open")
        assert theirs.recv(100) == b"still open"


def test_what_is_gone_is_forgotten() -> None:
    ours, theirs = socket.socketpair()
    number = not_inherited(ours).detach()
    with theirs, socket.socket(fileno=number) as again:
        assert in_a_child(lambda: os.fstat(again.fileno()) is not None), "it is another one's now"


def test_an_identity_is_free_once_its_peer_is_killed_though_a_worker_lives(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    path.touch()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        os.kill(worker, 0)  # it lives
        again = IdentityLock(str(path))
        again.take()
        again.release()
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.stdout.close()
