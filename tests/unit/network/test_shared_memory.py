"""Futures between processes can be made while torch's shared-memory manager does not answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("hivemind")

# A process of its own, whose manager can be stopped for longer than the second that torch gives it: 40 futures want
# more memory at least twice, and the child, with a connection of its own, takes the last one's in turn.
SCENE = """
import multiprocessing, os, signal, threading, time
import psutil
from hivemind.utils import MPFuture
from lightning_hivemind.network.shared_memory import start_shared_memory

def pause():
    manager.suspend()
    threading.Timer(1.7, manager.resume).start()
    return time.monotonic()

child_reads, trainer_writes = multiprocessing.Pipe(duplex=False)
child = os.fork()
start_shared_memory()
start_shared_memory()  # once more changes nothing
if child == 0:
    signal.alarm(60)
    future = child_reads.recv()
    future.set_running_or_notify_cancel()  # seen by the trainer through the shared byte alone
    os._exit(0)
(manager,) = [p for p in psutil.Process().children() if p.name() == "torch_shm_manager"]
futures = [MPFuture()]

began = pause()
futures += [MPFuture() for _ in range(40)]
assert time.monotonic() - began > 1.0, "there was nothing to wait for"
for index, future in enumerate(futures):
    future.set_result(index)
assert [future.result() for future in futures] == list(range(41))
assert len({future._shared_state_code.data_ptr() for future in futures}) == 41

shared = MPFuture()
began = pause()
trainer_writes.send(shared)
assert os.waitpid(child, 0)[1] == 0
assert time.monotonic() - began > 1.0, "there was nothing to wait for"
assert shared.running(), "the child has a byte of its own"
print("waited")
"""


def test_a_manager_that_stands_still_is_waited_for() -> None:
    done = subprocess.run([sys.executable, "-c", SCENE], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "waited"
