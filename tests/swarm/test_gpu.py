"""On a GPU, where there is one: what Lightning sets up by itself there, and what is copied to host memory and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.checks import assert_complete, assert_in_step, assert_ledger
from swarm.harness import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DELAYS = {"delay_state_averaging": True, "delay_grad_averaging": True, "delay_optimizer_step": True}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", [{}, {"offload_optimizer": True}, {"reuse_grad_buffers": True}], ids=str)
def test_two_peers_on_a_gpu_make_the_same_steps(swarm: Swarm, precision: str, strategy: dict[str, Any]) -> None:
    """``"16-mixed"`` brings Lightning's own GradScaler, which needs a GPU."""
    trainer = {"accelerator": "gpu", "precision": precision, "max_steps": 5}
    peers = swarm.start(2, strategy=strategy, trainer=trainer, delay_s=0.05)
    swarm.finish()
    epochs = sorted(set(peers[0].commits) & set(peers[1].commits) - {0})
    assert_complete(peers, epochs)
    assert_in_step(peers, epochs, within=1e-5)
    assert_ledger(peers)


def test_delays_on_a_gpu_train(swarm: Swarm) -> None:
    peers = swarm.start(2, strategy=DELAYS, trainer={"accelerator": "auto", "max_steps": 8}, delay_s=0.05)
    swarm.finish()
    for peer in peers:
        losses = [commit.loss for commit in peer.commits.values() if commit.loss == commit.loss]
        assert min(losses[-3:]) < losses[0]
