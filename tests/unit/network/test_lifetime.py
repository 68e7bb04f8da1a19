"""A settled child: deaf to Ctrl+C, stopped by SIGTERM, gone with its parent; the parent's own handlers untouched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lightning_hivemind.network.lifetime import die_with_parent

TIMEOUT_S = 10.0

# A parent with handlers of its own, like a Trainer; its child settles, says its pid, and reports signals to a file.
PARENT = """
import os, signal, sys, time, multiprocessing, pathlib
from lightning_hivemind.network.lifetime import settle_child
note = pathlib.Path(sys.argv[1])

def handler(number, frame):
    with open(note, "a") as file:
        file.write(f"handled {number} in {os.getpid()}\\n")

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, handler)
parent = os.getpid()
ready, told = os.pipe()
child = os.fork()
if child == 0:
    settle_child(parent, cleanup=lambda: (note.parent / "cleaned").touch())
    os.write(told, b"x")
    while True:
        time.sleep(0.05)
os.read(ready, 1)
print(child, flush=True)
while True:
    time.sleep(0.05)
"""


class Family:
    def __init__(self, folder: Path) -> None:
        self.note = folder / "note"
        self.cleaned = folder / "cleaned"
        self.note.touch()
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(self.note)], stdout=subprocess.PIPE, text=True
        )
        assert self.parent.stdout is not None
        self.child = int(self.parent.stdout.readline())

    def close(self) -> None:
        for pid in (self.parent.pid, self.child):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.parent.communicate()


def alive(pid: int) -> bool:
    """False for a zombie, too."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    one = Family(tmp_path)
    yield one
    one.close()


def test_a_child_ends_and_cleans_up_when_its_parent_is_killed(family: Family) -> None:
    family.parent.kill()
    family.parent.wait()
    wait_until(lambda: not alive(family.child))
    assert family.cleaned.exists()


def test_a_child_outlives_what_the_terminal_sends_and_ends_by_sigterm(family: Family) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(family.child, number)
    os.kill(family.parent.pid, signal.SIGUSR1)  # delivered after those of the child were
    wait_until(lambda: family.note.read_text() != "")
    assert family.note.read_text() == f"handled {int(signal.SIGUSR1)} in {family.parent.pid}\n"
    assert alive(family.child)
    os.kill(family.child, signal.SIGTERM)
    wait_until(lambda: not alive(family.child))
    assert not family.cleaned.exists(), "cleaning up is for the death of the parent only"
    assert str(family.child) not in family.note.read_text()


def test_the_parents_handlers_stay(family: Family) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(family.parent.pid, number)
        wait_until(lambda number=number: f"handled {int(number)} in {family.parent.pid}\n" in family.note.read_text())  # type: ignore[misc]
    assert alive(family.child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has PR_SET_PDEATHSIG")
def test_a_bound_process_is_killed_with_the_one_that_started_it() -> None:
    code = (
        "import subprocess, sys, time; from lightning_hivemind.network.lifetime import die_with_parent;"
        "p = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent()); print(p.pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    bound = int(starter.stdout.readline())
    assert alive(bound)
    starter.kill()
    starter.communicate()
    wait_until(lambda: not alive(bound))


def test_die_with_parent_is_left_out_where_it_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert die_with_parent() is None
