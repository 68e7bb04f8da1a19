"""Faults inside one peer: what it must not do to the others, and what it must say."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from swarm.checks import together
from swarm.harness import Swarm
from swarm.marks import HIVEMIND_ONLY
from swarm.spec import ENDLESS, PeerSpec

pytestmark = pytest.mark.swarm


@HIVEMIND_ONLY  # who is told to stop in a native round may still commit it, with those who are there
@pytest.mark.parametrize("group", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["process", "group"])
def test_a_peer_that_is_told_to_stop_in_a_round_makes_no_step_of_its_own(swarm: Swarm, group: bool) -> None:
    """The others would see an epoch that is not theirs, and take the state of a peer that leaves."""
    first = swarm.in_a_round_with_a_frozen_peer()
    epoch = first.said("RoundStarted")[-1]["epoch"]
    first.signal(signal.SIGTERM, group=group)  # with the group its DHT ends, too, and answers no more
    first.wait_exit(code=None, timeout_s=60)
    assert not first.said("exception", kind="EngineStuckError")
    assert first.said("PeerStopped")[0]["epoch"] == epoch
    assert max(event["epoch"] for event in first.said("EpochCommitted")) == epoch


def test_a_silent_dht_is_told_and_training_goes_on_when_it_answers_again(swarm: Swarm) -> None:
    first, second = swarm.start(2, trainer=ENDLESS, delay_s=0.05)
    first.wait_epoch(1)
    second.wait_epoch(1)
    dht = second.process("DHT")
    os.kill(dht, signal.SIGSTOP)
    if swarm.engine == "hivemind":
        second.wait_for("DhtSilent", timeout_s=60)
    else:  # who is connected needs no DHT
        rounds = len(second.said("EpochCommitted", contributors=2))
        second.wait_until(
            lambda: len(second.said("EpochCommitted", contributors=2)) >= rounds + 40, timeout_s=60, what="40 rounds"
        )
        told = "the DHT does not take or give peer records"
        second.wait_until(lambda: told in second.output, timeout_s=60, what=told)
    assert not second.said("raised")
    os.kill(dht, signal.SIGCONT)
    both = len(second.said("EpochCommitted", contributors=2))
    second.wait_until(
        lambda: len(second.said("EpochCommitted", contributors=2)) >= both + 2, timeout_s=90, what="rounds of two"
    )


@pytest.mark.above_engines
def test_a_dht_that_never_answers_at_the_start_is_an_error(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:dht_hangs"))
    error = peer.wait_for("raised", timeout_s=120)
    assert error["kind"] == "EngineStuckError", error["trace"]
    assert "the DHT's first answer" in error["text"]
    peer.wait_exit(code=1)


def test_the_wish_to_stop_travels_with_delayed_averaging_of_local_updates(swarm: Swarm) -> None:
    """The only round of such a peer ends after the commit that began it."""
    stopping = "[pl.callbacks.EarlyStopping('val_loss', patience=1)]"
    first, second = swarm.start(
        2,
        strategy={"use_local_updates": True, "delay_state_averaging": True},
        peers=[{"trainer_code": {"callbacks": stopping}, "model": {"monitor_values": [1.0, 1.0, 2.0, 3.0]}}, {}],
        trainer={"max_steps": -1, "val_check_interval": 3},
        delay_s=0.05,
    )
    swarm.finish()
    assert first.said("StopRequested", by_this_peer=True)
    assert second.said("StopRequested", by_this_peer=False)


def test_an_engine_that_fails_to_start_leaves_nothing(swarm: Swarm) -> None:
    """Processes and threads run already when the scheduler is made."""
    peer = swarm.launch(
        PeerSpec(
            strategy={"target_batch_size": 8, "offload_optimizer": True},
            strategy_code={"scheduler_fn": "lambda optimizer: 1 / 0"},
        )
    )
    assert peer.wait_for("raised", timeout_s=60)["kind"] == "ZeroDivisionError"
    peer.wait_exit(code=1)
    peer.assert_clean()


def test_a_late_client_among_clients_gets_the_state_from_the_helper_or_averages_with_nobody(swarm: Swarm) -> None:
    """All trainers are clients behind a helper: hivemind would let it average at another global step, for good."""
    swarm.start(1, together=False, strategy={"auxiliary": True}, trainer=ENDLESS)
    client: dict[str, Any] = {"client_mode": True}
    if swarm.engine == "hivemind":
        client["tracker_opts"] = {"metadata_expiration": 15.0}
    (first,) = swarm.start(1, together=False, strategy=client, trainer=ENDLESS, delay_s=0.1)
    first.wait_epoch(3)
    (late,) = swarm.start(1, together=False, strategy=client, trainer=ENDLESS, delay_s=0.1)
    if swarm.engine == "native":
        late.wait_until(lambda: bool(together([first, late])), timeout_s=60, what="both in one step")
        assert late.said("StateLoaded")
        return
    error = late.wait_for("raised", timeout_s=120)
    assert error["kind"] == "StateError", error["trace"]
    assert "must be reachable (not in client_mode)" in error["text"]
    assert not late.said("EpochCommitted")
