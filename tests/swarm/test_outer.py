"""``outer=DiLoCo(...)``: peers make steps of their own, and rounds an outer step by how far these led."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.checks import assert_workers
from swarm.harness import Swarm

pytestmark = pytest.mark.swarm
ROUNDS = 5


@pytest.fixture
def engine() -> str:
    return "native"


USUAL = {"lr": 0.7, "momentum": 0.6, "nesterov": True}
IN_FRAGMENTS = {**USUAL, "fragments": 3}


def outer(settings: dict[str, Any] = USUAL) -> dict[str, Any]:
    name = "StreamingDiLoCo" if "fragments" in settings else "DiLoCo"
    return {"strategy_code": {"outer": f"{name}(**{settings})"}}


@pytest.mark.parametrize(
    "settings",
    [
        USUAL,
        {"lr": 0.5, "momentum": 0.9, "nesterov": False},
        {"lr": 1.0, "momentum": 0.0, "nesterov": False},
        IN_FRAGMENTS,
        {**IN_FRAGMENTS, "momentum": 0.0, "nesterov": False},
    ],
    ids=["nesterov", "momentum", "averaging", "fragments", "fragments, no momentum"],
)
def test_peers_of_unlike_kinds_make_the_steps_of_workers_one_after_another(
    swarm: Swarm, settings: dict[str, Any]
) -> None:
    """One process, and two ranks of DDP; inner AdamW; samples weigh. Within 1e-5 after five rounds of all values."""
    rounds = ROUNDS * settings.get("fragments", 1)
    peers = swarm.start(
        2,
        peers=[{"ranks": 2, "batch_size": 4}, {"delay_s": 0.01, "batch_size": 6}],
        strategy={"target_batch_size": 64},
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": rounds},
        # who joins takes the moments of the other one's optimizer, too: none yet
        free={"barrier_batch": 0},
        **outer(settings),
    )
    swarm.finish(timeout_s=120)
    assert_workers(peers, rounds, **settings)


@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, USUAL), (2, USUAL), (1, IN_FRAGMENTS)], ids=["one", "two ranks", "fragments"]
)
def test_who_joins_has_the_outer_momentum_too(swarm: Swarm, ranks: int, settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "strategy": {"target_batch_size": 64},
        "model": {"optimizer": "adamw", "lr": 0.01, "norm": True},
        "trainer": {"max_steps": 60},
        "together": False,
        "delay_s": 0.02,
        **outer(settings),
    }
    (first,) = swarm.start(1, **common)
    first.wait_epoch(4)
    (second,) = swarm.start(1, **{**common, "order_seed": 1, "ranks": ranks})
    swarm.finish(timeout_s=120)
    steps = sorted({one["epoch"] for one in second.said("EpochCommitted", contributors=2)})
    assert len(steps) >= 5
    for step in steps:
        assert (first.parameters(f"common_{step}") == second.parameters(f"common_{step}")).all(), step
    assert not first.said("ParametersDiffered")


@pytest.mark.parametrize("settings", [USUAL, IN_FRAGMENTS], ids=["whole", "fragments"])
def test_a_checkpoint_after_a_round_continues_bit_for_bit(swarm: Swarm, settings: dict[str, Any]) -> None:
    """The outer momentum is in it. (So is, between two rounds, what all have in common: see the unit tests.)"""
    common: dict[str, Any] = {
        "strategy": {"target_batch_size": 32},
        "model": {"optimizer": "adamw", "lr": 0.01},
        "together": False,
        "order_seed": None,
        "trainer": {"max_steps": 8, "enable_checkpointing": True},
        "trainer_code": {"callbacks": "[CheckpointAtBatch(16, spec.folder + '/saved.ckpt')]"},
        **outer(settings),
    }
    (whole,) = swarm.start(1, **common)
    swarm.finish(whole)
    (rest,) = swarm.start(1, ckpt_path=str(whole.folder / "saved.ckpt"), **common)
    swarm.finish(rest)
    assert min(rest.commits) == 4
    for step in (5, 6, 7, 8):
        assert (whole.parameters(f"common_{step}") == rest.parameters(f"common_{step}")).all(), step
