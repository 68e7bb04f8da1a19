"""What each engine makes of gradients before and after it averages them: weights, scales, what is dropped, clipping."""

from __future__ import annotations

import pytest
import torch

from swarm.checks import assert_complete, assert_in_step, assert_ledger
from swarm.harness import Swarm
from swarm.marks import HALF
from swarm.replay import distance, replay

pytestmark = pytest.mark.swarm


def test_the_smaller_last_batch_counts_what_it_holds(swarm: Swarm) -> None:
    """20 samples in batches of 8: 8, 8, 4. A step weighs samples, not batches."""
    (peer,) = swarm.start(
        1, together=False, strategy={"target_batch_size": 20}, trainer={"max_steps": 3}, data_samples=20
    )
    swarm.finish()
    assert [[len(b) for b in peer.commits[k].samples] for k in (1, 2, 3)] == [[8, 8, 4]] * 3
    assert_ledger([peer])
    assert distance(peer.parameters(3), replay([peer], 3)[3]) < 1e-6


def test_unequal_batches_of_two_peers_weigh_as_many_samples_as_they_hold(swarm: Swarm) -> None:
    peers = swarm.start(2, peers=[{"batch_size": 4}, {"batch_size": 12}], trainer={"max_steps": 3}, delay_s=0.03)
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    assert_ledger(peers)
    assert distance(peers[0].parameters(3), replay(peers, 3)[3]) < 1e-5


@pytest.mark.above_engines
def test_a_non_finite_gradient_drops_that_batch_only(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1, together=False, strategy={"target_batch_size": 16}, model={"nan_at": [2]}, trainer={"max_steps": 3}
    )
    swarm.finish()
    (dropped,) = peer.said("BatchDropped")
    assert (dropped["samples"], dropped["reason"]) == (8, "non-finite gradient")
    assert sum(len(commit.lost) for commit in peer.commits.values()) == 1
    assert_ledger([peer])
    assert distance(peer.parameters(3), replay([peer], 3)[3]) < 1e-6


@pytest.mark.above_engines
def test_a_peer_with_non_finite_gradients_does_not_spoil_the_swarm(swarm: Swarm) -> None:
    peers = swarm.start(2, peers=[{}, {"model": {"nan_at": [2, 3]}}], trainer={"max_steps": 3}, delay_s=0.02)
    swarm.finish()
    assert len(peers[1].said("BatchDropped")) == 2
    assert not peers[0].said("BatchDropped")
    assert_ledger(peers)
    assert distance(peers[0].parameters(3), replay(peers, 3)[3]) < 1e-5


def test_16_mixed_unscales_before_averaging(swarm: Swarm) -> None:
    """Two peers whose loss scales differ still average gradients of one scale."""
    other = HALF.replace("1024.0", "64.0")
    peers = swarm.start(
        2,
        peers=[{"trainer_code": {"plugins": HALF}}, {"trainer_code": {"plugins": other}}],
        trainer={"max_steps": 3},
        delay_s=0.02,
    )
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    assert_in_step(peers, [1, 2, 3])
    assert_ledger(peers)
    # half precision against the whole: what differs is rounding, and not a scale
    expected = replay(peers, 3)
    moved = distance(expected[3], expected[0])
    assert moved > 1e-3
    assert distance(peers[0].parameters(3), expected[3]) < 0.02 * moved


@pytest.mark.parametrize("reuse", [False, True])
def test_an_overflow_drops_its_batch_and_lowers_the_scale(swarm: Swarm, reuse: bool) -> None:
    """With reused buffers the batch is in one sum with those before it, which are dropped with it."""
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 24, "reuse_grad_buffers": reuse},
        model={"inf_at": [1]},
        trainer={"max_steps": 3},
        trainer_code={"plugins": HALF},
        free={"record_scale": True},
    )
    swarm.finish()
    (dropped,) = peer.said("BatchDropped")
    assert (dropped["samples"], dropped["reason"]) == (16 if reuse else 8, "overflow")
    assert [len(peer.commits[k].indices) for k in (1, 2, 3)] == [24, 24, 24]
    scales = [record["value"] for record in peer.said("scale")]
    assert scales[0] == 1024.0
    assert scales[-1] == 512.0


@pytest.mark.parametrize("algorithm", ["norm", pytest.param("value", marks=pytest.mark.above_engines)])
def test_clipping_acts_on_the_averaged_gradient(swarm: Swarm, algorithm: str) -> None:
    """Steep loss, so that every gradient is clipped: clipped before averaging, the peers' mean would be another."""
    limit = 0.1 if algorithm == "norm" else 0.005
    peers = swarm.start(
        2,
        model={"scale_loss": 100.0},
        trainer={"max_steps": 3, "gradient_clip_val": limit, "gradient_clip_algorithm": algorithm},
        delay_s=0.02,
    )
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    clip = torch.nn.utils.clip_grad_norm_ if algorithm == "norm" else torch.nn.utils.clip_grad_value_
    expected = replay(peers, 3, clip=lambda parameters: clip(parameters, limit))
    for peer in peers:
        assert distance(peer.parameters(3), expected[3]) < 1e-5
    assert_in_step(peers, [1, 2, 3])
