"""Whatever ends a peer, nothing of it is left: no process, no socket file, no listening port."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.network_process import PeerProcess, is_alive
from swarm.processes import Footprint, descendants, footprint, still_there

pytest.importorskip("hivemind")
pytestmark = pytest.mark.swarm

#: how long a test waits; on a busy machine everything takes several times as long
GONE_TIMEOUT_S = 30.0
#: what stopping may take, by the peer's own measure: its record 2 s, the network 5 s, its last process 1 s, and what a
#: busy machine adds
STOPPED_S = 10.0


class Scene:
    """A running peer and what it consisted of at the time."""

    def __init__(self, peer: PeerProcess) -> None:
        self.peer = peer
        self.up: dict[str, Any] = peer.wait_until_up()
        self.before: Footprint = footprint([self.peer.process.pid, *descendants(self.peer.process.pid)])
        assert len(self.up["daemon_pids"]) == 1
        assert {self.up["pid"], self.up["dht_pid"], *self.up["daemon_pids"]} <= set(self.before.processes)
        assert self.before.ports
        assert Path(self.up["directory"]).is_dir()

    @property
    def daemon(self) -> int:
        return int(self.up["daemon_pids"][0])

    def left(self) -> list[str]:
        found = [f"process {pid}: {command}" for pid, command in self.before.processes.items() if is_alive(pid)]
        with contextlib.suppress(FileNotFoundError):  # it may go while it is looked at
            found.append(f"directory {self.up['directory']}: {os.listdir(self.up['directory'])}")
        return found + still_there(self.before)

    def assert_gone(self, within_s: float = GONE_TIMEOUT_S) -> None:
        deadline = time.monotonic() + within_s
        while left := self.left():
            assert time.monotonic() < deadline, f"still there after {within_s} s: {left}"
            time.sleep(0.02)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with PeerProcess() as peer:
        yield Scene(peer)


def test_a_clean_stop_leaves_nothing_and_is_quick(scene: Scene) -> None:
    down = scene.peer.stop()
    scene.assert_gone()
    assert down["duration_s"] < STOPPED_S


def test_kill_of_the_trainer_leaves_nothing(scene: Scene) -> None:
    os.kill(scene.up["pid"], signal.SIGKILL)
    scene.peer.process.wait(GONE_TIMEOUT_S)
    scene.assert_gone()


def test_kill_of_the_trainer_while_it_speaks_to_its_dht_process_leaves_nothing(scene: Scene) -> None:
    """The DHT process fails on half a word, before it has seen that the trainer is gone."""
    scene.peer.tell("die")
    assert scene.peer.process.wait(GONE_TIMEOUT_S) == -signal.SIGKILL
    scene.assert_gone()


def test_kill_of_trainer_and_dht_process_at_once_leaves_no_process_and_no_port(scene: Scene) -> None:
    os.killpg(scene.up["pid"], signal.SIGKILL)
    scene.peer.process.wait(GONE_TIMEOUT_S)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := [pid for pid in scene.before.processes if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)
    assert not [item for item in still_there(scene.before) if "port" in item]
    # Nobody was left to remove the directory; the next peer does (tests/unit/network/test_sockets.py).
    for entry in Path(scene.up["directory"]).iterdir():
        entry.unlink()
    Path(scene.up["directory"]).rmdir()


def test_sigterm_of_a_trainer_without_a_handler_leaves_nothing(scene: Scene) -> None:
    os.kill(scene.up["pid"], signal.SIGTERM)
    assert scene.peer.process.wait(GONE_TIMEOUT_S) == -signal.SIGTERM
    scene.assert_gone()


def test_sigterm_of_the_whole_group_leaves_nothing(scene: Scene) -> None:
    os.killpg(scene.up["pid"], signal.SIGTERM)
    scene.peer.process.wait(GONE_TIMEOUT_S)
    scene.assert_gone()


def test_ctrl_c_stops_only_the_trainer_which_stops_the_rest(scene: Scene) -> None:
    os.kill(scene.up["dht_pid"], signal.SIGINT)
    scene.peer.wait_until_sees(scene.up["peer_id"])
    assert is_alive(scene.up["dht_pid"])
    assert os.getpgid(scene.daemon) != os.getpgid(scene.up["pid"]), "the daemon gets nothing from the terminal"
    os.killpg(scene.up["pid"], signal.SIGINT)
    scene.peer.process.wait(GONE_TIMEOUT_S)
    scene.assert_gone()


def test_kill_of_the_dht_process_takes_the_daemon_along(scene: Scene) -> None:
    os.kill(scene.up["dht_pid"], signal.SIGKILL)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while is_alive(scene.daemon):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert is_alive(scene.up["pid"])
    scene.peer.stop()
    scene.assert_gone()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_never_hits_torchs_shared_memory_manager(scene: Scene) -> None:
    """Should it be killed while it starts, torch waits for it for ever, holding the GIL."""
    (manager,) = scene.before.named("torch_shm_manager")
    status = Path(f"/proc/{manager}/status").read_text(encoding="ascii")
    blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), 16)
    assert blocked >> (signal.SIGINT - 1) & 1
    trainer = Path(f"/proc/{scene.up['pid']}/status").read_text(encoding="utf-8")
    assert "SigBlk:\t0000000000000000" in trainer, "the trainer itself still gets its signals"


@pytest.mark.parametrize("frozen", ["dht_pid", "daemon"])
def test_a_frozen_process_does_not_keep_a_peer_from_stopping(frozen: str, scene: Scene) -> None:
    os.kill(scene.daemon if frozen == "daemon" else scene.up["dht_pid"], signal.SIGSTOP)
    down = scene.peer.stop()
    scene.assert_gone()
    assert down["duration_s"] < STOPPED_S
