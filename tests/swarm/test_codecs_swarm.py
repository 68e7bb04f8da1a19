"""Compressed averaging between two peers, as it was published; errors stay within what each codec promises."""

from __future__ import annotations

import pytest

from swarm.checks import assert_complete, assert_ledger
from swarm.harness import Swarm
from swarm.marks import HIVEMIND_ONLY
from swarm.replay import distance, replay

pytestmark = pytest.mark.swarm

ADAPTIVE = (
    "SizeAdaptiveCompression(threshold=2**16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization())"
)
# name -> code, width of the network, largest relative distance to the uncompressed replay after three steps.
# 8-bit (hivemind): 256 levels over 6 standard deviations of a tensor, once for gradients and once for the state;
# tensors of up to 256 values are sent as they are.
CODECS = {
    "Float16": ("Float16Compression()", 16, 2e-3),
    "Uniform8Bit": ("Uniform8BitQuantization()", 64, 2e-2),
    "SizeAdaptive": (ADAPTIVE, 264, 2e-2),  # its middle layer has 69,696 weights: above the threshold
}


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        *[(name, "lightning_hivemind") for name in CODECS],
        # it has the other two inside
        pytest.param("SizeAdaptive", "hivemind.compression", marks=pytest.mark.above_engines),
    ],
)
def test_a_compressed_step_is_the_step_within_the_codecs_error(swarm: Swarm, name: str, origin: str) -> None:
    code, width, bound = CODECS[name]
    if origin == "lightning_hivemind":
        for codec in ("Float16Compression", "Uniform8BitQuantization", "SizeAdaptiveCompression"):
            code = code.replace(codec, f"ours.{codec}")
    peers = swarm.start(
        2,
        strategy_code={"grad_compression": code, "state_averaging_compression": code},
        model={"width": width, "lr": 0.02},
        trainer={"max_steps": 3},
        delay_s=0.02,
    )
    swarm.finish()
    assert_complete(peers, [1, 2, 3])
    assert_ledger(peers)
    expected = replay(peers, 3)
    for peer in peers:
        apart = distance(peer.parameters(3), expected[3])
        assert 1e-7 < apart < bound, "nothing was compressed" if apart <= 1e-7 else "more than the codec's error"


@HIVEMIND_ONLY
def test_a_state_is_downloaded_compressed(swarm: Swarm) -> None:
    (founder,) = swarm.start(
        1, together=False, strategy_code={"load_state_compression": "Float16Compression()"}, hold_at=[1]
    )
    founder.wait_for("holding", epoch=1)
    (joiner,) = swarm.start(1, together=False, trainer={"max_steps": 2}, hold_at=[1], model={"seed": 5})
    joiner.wait_for("StateLoaded", epoch=1)
    joiner.wait_epoch(1)
    apart = distance(joiner.parameters(1), founder.parameters(1))
    assert 1e-7 < apart < 1e-3


def test_power_sgd_averages_gradients_of_low_rank(swarm: Swarm) -> None:
    """As published, but with a rank and a size that this small network reaches."""
    peers = swarm.start(
        2,
        strategy_code={
            "grad_averager_factory": "partial(PowerSGDGradientAverager, averager_rank=4, min_compression_ratio=0.5)"
        },
        model={"width": 64, "lr": 0.05},
        trainer={"max_steps": 4},
        delay_s=0.02,
    )
    swarm.finish()
    assert_complete(peers, [1, 2, 3, 4])
    moved = replay(peers, 4)
    step = distance(moved[4], moved[0])
    for peer in peers:  # it goes where the gradient goes, but not all the way: what was cut off waits for later steps
        assert 1e-7 < distance(peer.parameters(4), moved[4]) < 0.9 * step
