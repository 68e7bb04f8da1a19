"""Peers of one run train one model."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.harness import START_S, Swarm
from swarm.spec import PeerSpec

pytestmark = pytest.mark.swarm
# one comparison of texts for both engines: two cases show that each calls it
ONCE = pytest.mark.above_engines


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"model": {"width": 24}}, "net.0.weight (24, 8)"),
        pytest.param({"strategy": {"target_batch_size": 48}}, "target_batch_size=32", marks=ONCE),
        pytest.param({"model": {"norm": True}}, "net.1", marks=ONCE),
        pytest.param({"model": {"dtype": "bfloat16"}}, "net.0.weight (16, 8) torch.bfloat16", marks=ONCE),
        pytest.param({"model": {"frozen": True}}, "net.0.weight (16, 8) torch.float32 frozen", marks=ONCE),
        ({"strategy_code": {"extra_tensors": "[torch.zeros(3)]"}}, "It has 7 entries, this one has 8"),
    ],
    ids=["width", "target", "layers", "dtype", "frozen", "extra tensors"],
)
def test_another_model_under_the_same_run_id_is_refused_by_name(
    swarm: Swarm, other: dict[str, Any], named: str
) -> None:
    (founder,) = swarm.start(1, together=False, hold_at=[1])
    founder.wait_for("holding")
    strategy = {"initial_peers": swarm.addresses(), **other.get("strategy", {})}
    stranger = swarm.launch(PeerSpec(**{**other, "strategy": strategy}))
    error = stranger.wait_for("raised", timeout_s=START_S)
    assert error["kind"] == "SchemaMismatchError", error["trace"]
    assert "run_id='lightning_run'" in error["text"]
    assert named in error["text"]
    stranger.wait_exit(code=1)


def test_a_peer_with_another_engine_is_told_so(swarm: Swarm) -> None:
    ways = {"hivemind": "engine hivemind", "native": "engine native, gradients exact"}
    (other,) = ways.keys() - {swarm.engine}
    (founder,) = swarm.start(1, together=False, hold_at=[1])
    founder.wait_for("holding")
    stranger = swarm.launch(PeerSpec(strategy={"initial_peers": swarm.addresses(), "engine": other}))
    error = stranger.wait_for("raised", timeout_s=START_S)
    assert error["kind"] == "SchemaMismatchError", error["trace"]
    assert f"averages by {ways[swarm.engine]}, this one by {ways[other]}" in error["text"]
    stranger.wait_exit(code=1)


def test_another_run_id_is_another_swarm(swarm: Swarm) -> None:
    (founder,) = swarm.start(1, together=False, hold_at=[1])
    founder.wait_for("holding")
    (other,) = swarm.start(
        1, together=False, strategy={"run_id": "another"}, model={"width": 24}, trainer={"max_steps": 2}
    )
    swarm.finish(other)
    assert not other.said("StateLoaded")
    assert all(event["contributors"] == 1 for event in other.said("EpochCommitted"))
