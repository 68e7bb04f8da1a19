"""Mixed precision; on CPU, with the very plugins that a GPU uses."""

from __future__ import annotations

import pytest

from swarm.checks import assert_complete, assert_in_step, assert_ledger
from swarm.harness import Swarm
from swarm.replay import distance, replay

pytestmark = [pytest.mark.swarm, pytest.mark.above_engines]

#: 16-mixed with a scaler that works without a GPU
HALF = "[pl.plugins.precision.MixedPrecision('16-mixed', 'cpu', torch.amp.GradScaler('cpu', init_scale=1024.0))]"


def test_bf16_mixed_trains_two_peers_together(swarm: Swarm) -> None:
    peers = swarm.start(2, trainer={"max_steps": 3, "precision": "bf16-mixed"}, delay_s=0.02)
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    assert_in_step(peers, [1, 2, 3])
    assert peers[0].commits[3].digest != peers[0].commits[0].digest


def test_one_peer_in_bf16_is_a_plain_trainer_bit_for_bit(swarm: Swarm) -> None:
    trainer = {"max_steps": 5, "precision": "bf16-mixed"}
    (peer,) = swarm.start(1, together=False, strategy={"target_batch_size": 8}, trainer=trainer)
    plain = swarm.plain(trainer=trainer)
    swarm.finish()
    assert [c.digest for c in peer.commits.values()] == [c.digest for c in plain.commits.values()]


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


def test_one_peer_in_16_mixed_is_a_plain_trainer_bit_for_bit(swarm: Swarm) -> None:
    """A power of two as scale: scaling and unscaling are exact where nothing overflows or vanishes."""
    trainer = {"max_steps": 5}
    (peer,) = swarm.start(
        1, together=False, strategy={"target_batch_size": 8}, trainer=trainer, trainer_code={"plugins": HALF}
    )
    plain = swarm.plain(trainer=trainer, trainer_code={"plugins": HALF})
    swarm.finish()
    assert [c.digest for c in peer.commits.values()] == [c.digest for c in plain.commits.values()]


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


def test_an_overflow_on_one_peer_leaves_the_swarm_finite_and_together(swarm: Swarm) -> None:
    peers = swarm.start(
        2,
        peers=[{}, {"model": {"inf_at": [2]}}],
        trainer={"max_steps": 3},
        trainer_code={"plugins": HALF},
        delay_s=0.02,
    )
    swarm.finish()
    assert len(peers[1].said("BatchDropped", reason="overflow")) == 1
    assert_complete(peers, [1, 2, 3])
    assert_in_step(peers, [1, 2, 3])
