"""What runs in the background or in host memory, as the published pages write it."""

from __future__ import annotations

import pytest

from swarm.checks import assert_complete, assert_in_step, assert_ledger, together
from swarm.harness import Swarm
from swarm.marks import ANY_ENGINE, HIVEMIND_ONLY
from swarm.replay import distance, replay

pytestmark = pytest.mark.swarm

EXPONENTIAL = "partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)"
STEP_DELAYED = {"delay_state_averaging": True, "delay_optimizer_step": True}
ALL_DELAYS = {**STEP_DELAYED, "delay_grad_averaging": True}


def test_overlapping_everything_trains_both_peers_at_one_rate(swarm: Swarm) -> None:
    """As published: the three delays, offload_optimizer and scheduler_fn."""
    peers = swarm.start(
        2,
        strategy={**ALL_DELAYS, "offload_optimizer": True},
        strategy_code={"scheduler_fn": EXPONENTIAL},
        trainer={"max_steps": 4},
        delay_s=0.05,
    )
    swarm.finish()
    assert_ledger(peers)
    for peer in peers:
        assert peer.said("finished")[0]["global_step"] == 4
        # a delayed step is given away at one commit and seen at a later batch, so the rate is one step late at most
        for epoch, commit in peer.commits.items():
            assert commit.lr in (pytest.approx(0.05 * 0.9**epoch), pytest.approx(0.05 * 0.9 ** max(epoch - 1, 0)))
        assert distance(peer.parameters(-1), peer.parameters(0)) > 1e-3
    averaged = "DelayedRoundFinished" if swarm.engine == "hivemind" else "EpochCommitted"
    assert any(event["contributors"] == 2 for peer in peers for event in peer.said(averaged))
    # after the fit everything that was delayed is in the parameters; hivemind's last state round is left
    assert_in_step(peers, [-1], within=1e-2)


@ANY_ENGINE
def test_peers_whose_steps_are_delayed_are_equal_after_every_one(swarm: Swarm) -> None:
    """A gradient may be of the parameters before the last step; what the peers make of it is the same."""
    peers = swarm.start(
        2,
        strategy=ALL_DELAYS,
        strategy_code={"scheduler_fn": EXPONENTIAL},
        model={"optimizer": "momentum"},
        trainer={"max_steps": 12},
        delay_s=0.05,
    )
    swarm.finish()
    first, second = ({one["epoch"]: one["digest"] for one in peer.said("step")} for peer in peers)
    both = first.keys() & second.keys()
    assert len(both) >= 8
    assert [first[epoch] for epoch in sorted(both)] == [second[epoch] for epoch in sorted(both)]
    assert len({first[epoch] for epoch in both}) == len(both), "each step changes the parameters"
    assert_in_step(peers, [-1])


@pytest.mark.parametrize(
    ("delays", "optimizer"), [(STEP_DELAYED, "sgd"), (ALL_DELAYS, "momentum")], ids=["step", "gradients"]
)
def test_one_peer_with_delays_ends_with_every_step_applied(
    swarm: Swarm, delays: dict[str, bool], optimizer: str
) -> None:
    """Alone, with one batch a step, every gradient is one step late, and nothing else differs from a plain run."""
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={**delays, "target_batch_size": 8},
        model={"optimizer": optimizer},
        trainer={"max_steps": 6},
    )
    swarm.finish()
    assert [len(peer.commits[step].indices) for step in range(1, 7)] == [8] * 6
    assert peer.said("finished")[0]["global_step"] == 6
    expected = replay([peer], 6, stale=True)
    assert distance(expected[6], expected[5]) > 1e-4, "a missing step would not be seen"
    assert distance(peer.parameters(-1), expected[6]) < 1e-6


@HIVEMIND_ONLY
def test_a_failed_delayed_round_steps_on_the_gradient_that_was_kept(swarm: Swarm) -> None:
    """With groups of three or more only, two peers' rounds fail, here by averaging_timeout."""
    short = {"averaging_timeout": 3.0, "averager_opts": {"min_group_size": 3}}
    peers = swarm.start(2, strategy={**ALL_DELAYS, **short}, trainer={"max_steps": 1}, delay_s=0.02)
    swarm.finish()
    for peer in peers:
        (failed,) = peer.said("RoundIncomplete", kind="gradients")
        assert failed["fraction"] == 0.0
        assert "own gradient" in failed["action"]
        assert "no group found in 4.0 s" not in failed["reason"], "matchmaking ended it, not averaging_timeout"
        expected = replay([peer], 1)
        assert distance(expected[1], expected[0]) > 1e-4
        assert distance(peer.parameters(-1), expected[1]) < 1e-6


@pytest.mark.parametrize("gamma", [0.9, 0.5])
def test_an_offloaded_optimizer_steps_as_one_on_the_device(swarm: Swarm, gamma: float) -> None:
    """As published: offload_optimizer with scheduler_fn; parameters and rates equal the replay."""
    schedule = f"partial(torch.optim.lr_scheduler.ExponentialLR, gamma={gamma})"
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"offload_optimizer": True, "target_batch_size": 16},
        strategy_code={"scheduler_fn": schedule},
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": 5},
    )
    plain = swarm.plain(
        model={"optimizer": "adamw", "lr": 0.01, **({"scheduler": "exponential"} if gamma == 0.9 else {})},
        trainer={"max_steps": 5, "accumulate_grad_batches": 2},
    )
    swarm.finish()
    assert [c.lr for c in peer.commits.values()] == pytest.approx([0.01 * gamma**k for k in range(6)])
    same = [peer.commits[k].digest == plain.commits[k].digest for k in range(6)]
    assert all(same) if gamma == 0.9 else same == [True, True, False, False, False, False]


def test_two_peers_with_offloaded_optimizers_make_the_same_steps(swarm: Swarm) -> None:
    peers = swarm.start(
        2,
        strategy={"offload_optimizer": True},
        strategy_code={"scheduler_fn": EXPONENTIAL},
        model={"optimizer": "momentum"},
        trainer={"max_steps": 3},
        delay_s=0.02,
    )
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    assert_in_step(peers, [1, 2, 3])
    for peer in peers:
        assert [peer.commits[k].lr for k in (1, 2, 3)] == pytest.approx([0.05 * 0.9**k for k in (1, 2, 3)])


def test_delayed_state_averaging_brings_peers_together(swarm: Swarm) -> None:
    """One starts apart: averaged gradients alone would keep it there.

    (hivemind averages parameters; the native engine compares them, and who differs takes the others'.)
    The one delay that needs no scheduler_fn once the optimizer stays where it is.
    """
    first, second = swarm.start(
        2,
        peers=[{"free": {"move_parameters": 0.1}}, {}],
        strategy={"delay_state_averaging": True, "offload_optimizer": False},
        trainer={"max_steps": -1},
        delay_s=0.05,
    )

    def apart() -> dict[int, float]:
        both = set(first.commits) & set(second.commits)
        return {epoch: distance(first.parameters(epoch), second.parameters(epoch)) for epoch in both - {0}}

    # a round that is lost on a busy machine only makes it later
    first.wait_until(lambda: min(apart().values(), default=1.0) < 1e-5, timeout_s=90, what="peers are equal")
    assert apart()[1] > 1e-2, "they did not start apart"


def test_a_delayed_optimizer_step_follows_averaged_gradients(swarm: Swarm) -> None:
    """Gradients are waited for, the step is not."""
    peers = swarm.start(2, strategy=STEP_DELAYED, trainer={"max_steps": 3}, delay_s=0.05)
    swarm.finish()
    assert together(peers)
    assert_ledger(peers)
    if swarm.engine == "native" or not any(peer.said("RoundIncomplete") for peer in peers):
        assert_in_step(peers, [-1], within=1e-5)
    for peer in peers:
        assert not peer.said("DelayedRoundFinished")
        # "step" is at the step itself, which may be made just before a batch; "commit" after that batch
        at_first = [one["digest"] for one in peer.said("step") if one["epoch"] == 1] or [peer.commits[1].digest]
        seen = "the first step was not seen a batch later"
        assert peer.commits[0].digest == at_first[0] != peer.said("finished")[0]["digest"], seen


def test_gradients_that_accumulate_in_place_give_the_same_steps(swarm: Swarm) -> None:
    """reuse_grad_buffers, with batches of unequal size (the last of a pass is smaller)."""
    peers = swarm.start(
        2, strategy={"reuse_grad_buffers": True}, trainer={"max_steps": 3}, data_samples=44, delay_s=0.02
    )
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    assert_in_step(peers, [1, 2, 3])
    assert distance(peers[0].parameters(3), replay(peers, 3)[3]) < 1e-5


LEFT_GRADIENTS = """[type("Left", (pl.Callback,), {"on_train_start": lambda self, trainer, model: [
    setattr(one, "grad", one.detach().clone()) for one in model.parameters()
]})()]"""


def test_a_gradient_that_a_fit_before_or_a_hook_has_left_is_not_summed_with_this_one_s(swarm: Swarm) -> None:
    """In place nothing else clears it; a plain Trainer does so before its first batch."""
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"reuse_grad_buffers": True, "target_batch_size": 16},
        trainer={"max_steps": 2},
        trainer_code={"callbacks": LEFT_GRADIENTS},
    )
    plain = swarm.plain(trainer={"max_steps": 2, "accumulate_grad_batches": 2})
    swarm.finish()
    assert [c.digest for c in peer.commits.values()] == [c.digest for c in plain.commits.values()]


@pytest.mark.above_engines
def test_an_own_zero_grad_is_disabled_with_a_warning_and_given_back(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"reuse_grad_buffers": True, "target_batch_size": 16},
        model={"own_zero_grad": True},
        trainer={"max_steps": 3},
    )
    plain = swarm.plain(trainer={"max_steps": 3, "accumulate_grad_batches": 2})
    swarm.finish()
    assert "optimizer_zero_grad" in peer.output
    assert "reuse_grad_buffers" in peer.output
    assert peer.said("finished")[0]["zero_grad"] == [], "after the fit the module's own methods are back"
    assert [c.digest for c in peer.commits.values()] == [c.digest for c in plain.commits.values()]


@pytest.mark.above_engines
def test_a_module_without_own_zero_grad_causes_no_warning(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1, together=False, strategy={"reuse_grad_buffers": True, "target_batch_size": 16}, trainer={"max_steps": 1}
    )
    swarm.finish()
    assert "optimizer_zero_grad" not in peer.output


@ANY_ENGINE
def test_an_offloaded_optimizer_with_a_scheduler_of_the_module_is_refused_with_the_fix(swarm: Swarm) -> None:
    from swarm.spec import PeerSpec

    peer = swarm.launch(PeerSpec(strategy={"offload_optimizer": True}, model={"scheduler": "exponential"}))
    error = peer.wait_for("raised")
    assert error["kind"] == "ArgumentError"
    assert "scheduler_fn" in error["text"]
    peer.wait_exit(code=1)


def test_validation_of_a_delayed_run_sees_the_committed_step(swarm: Swarm) -> None:
    delays = {"delay_state_averaging": True, "delay_grad_averaging": True, "delay_optimizer_step": True}
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16, **delays},
        trainer={"max_steps": 3, "val_check_interval": 2, "num_sanity_val_steps": 0},
    )
    swarm.finish()
    expected = replay([peer], 1)
    first = peer.said("validated")[0]
    assert first["epoch"] == 1
    assert distance(expected[1], expected[0]) > 1e-4
    assert distance(peer.parameters(f"validated_{first['batch']}"), expected[1]) < 1e-6
