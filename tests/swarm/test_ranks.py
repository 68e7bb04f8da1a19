"""Peers of several processes: DDP inside of a peer, alone and together with peers of one process."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from swarm.checks import assert_in_step, assert_one_process
from swarm.harness import Peer, Swarm
from swarm.spec import ENDLESS

pytestmark = pytest.mark.swarm
STEPS = 50
DDP: dict[str, Any] = {"ranks": 2}


@pytest.fixture
def engine() -> str:
    return "native"


def assert_ranks_equal(peer: Peer, steps: list[int]) -> None:
    """All ranks of a peer have the same parameters, to the last bit. (Buffers: with DDP's next batch.)"""
    other = peer.of_rank(1)
    for step in steps:
        assert peer.commits[step].digest == other.commits[step].digest, f"ranks differ at step {step}"


@pytest.mark.parametrize(
    "local_strategy",
    [
        "'auto'",
        "'ddp'",
        "pl.strategies.DDPStrategy(static_graph=True, gradient_as_bucket_view=True)",
        "pl.strategies.DDPStrategy(find_unused_parameters=True)",
    ],
)
def test_ddp_in_a_swarm_of_one_is_ddp_bit_for_bit(swarm: Swarm, local_strategy: str) -> None:
    common: dict[str, Any] = {
        "ranks": 2,
        "env": {"PL_GLOBAL_SEED": "7"},  # as seed_everything(7) does: else each peer has an order of its own
        "model": {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential", "norm": True},
        "batch_size": 8,
        "trainer": {"max_steps": STEPS},
    }
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16},
        strategy_code={"local_strategy": local_strategy},
        **common,
    )
    theirs = local_strategy.replace("'auto'", "'ddp'")
    plain = swarm.plain(trainer_code={"strategy": theirs}, **common)
    swarm.finish()
    assert sorted(peer.commits) == sorted(plain.commits) == list(range(STEPS + 1))
    for ours, one in ((peer, plain), (peer.of_rank(1), plain.of_rank(1))):
        different = [step for step in range(STEPS + 1) if ours.commits[step].digest != one.commits[step].digest]
        assert not different, f"first different step: {different[0]}"
        assert [c.lr for c in ours.commits.values()] == [c.lr for c in one.commits.values()]


@pytest.mark.parametrize("options", ["fp16", "power_sgd", "fp16_power_sgd", "post_local_sgd"])
def test_communication_hooks_work_on_cpus_too(swarm: Swarm, options: str) -> None:
    """As DDP with that hook alone; post-local SGD, which lets ranks step apart, as DDP without one."""
    common: dict[str, Any] = {
        "ranks": 2,
        "env": {"PL_GLOBAL_SEED": "7"},
        "model": {"optimizer": "adamw", "lr": 0.01, "width": 64},
        "trainer": {"max_steps": 20},
    }
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16},
        strategy_code={"local_strategy": f"hooked(pl.strategies.DDPStrategy, {options!r})"},
        **common,
    )
    theirs = "'ddp'" if options == "post_local_sgd" else f"hooked(OnCpus, {options!r})"
    plain = swarm.plain(trainer_code={"strategy": theirs}, **common)
    swarm.finish()
    without = swarm.plain(trainer_code={"strategy": "'ddp'"}, **common)
    ours, same, unlike = (one.commits[20].digest for one in (peer, plain, without))
    assert ours == same
    assert (ours == unlike) is (options == "post_local_sgd")
    assert_ranks_equal(peer, list(range(21)))


def test_ddp_and_a_peer_of_one_process_are_one_process_with_the_samples_of_all(swarm: Swarm) -> None:
    """The last batches of a pass are smaller, and unlike on the ranks: samples count, not batches."""
    peers = swarm.start(
        2,
        peers=[{**DDP, "data_samples": 4091}, {"delay_s": 0.01, "data_samples": 4091}],
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": STEPS},
    )
    swarm.finish(timeout_s=150)
    assert_one_process(peers, STEPS)
    steps = common_steps(peers[0])
    assert len(steps) > STEPS // 2
    assert_ranks_equal(peers[0], steps)


def common_steps(peer: Peer) -> list[int]:
    """Of two steps between two batches, only rank 0 tells the first one."""
    return sorted(peer.commits.keys() & peer.of_rank(1).commits.keys())


@pytest.mark.parametrize(
    "strategy",
    [
        {"offload_optimizer": True},
        {"delay_state_averaging": True, "delay_optimizer_step": True},
        {"delay_state_averaging": True, "delay_grad_averaging": True},
        {"use_local_updates": True},
        {"use_local_updates": True, "average_opt_statistics": ["exp_avg", "exp_avg_sq"]},
    ],
    ids=["offload", "delayed step", "delayed averaging", "local updates", "local updates and moments"],
)
def test_ranks_stay_equal_in_every_way_to_step(swarm: Swarm, strategy: dict[str, Any]) -> None:
    peers = swarm.start(
        2,
        peers=[DDP, {"delay_s": 0.01}],
        strategy=strategy,
        model={"optimizer": "adamw", "lr": 0.01, "norm": True},
        trainer={"max_steps": 12},
    )
    swarm.finish(timeout_s=120)
    steps = common_steps(peers[0])
    assert len(steps) >= 6
    assert_ranks_equal(peers[0], steps)
    ends = [one.said("finished")[0] for one in (peers[0], peers[0].of_rank(1))]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 12


@pytest.mark.parametrize("joiner_has_ranks", [True, False])
def test_who_joins_has_the_whole_state_on_every_rank(swarm: Swarm, joiner_has_ranks: bool) -> None:
    """Parameters, moments, buffers, and the place of the scheduler."""
    common: dict[str, Any] = {
        "model": {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential", "norm": True},
        "trainer": {"max_steps": 80},
        "together": False,
        "delay_s": 0.05,
    }
    (first,) = swarm.start(1, **common, **({} if joiner_has_ranks else DDP))
    first.wait_epoch(5)
    (second,) = swarm.start(1, **{**common, "order_seed": 1}, **(DDP if joiner_has_ranks else {}))
    swarm.finish(timeout_s=120)
    ranks, other = (second, first) if joiner_has_ranks else (first, second)
    assert second.said("StateLoaded")
    steps = sorted(set(common_steps(ranks)) & other.commits.keys())
    assert len(steps) > 10
    assert_ranks_equal(ranks, steps)
    assert_in_step([ranks, other], steps)
    for step in steps:
        assert ranks.of_rank(1).commits[step].lr == ranks.commits[step].lr == other.commits[step].lr


def test_a_checkpoint_of_ranks_continues_them_and_a_peer_of_one_process(swarm: Swarm) -> None:
    saved = str(swarm.folder / "half.ckpt")
    common: dict[str, Any] = {
        "model": {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential"},
        "strategy": {"target_batch_size": 16},
        "together": False,
        "env": {"PL_GLOBAL_SEED": "7"},
    }
    (half,) = swarm.start(1, trainer={"max_steps": 4}, free={"save_to": saved}, **DDP, **common)
    swarm.finish(half)
    (rest,) = swarm.start(1, trainer={"max_steps": 8}, ckpt_path=saved, **DDP, **common)
    swarm.finish(rest)
    (alone,) = swarm.start(1, trainer={"max_steps": 6}, ckpt_path=saved, **common)
    swarm.finish(alone)
    assert sorted(rest.commits) == [4, 5, 6, 7, 8]
    assert rest.commits[4].digest == alone.commits[4].digest == half.commits[4].digest
    assert_ranks_equal(rest, [4, 5, 6, 7, 8])


@pytest.mark.parametrize("offload", [False, True])
def test_hooks_before_a_step_may_wait_for_all_ranks(swarm: Swarm, offload: bool) -> None:
    """``self.log(..., sync_dist=True)`` of the averaged gradient's norm, which all ranks have."""
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16, "offload_optimizer": offload},
        model={"log_gradient_norm": True},
        trainer={"max_steps": 6},
        **DDP,
    )
    swarm.finish(timeout_s=60)
    norms = [one.said("finished")[0]["metrics"]["gradient_norm"] for one in (peer, peer.of_rank(1))]
    assert norms[0] == norms[1] > 0
    assert_ranks_equal(peer, common_steps(peer))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_one_rank_ends_all_also_where_a_checkpoint_is_saved_on_it(swarm: Swarm, rank: int) -> None:
    """For which the ranks wait for one another."""
    (peer,) = swarm.start(
        1,
        together=False,
        trainer={**ENDLESS, "enable_checkpointing": True},
        trainer_code={"callbacks": "[pl.callbacks.OnExceptionCheckpoint(spec.folder)]"},
        free={"raises_after": [rank, 3]},
        **DDP,
    )
    peer.wait_exit(code=1)
    ends = [one.said("raised")[0] for one in (peer, peer.of_rank(1))]
    assert ends[rank]["text"] == "induced failure after batch 3"
    assert ends[1 - rank]["kind"] == "RanksError"
    assert peer.said("PeerStopped")
    assert (peer.folder / "on_exception.ckpt").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_whose_rank_is_killed_ends_and_the_others_go_on(swarm: Swarm, rank: int) -> None:
    peers = swarm.start(2, peers=[{}, DDP], trainer=ENDLESS, delay_s=0.05)
    for peer in peers:
        peer.wait_epoch(2)
    os.kill(pid_of(peers[1], rank), signal.SIGKILL)
    peers[1].wait_exit(code=None)
    assert peers[1].exit_code != 0
    at = max(peers[0].commits)
    peers[0].wait_epoch(at + 5)
    assert peers[1].of_rank(1 - rank).said("raised")


def pid_of(peer: Peer, rank: int) -> int:
    return int(peer.of_rank(rank).wait_for("started")["pid"])


def test_ctrl_c_ends_all_ranks_cleanly(swarm: Swarm) -> None:
    (peer,) = swarm.start(1, together=False, trainer=ENDLESS, delay_s=0.02, **DDP)
    peer.wait_epoch(1)
    peer.signal(signal.SIGINT, group=True)
    peer.wait_exit(code=None)
    assert peer.said("PeerStopped")
    assert peer.exit_code != -signal.SIGKILL


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_at_one_rank_ends_all_of_them_after_the_same_batch(swarm: Swarm, rank: int) -> None:
    (peer,) = swarm.start(1, together=False, trainer=ENDLESS, delay_s=0.02, **DDP)
    peer.wait_epoch(1)
    os.kill(pid_of(peer, rank), signal.SIGTERM)
    peer.wait_exit(code=None)
    assert peer.said("PeerStopped")
    for one in (peer, peer.of_rank(1)):
        assert one.said("exception")[0]["kind"] == "SIGTERMException"
    assert max(peer.commits) == max(peer.of_rank(1).commits)


def test_what_one_rank_wants_to_stop_all_peers_stop_at(swarm: Swarm) -> None:
    """``trainer.should_stop``, set by rank 1 only."""
    peers = swarm.start(2, peers=[{**DDP, "free": {"stops_at": [1, 4]}}, {}], trainer=ENDLESS, delay_s=0.05)
    swarm.finish(timeout_s=60)
    ends = {one.said("finished")[0]["epoch"] for one in (*peers, peers[0].of_rank(1))}
    assert len(ends) == 1
    assert 4 <= ends.pop() < 12


def test_one_rank_that_wants_to_stop_stops_a_peer_that_is_alone(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1, together=False, trainer=ENDLESS, strategy={"target_batch_size": 16}, free={"stops_at": [1, 4]}, **DDP
    )
    swarm.finish(timeout_s=60)
    ends = [one.said("finished")[0] for one in (peer, peer.of_rank(1))]
    assert 5 <= ends[0]["epoch"] == ends[1]["epoch"] <= 6  # the batch that wished it, and one by which all know
    assert ends[0]["batches"] == ends[1]["batches"]


def test_a_peer_whose_time_is_up_leaves_with_all_ranks(swarm: Swarm) -> None:
    """Their clocks began at unlike moments."""
    brief = {"trainer": {"max_steps": -1, "max_time": {"seconds": 4}}, **DDP}
    first, second = swarm.start(2, peers=[{}, brief], trainer=ENDLESS, delay_s=0.02)
    swarm.finish(second, timeout_s=60)
    ends = [one.said("finished")[0] for one in (second, second.of_rank(1))]
    assert ends[0]["batches"] == ends[1]["batches"]
    at = max(first.commits)
    first.wait_epoch(at + 3)


def test_ranks_with_unlike_numbers_of_batches_are_told_so(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1, together=False, trainer={"max_epochs": 2}, data_samples=64, free={"batches_of_ranks": [4, 3]}, **DDP
    )
    peer.wait_exit(code=None)
    assert peer.exit_code != 0
    said = [r for one in (peer, peer.of_rank(1)) for r in one.said("raised")]
    assert any("not at the same place" in one["text"] for one in said), said


def test_a_metric_of_the_swarm_is_one_of_all_ranks(swarm: Swarm) -> None:
    peers = swarm.start(
        2,
        peers=[{**DDP, "free": {"metric": [[1.0, 4], [3.0, 12]]}}, {"free": {"metric": [6.0, 16]}}],
        trainer={"max_steps": 6},
        delay_s=0.05,
    )
    swarm.finish(timeout_s=60)
    last = [one.said("metric")[-1]["value"] for one in (peers[0], peers[0].of_rank(1))]
    assert last == [pytest.approx((4 + 36 + 96) / 32)] * 2
