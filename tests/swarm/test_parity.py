"""Training in a swarm is training: one peer equals a plain Trainer, two peers equal the large batch."""

from __future__ import annotations

import pytest

from swarm.checks import assert_one_process
from swarm.harness import Swarm

pytestmark = pytest.mark.swarm
STEPS = 50
#: it steps alike on any engine: on the other one, what the first optimizer shows is enough
OTHER = pytest.param("momentum", marks=pytest.mark.above_engines)


@pytest.mark.parametrize("optimizer", ["adamw", OTHER])
@pytest.mark.parametrize("batches", [1, 2])
def test_one_peer_is_a_plain_trainer_bit_for_bit(swarm: Swarm, optimizer: str, batches: int) -> None:
    """``target_batch_size`` of so many batches is ``accumulate_grad_batches`` of as many."""
    # weight decay would move what no loss reaches, had it a gradient; hivemind's averager gives it one, of zeros
    unreached = swarm.engine == "native"
    common = {
        "model": {"optimizer": optimizer, "lr": 0.01, "scheduler": "exponential", "unreached": unreached},
        "batch_size": 8,
        "trainer": {"max_steps": STEPS},
    }
    (peer,) = swarm.start(1, together=False, strategy={"target_batch_size": 8 * batches}, **common)
    accumulating = {**common, "trainer": {"max_steps": STEPS, "accumulate_grad_batches": batches}}
    plain = swarm.plain(**accumulating)
    swarm.finish()
    assert sorted(peer.commits) == sorted(plain.commits) == list(range(STEPS + 1))
    ours, theirs = ([c.digest for c in one.commits.values()] for one in (peer, plain))
    different = [step for step in range(STEPS + 1) if ours[step] != theirs[step]]
    assert not different, f"first different step: {different[0]}"
    assert [c.lr for c in peer.commits.values()] == [c.lr for c in plain.commits.values()]


@pytest.mark.parametrize("optimizer", ["adamw", OTHER])
def test_two_peers_are_one_process_with_the_samples_of_both(swarm: Swarm, optimizer: str) -> None:
    """Within 1e-5 relative after 50 steps; the reference takes the samples that each step recorded."""
    peers = swarm.start(
        2, model={"optimizer": optimizer, "lr": 0.01}, trainer={"max_steps": STEPS}, delay_s=0.01, data_samples=8192
    )
    swarm.finish(timeout_s=150)
    assert_one_process(peers, STEPS)
