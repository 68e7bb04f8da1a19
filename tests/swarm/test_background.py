"""What runs in the background or in host memory, as the published pages write it."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.checks import assert_complete, assert_in_step, assert_ledger, together
from swarm.harness import Swarm
from swarm.replay import distance, replay

pytestmark = pytest.mark.swarm

EXPONENTIAL = "partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)"
ALL_DELAYS = {"delay_state_averaging": True, "delay_grad_averaging": True, "delay_optimizer_step": True}


def test_overlapping_everything_trains_both_peers_at_one_rate(swarm: Swarm) -> None:
    """sources/000 and 002: the three delays, offload_optimizer and scheduler_fn."""
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
    assert any(event["contributors"] == 2 for peer in peers for event in peer.said("DelayedRoundFinished"))
    # after the fit everything that was delayed is in the parameters; what is left is the last state round
    assert distance(peers[0].parameters(-1), peers[1].parameters(-1)) < 1e-2


def test_one_peer_with_all_delays_ends_with_every_step_applied(swarm: Swarm) -> None:
    """Alone there is nothing to wait for: the delayed run is the plain one, seen later."""
    common = {"model": {"lr": 0.05}, "trainer": {"max_steps": 6}, "batch_size": 8}
    (peer,) = swarm.start(
        1, together=False, strategy={**ALL_DELAYS, "offload_optimizer": True, "target_batch_size": 8}, **common
    )
    swarm.finish()
    samples = [peer.commits[step].indices for step in range(1, 7)]
    assert [len(indices) for indices in samples] == [8] * 6
    assert distance(peer.parameters(-1), peer.parameters(0)) > 1e-3
    assert np.isfinite(peer.parameters(-1)).all()
    assert peer.said("finished")[0]["global_step"] == 6


@pytest.mark.parametrize("gamma", [0.9, 0.5])
def test_an_offloaded_optimizer_steps_as_one_on_the_device(swarm: Swarm, gamma: float) -> None:
    """sources/000: offload_optimizer with scheduler_fn; parameters and rates equal the replay."""
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


def test_delayed_state_averaging_keeps_peers_together(swarm: Swarm) -> None:
    """The one delay that needs no scheduler_fn once the optimizer stays where it is."""
    peers = swarm.start(
        2,
        strategy={"delay_state_averaging": True, "offload_optimizer": False},
        trainer={"max_steps": 3},
        delay_s=0.05,
    )
    swarm.finish()
    assert together(peers) == [1, 2, 3]
    assert_in_step(peers, [3], within=1e-4)


def test_gradients_that_accumulate_in_place_give_the_same_steps(swarm: Swarm) -> None:
    """reuse_grad_buffers, with batches of unequal size (the last of a pass is smaller)."""
    peers = swarm.start(
        2, strategy={"reuse_grad_buffers": True}, trainer={"max_steps": 3}, data_samples=44, delay_s=0.02
    )
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    assert_in_step(peers, [1, 2, 3])
    assert distance(peers[0].parameters(3), replay(peers, 3)[3]) < 1e-5


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


def test_a_module_without_own_zero_grad_causes_no_warning(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1, together=False, strategy={"reuse_grad_buffers": True, "target_batch_size": 16}, trainer={"max_steps": 1}
    )
    swarm.finish()
    assert "optimizer_zero_grad" not in peer.output


def test_an_offloaded_optimizer_with_a_scheduler_of_the_module_is_refused_with_the_fix(swarm: Swarm) -> None:
    from swarm.spec import PeerSpec

    peer = swarm.launch(PeerSpec(strategy={"offload_optimizer": True}, model={"scheduler": "exponential"}))
    error = peer.wait_for("raised")
    assert error["kind"] == "ArgumentError"
    assert "scheduler_fn" in error["text"]
    peer.wait_exit(code=1)
