"""The harness itself: what it promises to the tests must be true, or their passing means nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from swarm.harness import PeerFailed, Swarm
from swarm.marks import ANY_ENGINE
from swarm.processes import descendants, state_of, wait_until
from swarm.spec import PeerSpec

pytestmark = pytest.mark.swarm


@ANY_ENGINE
def test_a_plain_run_leaves_a_record_of_every_step(swarm: Swarm) -> None:
    peer = swarm.plain(trainer={"max_steps": 3}, batch_size=4)
    assert sorted(peer.commits) == [0, 1, 2, 3]
    assert len({commit.digest for commit in peer.commits.values()}) == 4
    assert [len(peer.commits[step].indices) for step in (1, 2, 3)] == [4, 4, 4]


@ANY_ENGINE
def test_two_runs_of_one_seed_are_bitwise_equal(swarm: Swarm) -> None:
    first, second = (swarm.plain(trainer={"max_steps": 3}, model={"optimizer": "adamw"}) for _ in range(2))
    assert [c.digest for c in first.commits.values()] == [c.digest for c in second.commits.values()]


@ANY_ENGINE
def test_a_peer_that_ends_while_it_is_waited_for_fails_the_test_at_once(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(strategy=None, model={"raise_at": [1]}))
    start = time.monotonic()
    with pytest.raises(PeerFailed, match="ended with 1 before"):
        peer.wait_epoch(3, timeout_s=60)
    assert time.monotonic() - start < 30
    assert "induced failure in batch 1" in peer.output


@ANY_ENGINE
def test_a_deadline_ends_a_wait_and_shows_where_the_peer_is(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(strategy=None, hold_at=[2]))
    peer.wait_for("holding", epoch=2)
    with pytest.raises(PeerFailed, match="still not: epoch 3"):
        peer.wait_epoch(3, timeout_s=0.1)
    assert "on_train_batch_end" in peer.output
    peer.release(2)
    swarm.finish(peer)


@ANY_ENGINE
def test_faults_really_happen(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(strategy=None, delay_s=0.02, trainer={"max_steps": -1, "max_epochs": -1}))
    peer.wait_epoch(1)
    peer.freeze()
    steps = max(peer.commits)
    assert state_of(peer.pid) == "T"
    time.sleep(0.3)  # the one place where time itself is the point: a frozen peer does nothing with it
    assert max(peer.commits) == steps
    peer.thaw()
    peer.wait_epoch(steps + 1)
    peer.kill()
    assert peer.exit_code == -signal.SIGKILL


@ANY_ENGINE
def test_a_detached_grandchild_is_found_and_ended(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(strategy=None, scenario="swarm.scenarios:leak"))
    wait_until(lambda: peer.exit_code == 0, timeout_s=20, what="the leaking peer ends")
    (left,) = descendants(peer.supervisor)
    with pytest.raises(PeerFailed, match=r"left behind .*sleep"):
        peer.assert_clean(timeout_s=0.5)
    peer.close()
    wait_until(lambda: state_of(left) in ("", "Z"), timeout_s=10, what="the grandchild is dead")
    swarm.peers.remove(peer)  # its leak is what was asked for


@ANY_ENGINE
def test_a_port_that_stays_open_is_reported(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(strategy=None, scenario="swarm.scenarios:listen"))
    port = peer.wait_for("listening")["port"]
    assert ("tcp", port) in peer.look().ports
    with pytest.raises(PeerFailed, match=f"tcp port {port}"):
        peer.assert_clean(timeout_s=0.3)
    (peer.folder / "go").touch()
    peer.wait_exit()


def test_peers_end_when_the_test_process_dies(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("orphans")
    code = (
        "import sys; from pathlib import Path; from swarm.harness import *; from swarm.spec import PeerSpec\n"
        f"swarm = Swarm(Zygotes(), engine='hivemind', folder=Path({str(folder)!r}))\n"
        "peer = swarm.launch(PeerSpec(strategy=None, scenario='swarm.scenarios:sleep'))\n"
        "print(peer.pid, peer.supervisor, flush=True); sys.stdin.read()"
    )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here
    )
    try:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert all(state_of(pid) for pid in pids)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(state_of(pid) for pid in pids), timeout_s=15, what="the peer ends")
