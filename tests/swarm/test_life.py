"""How a peer ends, and what its end means for the others."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from swarm.checks import assert_in_step, assert_ledger
from swarm.harness import PROMISED_S, QUICK, START_S, Peer, Swarm
from swarm.marks import ANY_ENGINE, HIVEMIND_ONLY
from swarm.models import FEATURES
from swarm.replay import distance, next_step
from swarm.spec import ENDLESS, PeerSpec

pytestmark = pytest.mark.swarm

AVERAGERS = [pytest.param("averager 0", marks=pytest.mark.thorough), "averager 1"]


def running(swarm: Swarm, **fields: object) -> Peer:
    """One peer in the middle of a fit that would never end."""
    (peer,) = swarm.start(1, together=False, trainer=ENDLESS, delay_s=0.02, **fields)
    peer.wait_epoch(1)
    return peer


def test_a_running_peer_has_what_the_leak_checks_look_for(swarm: Swarm) -> None:
    """Otherwise the tests below could not fail."""
    peer = running(swarm)
    now = peer.look()
    assert now.named("p2pd"), "no libp2p daemon"
    assert len(now.processes) >= 4, "trainer, DHT process, daemon and what watches them, or averagers"
    assert [port for port in now.ports if port[0].startswith("tcp")], "nobody listens"
    assert now.sockets, "no Unix socket of the daemon"


def left_in_time(peer: Peer) -> bool:
    return bool(peer.said("left")[0]["duration_s"] < PROMISED_S)


@pytest.mark.parametrize("group", [False, True], ids=["process", "process group"])
def test_ctrl_c_ends_the_peer_cleanly(swarm: Swarm, group: bool) -> None:
    """A terminal sends SIGINT to the whole group, ``kill -INT`` to the process."""
    peer = running(swarm)
    peer.signal(signal.SIGINT, group=group)
    peer.wait_exit(code=None)
    assert peer.said("PeerStopped")
    assert peer.exit_code != -signal.SIGKILL
    assert left_in_time(peer)


def test_sigterm_ends_the_peer_cleanly(swarm: Swarm) -> None:
    peer = running(swarm)
    peer.signal(signal.SIGTERM)
    peer.wait_exit(code=None)
    assert peer.said("PeerStopped")
    assert left_in_time(peer)


def test_ctrl_c_in_the_middle_of_a_round_ends_the_peer_as_quickly_as_promised(swarm: Swarm) -> None:
    """The round waits a minute for a frozen peer; Ctrl+C must not wait for the round, nor leaving for anything."""
    first = swarm.in_a_round_with_a_frozen_peer()
    first.signal(signal.SIGINT)
    first.wait_exit(code=None)
    assert first.said("PeerStopped")
    if swarm.engine == "hivemind":  # the native engine goes on without who is frozen
        assert len(first.said("EpochCommitted")) < len(first.said("RoundStarted")), "it waited for the round"
    assert left_in_time(first)


def test_an_exception_in_training_step_reaches_the_user_and_leaves_nothing(swarm: Swarm) -> None:
    (peer,) = swarm.start(1, together=False, model={"raise_at": [5]}, trainer=ENDLESS)
    error = peer.wait_for("raised")
    assert (error["kind"], error["text"]) == ("RuntimeError", "induced failure in batch 5")
    peer.wait_exit(code=1)
    assert left_in_time(peer)


def test_kill_9_of_the_trainer_leaves_nothing_behind(swarm: Swarm) -> None:
    peer = running(swarm)
    peer.kill()
    assert peer.seen.named("p2pd")
    peer.assert_clean()


def test_kill_9_in_the_middle_of_a_round_leaves_nothing_behind(swarm: Swarm) -> None:
    first, second = swarm.start(2, trainer=ENDLESS, delay_s=0.05)
    first.wait_epoch(1)
    second.freeze()
    swarm.wait_for_a_round(first)
    first.kill()
    first.assert_clean()


@pytest.mark.parametrize("part", ["daemon", "DHT", *AVERAGERS])
def test_a_peer_whose_own_process_is_killed_says_so_and_ends(swarm: Swarm, part: str) -> None:
    """It cannot go on; the others can."""
    if swarm.engine == "native" and "averager" in part:
        pytest.skip("the native engine averages in the trainer's own process")
    first, second = swarm.start(2, trainer=ENDLESS, delay_s=0.05)
    first.wait_epoch(1)
    second.wait_epoch(1)
    os.kill(second.process(part), signal.SIGKILL)
    error = second.wait_for("raised", timeout_s=30)
    assert error["kind"] == "DaemonError", error
    assert ("averager" if "averager" in part else "daemon") in error["text"]
    second.wait_exit(code=1)
    assert left_in_time(second)
    first.wait_epoch(max(first.commits) + 2, timeout_s=60)


@HIVEMIND_ONLY
@pytest.mark.parametrize("part", AVERAGERS)
def test_a_process_that_hangs_does_not_keep_the_peer_from_ending(swarm: Swarm, part: str) -> None:
    """The round never comes back, and hivemind's threads wait for it; the trainer must still end, with the error."""
    first, second = swarm.start(2, trainer=ENDLESS, strategy={"averaging_timeout": 4.0}, delay_s=0.05)
    first.wait_epoch(1)
    second.wait_epoch(1)
    os.kill(second.process(part), signal.SIGSTOP)
    # seconds of DHT calls that hang with it may come before, each with its own limit
    assert second.wait_for("raised", timeout_s=150)["kind"] == "EngineStuckError"
    second.wait_exit(code=1)


def test_the_process_keeps_its_own_signal_handlers(swarm: Swarm) -> None:
    """hivemind alone leaves SIGINT ignored in the process that used it."""
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:handlers"))
    result = peer.wait_for("handlers", timeout_s=START_S)
    assert result["before"] == result["after"]
    peer.wait_exit()


def test_a_survivor_goes_on_when_a_peer_is_killed_and_the_user_sees_it(swarm: Swarm) -> None:
    """Killed between rounds: the survivor's own gradient is the step; with hivemind a round waits in vain before."""
    first, second = swarm.start(2, trainer=ENDLESS, hold_at=[2], delay_s=0.05)
    for peer in (first, second):
        peer.wait_for("holding", epoch=2)
    second.kill()
    first.release(2)
    first.wait_epoch(4, timeout_s=90)
    if swarm.engine == "hivemind":
        (alone,) = first.said("RoundIncomplete", epoch=2, kind="gradients")
        assert (alone["fraction"], alone["contributors"], alone["expected"]) == (0.0, 1, 2)
        assert "own gradient" in alone["action"]
        assert "averaging gradients brought 0.0%" in first.output
    (event,) = first.said("EpochCommitted", epoch=3)
    assert event["contributors"] == 1
    limit_s = 2 * QUICK["averaging_timeout"] + QUICK["matchmaking_time"]
    assert event["duration_s"] < limit_s + 5, "longer than the commit's own deadline"
    for epoch in (3, 4):
        assert distance(first.parameters(epoch), next_step([first], epoch)) < 1e-6
    first.wait_for("PeersChanged", num_peers=1, timeout_s=90)
    assert_ledger([first])


@HIVEMIND_ONLY
def test_a_peer_that_is_killed_in_a_round_costs_one_incomplete_round(swarm: Swarm) -> None:
    """It dies when the group has formed and before it has sent its values to be averaged."""
    first, second = swarm.start(
        2,
        peers=[{}, {"strategy_code": {"grad_compression": "DiesInARound(spec.folder)"}}],
        trainer=ENDLESS,
        hold_at=[2],
        delay_s=0.05,
    )
    for peer in (first, second):
        peer.wait_for("holding", epoch=2)
    (second.folder / "die").touch()
    for peer in (first, second):
        peer.release(2)
    first.wait_epoch(3, timeout_s=90)
    assert second.exit_code == -signal.SIGKILL
    (lost,) = first.said("RoundIncomplete", epoch=2, kind="gradients")
    assert lost["fraction"] < 1.0, lost
    # what it may have got is the share that the other one averages; its own share is its own gradient
    own = np.isclose(first.parameters(3), next_step([first], 3), rtol=1e-5, atol=1e-6)
    first_layer = FEATURES * 16 + 16  # hivemind shares out whole tensors: this layer to the one, the rest to the other
    assert own[:first_layer].all() or own[first_layer:].all(), (lost, np.flatnonzero(~own).tolist())
    assert_ledger([first])


def test_a_peer_that_leaves_politely_is_not_waited_for(swarm: Swarm) -> None:
    """It takes its report back, so the next round does not look for it (for which it would have half a minute)."""
    slow = {"matchmaking_time": 20.0, "averaging_timeout": 60.0}
    stays, leaves = swarm.start(2, trainer={"max_steps": 4}, strategy=slow, hold_at=[2], delay_s=0.05)
    for peer in (stays, leaves):
        peer.wait_for("holding", epoch=2, timeout_s=90)
    leaves.signal(signal.SIGINT)
    leaves.wait_exit(code=None)
    stays.release(2)
    swarm.finish(stays)
    for epoch in (3, 4):
        (event,) = stays.said("EpochCommitted", epoch=epoch)
        assert event["contributors"] == 1
        assert event["duration_s"] < 10.0
    assert not [event for event in stays.said("RoundIncomplete") if event["epoch"] >= 2]


def test_a_frozen_peer_does_not_stop_the_others_and_catches_up(swarm: Swarm) -> None:
    first, second = swarm.start(2, trainer=ENDLESS, delay_s=0.05)
    first.wait_epoch(1)
    second.wait_epoch(1)
    second.freeze()
    at, loaded = max(first.commits), len(second.said("StateLoaded"))
    first.wait_epoch(at + 3, timeout_s=90)
    target = max(first.commits)
    second.thaw()
    second.wait_until(lambda: len(second.said("StateLoaded")) > loaded, timeout_s=90, what=f"catches up to {target}")
    second.wait_until(
        lambda: any(event["epoch"] > target for event in second.said("EpochCommitted", contributors=2)),
        timeout_s=90,
        what="both in one step again",
    )
    assert_starts_empty(second)
    assert_ledger([first, second])


def assert_starts_empty(peer: Peer) -> None:
    """Before the first batch on the state that it has loaded last: each earlier sample is in a step, or told as lost.

    (With engine="hivemind" so is the batch in which it found that it was behind, and which it did not accumulate.)
    """
    at = peer.records.index(peer.said("StateLoaded")[-1])
    at += [record["event"] for record in peer.records[at:]].index("BatchAccumulated")
    counts = {"BatchAccumulated": "batch_samples", "EpochCommitted": "samples", "RoundMissed": "samples_lost"}
    of = {name: sum(r[field] for r in peer.records[:at] if r["event"] == name) for name, field in counts.items()}
    assert of["BatchAccumulated"] <= of["EpochCommitted"] + of["RoundMissed"], of


def test_nothing_but_nan_ends_the_training_with_the_reason(swarm: Swarm) -> None:
    """200 in a row: a good batch starts the count anew, so the 199 before it do not count."""
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16},
        model={"nan_at": [*range(199), *range(200, 1000)]},
        trainer=ENDLESS,
    )
    error = peer.wait_for("raised", timeout_s=90)
    assert error["kind"] == "NonFiniteGradientsError", error["trace"]
    assert "200 batches in a row" in error["text"]
    assert len(peer.said("BatchDropped")) == 199 + 199
    assert len(peer.said("BatchAccumulated", batch_samples=8)) == 1
    assert not peer.said("EpochCommitted")
    peer.wait_exit(code=1)


@HIVEMIND_ONLY
def test_a_peer_left_behind_goes_on_when_the_one_ahead_is_killed(swarm: Swarm) -> None:
    """Its last report outlives it, and nobody has the state of that epoch any more."""
    strategy = {"tracker_opts": {"metadata_expiration": 30.0}}
    first, second = swarm.start(2, peers=[{}, {"hold_at": [2]}], trainer=ENDLESS, strategy=strategy, delay_s=0.05)
    second.wait_for("holding", epoch=2)
    first.wait_epoch(4, timeout_s=60)
    first.kill()
    second.release(2)
    second.wait_for("StateUnavailable", timeout_s=60)
    second.wait_epoch(max(second.commits) + 2, timeout_s=90)
    assert_ledger([second])


def test_a_late_joiner_takes_state_and_learning_rate_and_trains_along(swarm: Swarm) -> None:
    model = {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential", "norm": True}
    (first,) = swarm.start(1, together=False, model=model, hold_at=[5], trainer={"max_steps": 8}, delay_s=0.05)
    first.wait_for("holding", epoch=5)
    (late,) = swarm.start(1, together=False, model={**model, "seed": 9}, trainer={"max_steps": 8}, delay_s=0.05)
    late.wait_for("StateLoaded", epoch=5, timeout_s=START_S)
    joined = late.wait_epoch(5)
    assert joined.digest == first.commits[5].digest
    assert joined.lr == first.commits[5].lr == pytest.approx(0.01 * 0.9**5)
    assert joined.global_step == 5
    late.wait_for("BatchAccumulated")
    first.release(5)
    swarm.finish()
    assert first.commits[8].lr == late.commits[8].lr
    assert_in_step([first, late], [8])
    assert_ledger([first, late])
    assert any(event["contributors"] == 2 for event in late.said("EpochCommitted"))


def test_a_joiner_that_gets_no_state_ends_with_the_reason(swarm: Swarm) -> None:
    """No state arrives within a millisecond."""
    (first,) = swarm.start(1, together=False, trainer=ENDLESS, hold_at=[1], delay_s=0.05)
    first.wait_for("holding", epoch=1)
    late = swarm.launch(PeerSpec(strategy={"initial_peers": swarm.addresses(), "load_state_timeout": 0.001}))
    error = late.wait_for("raised", timeout_s=90)
    assert error["kind"] == "StateError", error["trace"]
    assert "load_state_timeout" in error["text"]
    told = late.said("StateUnavailable", action="trying again")
    if swarm.engine == "hivemind":
        assert len(told) == 4
        assert all("load_state_timeout" in event["reason"] for event in told)
    assert told
    assert not late.said("BatchAccumulated")
    late.wait_exit(code=1)


def test_fit_can_be_called_twice_in_one_process(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:fit_twice"))
    assert peer.wait_for("second", timeout_s=START_S)["global_step"] == 1
    peer.wait_exit()


@ANY_ENGINE
def test_asking_for_the_dht_starts_it_and_its_process_ends_with_the_script(swarm: Swarm) -> None:
    """Scripts read ``strategy.dht.get_visible_maddrs()`` right after construction; some validate, some never fit."""
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:only_dht"))
    addresses = peer.wait_for("addresses", timeout_s=START_S)["addresses"]
    assert addresses
    assert all("/p2p/" in address for address in addresses)
    assert peer.wait_for("validated", timeout_s=START_S)["addresses"] == addresses
    peer.wait_exit()
