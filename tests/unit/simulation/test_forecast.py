"""Forecasts: what is known by hand comes out, a seed is one run, and whatever happens is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hivemind
from lightning_hivemind.engine.native.codecs.floating import ScaledFloat16
from lightning_hivemind.engine.native.codecs.integer import Blockwise4Bit, Blockwise8Bit
from lightning_hivemind.engine.native.layout import CHUNK_ELEMENTS
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.simulation.forecast import Forecast, forecast
from lightning_hivemind.simulation.links import PAYLOAD
from lightning_hivemind.simulation.paced_world import PacedWorld
from lightning_hivemind.simulation.scenario import CODECS, Scenario

#: a multiple of eight chunks, so that all owners have the same share
EVEN = 16 * CHUNK_ELEMENTS


@pytest.mark.parametrize("peers", [2, 4, 8])
def test_bytes_of_a_step_are_those_of_a_butterfly(peers: int) -> None:
    found = forecast(Scenario(peers=peers, profile="perfect", parameters=EVEN, codec="none", steps=4))
    expected = 2 * (peers - 1) / peers * 4 * EVEN
    assert found.encoded_bytes == 4 * EVEN
    assert found.sent_bytes_mean == pytest.approx(expected, rel=0.02)
    assert found.received_bytes_mean == pytest.approx(expected, rel=0.02)
    assert found.sent_bytes_largest == pytest.approx(expected, rel=0.03)
    assert (found.steps, found.full_rounds, found.forks, found.aborted_rounds) == (4, 1.0, 0, 0)


@pytest.mark.parametrize("peers", [2, 3, 8])
def test_a_step_of_equal_peers_takes_as_long_as_their_batches(peers: int) -> None:
    """Nobody begins a batch that the others then wait for; it was a quarter more."""
    scenario = Scenario(peers=peers, profile="perfect", parameters=1000, batch_s=0.2, target_batch_size=4 * 32 * peers)
    found = forecast(scenario)
    assert found.step_s_median == pytest.approx(4 * 0.2, rel=0.1)


def test_the_coordinator_has_as_many_messages_for_each_other_peer_in_a_swarm_of_any_size() -> None:
    """Called, it joins, gets the plan, is done and gets the commit; progress is told besides."""

    def messages(peers: int) -> float:
        target = 4 * 32 * peers
        found = forecast(
            Scenario(peers=peers, profile="perfect", parameters=1000, batch_s=0.2, target_batch_size=target, steps=6)
        )
        assert found.coordinator_message_bytes > 10 * found.coordinator_messages
        return found.coordinator_messages / (peers - 1)

    few = messages(4)
    assert 5 <= few < 20
    assert messages(16) == pytest.approx(few, rel=0.1)


def test_a_slower_uplink_makes_steps_slower_in_proportion() -> None:
    def step_s(up_mbit_s: float) -> float:
        found = forecast(
            Scenario(
                peers=4, profile="perfect", parameters=EVEN, codec="none", batch_s=0.01, steps=4, up_mbit_s=up_mbit_s
            )
        )
        assert found.step_s_median is not None
        return found.step_s_median

    fast, slow = step_s(200.0), step_s(100.0)
    assert slow / fast == pytest.approx(2.0, rel=0.1)
    assert fast == pytest.approx(2 * 3 / 4 * 4 * EVEN * 8 / (PAYLOAD * 200e6), rel=0.04)


def churned(seed: int) -> Forecast:
    return forecast(
        Scenario(peers=8, parameters=200_000, batch_s=2.0, steps=15, churn_per_min=12.0, restart_s=5.0, seed=seed)
    )


@pytest.mark.parametrize("seed", range(3))
def test_churn_loses_nothing_that_is_not_counted(seed: int) -> None:
    """That every sample is accounted for is asserted at the end of every forecast, for every peer."""
    found = churned(seed)
    assert found.crashes > 3, "nothing happened"
    assert found.restarts > 0
    assert found.steps == 15
    assert found.full_rounds is not None
    assert 0 < found.full_rounds < 1, "some were called and died, and most rounds had everybody that was called"
    assert 2 < found.members < 8
    assert found.samples_lost_by_crash > 0
    assert found.samples_committed > 0


def test_a_run_may_end_with_a_step_whose_average_is_still_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are in the lineage, though not everybody has made it."""
    on_its_way: list[bool] = []
    check = PacedWorld.check_everything

    def look(world: PacedWorld) -> dict[str, set[str]]:
        on_its_way.extend(peer.decided != peer.applied for peer in world.living())
        return check(world)

    monkeypatch.setattr(PacedWorld, "check_everything", look)
    found = forecast(Scenario(peers=4, parameters=1_000_000, steps=2, churn_per_min=20.0, restart_s=5.0, seed=79))
    assert found.steps == 2
    assert any(on_its_way), "no step is: this needs another seed"


def test_another_seed_is_another_run() -> None:
    assert churned(0) != churned(1)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_is_one_run_in_every_process(hash_seed: str) -> None:
    shape = ["--peers", "8", "--parameters", "2e5", "--batch-seconds", "2", "--steps", "15", "--churn", "12"]
    arguments = ["simulate", *shape, "--seed", "3", "--json"]
    code = f"import sys; from lightning_hivemind.cli import main; sys.exit(main({arguments!r}))"
    paths = str(Path(lightning_hivemind.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    here = forecast(Scenario(peers=8, parameters=200_000, batch_s=2.0, steps=15, churn_per_min=12.0, seed=3))
    assert json.loads(done.stdout) == here.as_dict()


@pytest.mark.parametrize("elements", [1, 63, 64, 1000, 1024, 1025, CHUNK_ELEMENTS])
def test_sizes_are_those_of_the_codecs(elements: int) -> None:
    for name, codec in (("fp16", ScaledFloat16()), ("int8", Blockwise8Bit()), ("int4", Blockwise4Bit())):
        assert CODECS[name](elements) == codec.size_bytes(elements)


def test_rounds_that_never_end_are_told() -> None:
    """100 MB over 0.1 Mbit/s does not go into thirty seconds."""
    found = forecast(Scenario(peers=3, profile="perfect", up_mbit_s=0.1, steps=2))
    assert (found.steps, found.step_s_median) == (0, None)
    assert found.reasons


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peers", 1),
        ("profile", "dial-up"),
        ("codec", "zip"),
        ("batch_s", 0.0),
        ("steps", 0),
        ("parameters", 0),
        ("target_batch_size", 0),
        ("churn_per_min", -1.0),
        ("up_mbit_s", float("nan")),
        ("averaging_timeout", 1.0),
    ],
)
def test_an_impossible_scenario_is_refused_with_the_value_and_the_fix(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name}=.*: give"):
        Scenario(**{"peers": 4, name: value})  # type: ignore[arg-type]
