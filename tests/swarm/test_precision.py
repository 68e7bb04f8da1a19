"""Mixed precision; on CPU, with the very plugins that a GPU uses."""

from __future__ import annotations

import pytest

from swarm.checks import assert_complete, assert_in_step
from swarm.harness import Swarm
from swarm.marks import HALF

pytestmark = [pytest.mark.swarm, pytest.mark.above_engines]


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


@pytest.mark.each_engine
def test_one_peer_in_16_mixed_is_a_plain_trainer_bit_for_bit(swarm: Swarm) -> None:
    """A power of two as scale: scaling and unscaling are exact where nothing overflows or vanishes."""
    trainer = {"max_steps": 5}
    (peer,) = swarm.start(
        1, together=False, strategy={"target_batch_size": 8}, trainer=trainer, trainer_code={"plugins": HALF}
    )
    plain = swarm.plain(trainer=trainer, trainer_code={"plugins": HALF})
    swarm.finish()
    assert [c.digest for c in peer.commits.values()] == [c.digest for c in plain.commits.values()]


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
