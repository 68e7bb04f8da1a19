"""The native engine in real peers: what it promises beyond hivemind's. (The others run on it, too.)"""

from __future__ import annotations

import signal
from itertools import pairwise
from statistics import median

import pytest

from swarm.checks import assert_complete, assert_in_step, assert_ledger, together
from swarm.harness import QUICK, START_S, Peer, Swarm
from swarm.replay import distance, next_step, replay
from swarm.spec import ENDLESS, PeerSpec

pytestmark = pytest.mark.swarm


@pytest.fixture
def engine() -> str:
    return "native"


def digests(swarm_peers: list, epoch: int) -> set[str]:  # type: ignore[type-arg]
    return {peer.commits[epoch].digest for peer in swarm_peers}


def test_peers_are_bit_identical_and_equal_one_process(swarm: Swarm) -> None:
    steps = 20
    peers = swarm.start(
        3, model={"optimizer": "adamw", "lr": 0.01, "norm": True}, trainer={"max_steps": steps}, delay_s=0.02
    )
    swarm.finish()
    assert_complete(peers, range(1, steps + 1))
    assert_ledger(peers)
    assert_in_step(peers, range(1, steps + 1))
    for peer in peers:
        assert [one["epoch"] for one in peer.said("step")] == list(range(1, steps + 1)), "buffers were compared, too"
        assert "in the clear" not in peer.output


def test_no_step_is_made_before_as_many_peers_are_there_as_were_asked_for(swarm: Swarm) -> None:
    waits = {"strategy": {"averager_opts": {"min_group_size": 2}}, "trainer": {"max_steps": 3}, "delay_s": 0.02}
    (first,) = swarm.start(1, together=False, **waits)
    first.wait_for("Waiting", timeout_s=60)
    (second,) = swarm.start(1, together=False, **waits)
    swarm.finish()
    steps = first.said("EpochCommitted")
    assert steps[0]["time"] > second.said("PeerStarted")[0]["time"]
    assert [one["contributors"] for one in steps[1:]] == [2, 2], "(in the first it may be a member without samples)"
    assert_ledger([first, second])


def test_without_compression_two_peers_are_one_process_with_the_samples_of_both(swarm: Swarm) -> None:
    steps = 20
    peers = swarm.start(2, model={"optimizer": "momentum"}, trainer={"max_steps": steps}, delay_s=0.02)
    swarm.finish()
    assert distance(peers[0].parameters(steps), replay(peers, steps)[steps]) < 1e-5


@pytest.mark.parametrize(
    "codec",
    [
        "Float16Compression()",
        "Uniform8BitQuantization()",
        "Quantile8BitQuantization()",
        "ours.BFloat16Compression()",
        "SizeAdaptiveCompression(threshold=99, less=Float16Compression(), greater_equal=Uniform8BitQuantization())",
        "ours.Blockwise4BitQuantization()",
        "ours.TopKCompression(share=1/8)",
    ],
)
def test_with_compression_peers_are_still_bit_identical(swarm: Swarm, codec: str) -> None:
    peers = swarm.start(2, strategy_code={"grad_compression": codec}, trainer={"max_steps": 5}, delay_s=0.02)
    swarm.finish()
    assert_complete(peers, range(1, 6))
    assert_in_step(peers, range(1, 6))
    assert 1e-7 < distance(peers[0].parameters(1), replay(peers, 1)[1]) < 1e-2


def test_in_a_network_of_one_s_own_peers_may_send_in_the_clear(swarm: Swarm) -> None:
    peers = swarm.start(2, strategy={"insecure_lan": True}, trainer={"max_steps": 4}, delay_s=0.02)
    swarm.finish()
    assert_complete(peers, range(1, 5))
    assert all("insecure_lan=True: gradients and states are sent in the clear" in peer.output for peer in peers)


def test_who_encrypts_does_not_train_with_who_does_not(swarm: Swarm) -> None:
    (founder,) = swarm.start(1, together=False, hold_at=[1])
    founder.wait_for("holding")
    other = swarm.launch(PeerSpec(strategy={"initial_peers": swarm.addresses(), "insecure_lan": True}))
    error = other.wait_for("raised", timeout_s=START_S)
    assert error["kind"] == "SchemaMismatchError", error["trace"]
    assert "in the clear" in error["text"]
    other.wait_exit(code=1)


def test_a_killed_peer_costs_the_others_no_step_and_no_sample(swarm: Swarm) -> None:
    first, second, third = swarm.start(3, model={"norm": True}, trainer=ENDLESS, delay_s=0.05)
    for peer in (first, second, third):
        peer.wait_epoch(3)
    third.kill()
    for peer in (first, second):
        peer.wait_epoch(max(peer.commits) + 5, timeout_s=60)
    assert_in_step([first, second], [min(max(first.commits), max(second.commits))])
    assert not first.said("RoundMissed")
    assert not second.said("RoundMissed")
    assert_ledger([first, second])


@pytest.mark.parametrize("part", ["encode", "decode"])
def test_a_codec_that_fails_is_an_error_that_the_user_sees_and_the_others_go_on(swarm: Swarm, part: str) -> None:
    common = {"strategy_code": {"grad_compression": "Float16Compression()"}, "trainer": ENDLESS, "delay_s": 0.05}
    first, second = swarm.start(2, **common)
    (victim,) = swarm.start(1, together=False, scenario=f"swarm.faults:cannot_{part}", **common)
    victim.wait_epoch(max(first.commits) + 3, timeout_s=60)
    (victim.folder / "fail").touch()
    error = victim.wait_for("raised", timeout_s=90)
    assert error["kind"] == "SwarmError", error["trace"]
    assert "this peer's part in a round failed 3 times in a row" in error["text"]
    assert f"ValueError: induced: cannot {part}" in error["text"]
    assert victim.said("RoundIncomplete", kind="gradients"), "each attempt is told"
    victim.wait_exit(code=1)
    for peer in (first, second):
        peer.wait_epoch(max(peer.commits) + 3, timeout_s=60)
    last = min(max(first.commits), max(second.commits))
    assert len(digests([first, second], last)) == 1
    assert_ledger([first, second])


def test_a_peer_that_is_told_to_stop_in_a_round_makes_no_step_of_its_own(swarm: Swarm) -> None:
    """The round waits for a peer that is frozen until it is given up, and the signal comes before that."""
    first, second = swarm.start(2, trainer=ENDLESS, delay_s=0.05)
    first.wait_epoch(2)
    second.freeze()
    rounds = len(first.said("RoundStarted"))
    first.wait_until(lambda: len(first.said("RoundStarted")) > rounds, timeout_s=60, what="a round")
    first.signal(signal.SIGTERM)
    first.wait_exit(code=None, timeout_s=60)
    stopped = first.said("PeerStopped")[0]["epoch"]
    assert max(event["epoch"] for event in first.said("EpochCommitted")) == stopped
    assert not first.said("exception", kind="EngineStuckError")
    assert_ledger([first])


def test_a_frozen_peer_is_left_behind_and_catches_up(swarm: Swarm) -> None:
    first, second = swarm.start(2, trainer=ENDLESS, delay_s=0.05)
    first.wait_epoch(2)
    second.freeze()
    first.wait_epoch(max(first.commits) + 3, timeout_s=60)
    at = max(first.commits)
    second.thaw()
    second.wait_until(lambda: max(second.commits) > at, timeout_s=60, what=f"is beyond epoch {at}")
    second.wait_until(
        lambda: any(epoch > at for epoch in together([first, second])), timeout_s=60, what="both in one step again"
    )
    epoch = max(together([first, second]))
    for peer in (first, second):
        peer.wait_epoch(epoch)
    assert len(digests([first, second], epoch)) == 1


@pytest.mark.parametrize("low_rank", [False, True], ids=["whole", "PowerSGD"])
def test_a_late_joiner_takes_the_state_of_a_running_swarm_and_trains_along(swarm: Swarm, low_rank: bool) -> None:
    common = {
        "model": {"optimizer": "adamw", "lr": 0.01, "norm": True, "width": 32},
        "trainer": ENDLESS,
        "delay_s": 0.05,
        "strategy_code": {"grad_averager_factory": "partial(PowerSGDGradientAverager, averager_rank=2)"}
        if low_rank
        else {},
    }
    first, second = swarm.start(2, **common)
    first.wait_epoch(5)
    (late,) = swarm.start(1, together=False, **common)
    late.wait_for("StateLoaded", timeout_s=60)
    peers = [first, second, late]
    late.wait_until(lambda: bool(together(peers)), timeout_s=60, what="all three in one step")
    epoch = max(together(peers))
    for peer in peers:
        peer.wait_epoch(epoch)
    assert len(digests(peers, epoch)) == 1


def test_when_the_only_one_with_the_state_dies_those_who_wait_for_it_go_on_together(swarm: Swarm) -> None:
    (first,) = swarm.start(1, together=False, scenario="swarm.scenarios:gives_no_state", trainer=ENDLESS, delay_s=0.05)
    first.wait_epoch(2)
    through = {**QUICK, "initial_peers": swarm.addresses()}
    joiners = [
        swarm.launch(PeerSpec(order_seed=seed, strategy=through, trainer=ENDLESS, delay_s=0.05)) for seed in (1, 2)
    ]
    for peer in joiners:
        peer.wait_for("StateUnavailable", timeout_s=60)
    first.kill()
    for peer in joiners:
        peer.wait_for("SwarmReady", timeout_s=90)
    joiners[0].wait_until(lambda: bool(together(joiners)), timeout_s=60, what="both in one step")
    epoch = max(together(joiners))
    for peer in joiners:
        peer.wait_epoch(epoch)
    assert len(digests(joiners, epoch)) == 1


def gave(peer: Peer) -> list[int]:
    """Epochs to which it has contributed samples."""
    return [event["epoch"] for event in peer.said("EpochCommitted") if event["samples"]]


def test_a_slow_peer_is_not_waited_for_and_still_contributes(swarm: Swarm) -> None:
    *_, slow = swarm.start(
        3, peers=[{}, {}, {"delay_s": 1.0, "delay_from_batch": 3}], trainer=ENDLESS, delay_s=0.02,
        strategy={"target_batch_size": 64, "max_staleness": 30},
    )  # fmt: skip
    slow.wait_until(lambda: len(slow.said("BatchAccumulated")) >= 10, timeout_s=90, what="it is known to be slow")
    before = len(gave(slow))
    slow.wait_until(lambda: len(gave(slow)) >= before + 7, timeout_s=90, what="it gives")
    # in steps, one for each of its batches if these are waited for, and ten else; fewer on a busy machine
    apart = [later - sooner for sooner, later in pairwise(gave(slow)[before - 1 :])]
    assert median(apart) >= 2, f"the others waited for most of its batches: {apart}"


def test_a_peer_alone_is_a_plain_trainer(swarm: Swarm) -> None:
    (peer,) = swarm.start(1, together=False, strategy={"target_batch_size": 16}, trainer={"max_steps": 4})
    swarm.finish()
    for epoch in range(1, 5):
        assert distance(peer.parameters(epoch), next_step([peer], epoch)) < 1e-7


def test_a_peer_whose_parameters_were_changed_takes_the_others(swarm: Swarm) -> None:
    """By a callback, say; within ``average_state_every`` steps, and the seconds that records take."""
    peers = swarm.start(
        3,
        peers=[{}, {"free": {"move_parameters": 1e-3}}, {}],
        strategy={"average_state_every": 5},
        trainer=ENDLESS,
        delay_s=0.05,
    )
    changed = peers[1]
    event = changed.wait_for("ParametersDiffered", timeout_s=60)
    assert (event["num_peers"], "same kind" in event["reason"]) == (2, True)
    changed.wait_until(
        lambda: any(one["time"] > event["time"] for one in changed.said("StateLoaded")),
        timeout_s=60,
        what="their state",
    )
    at = max(changed.commits)
    changed.wait_until(lambda: any(epoch > at for epoch in together(peers)), timeout_s=60, what="all in one step again")
    epoch = max(together(peers))
    for peer in peers:
        peer.wait_epoch(epoch)
    assert len(digests(peers, epoch)) == 1
    assert not peers[0].said("ParametersDiffered")
    assert not peers[2].said("ParametersDiffered")


def test_unlike_hardware_is_told_and_takes_a_state_at_comparisons_only(swarm: Swarm) -> None:
    every, unlike = 10, {"free": {"threads": 2, "rounds_unlike": True}}
    peers = swarm.start(
        3, peers=[{}, unlike, {}], strategy={"average_state_every": every}, trainer=ENDLESS, delay_s=0.05
    )
    other = peers[1]
    at_start = len(other.said("StateLoaded"))
    other.wait_until(lambda: len(other.said("ParametersDiffered")) >= 2, timeout_s=120, what="two comparisons")
    loaded = other.said("StateLoaded")[at_start:]
    told, missed = other.said("ParametersDiffered"), other.said("RoundMissed")
    assert all("another kind" in one["reason"] for one in told)
    assert len(loaded) <= len(told) + min(2, len(missed)), "it takes states between comparisons, too"
    assert all(one["epoch"] % every == 0 for one in told)
    for peer in (peers[0], peers[2]):
        assert not peer.said("ParametersDiffered")
    epoch = max(other.commits)
    other.wait_until(lambda: any(one > epoch for one in together(peers)), timeout_s=60, what="all in one step again")


@pytest.mark.parametrize("client_mode", [False, True])
def test_a_helper_that_is_left_alone_helps_who_comes_next(swarm: Swarm, client_mode: bool) -> None:
    """The state of where it stands has gone with the last trainer: it must not call others there for ever."""
    (helper,) = swarm.start(1, together=False, strategy={"auxiliary": True}, trainer=ENDLESS)
    runs = {"strategy": {"client_mode": client_mode}, "delay_s": 0.05}
    (first,) = swarm.start(1, together=False, trainer={"max_steps": 3}, **runs)
    swarm.finish(first)
    before = len(helper.said("EpochCommitted"))
    assert before
    (second,) = swarm.start(1, together=False, trainer=ENDLESS, **runs)
    second.wait_epoch(3, timeout_s=90)  # alone, if the helper is not there yet
    helper.wait_until(lambda: len(helper.said("EpochCommitted")) >= before + 3, timeout_s=90, what="its help")
    assert second.commits[3].samples
