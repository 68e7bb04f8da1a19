"""What the user's arguments mean for the rounds of ``engine="native"``."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.parts import limits, longest_wait_s

ALL_DELAYS = {"delay_state_averaging": True, "delay_grad_averaging": True, "delay_optimizer_step": True}
LAYOUT = Layout(1000, chunk_elements=300)


@pytest.mark.parametrize(
    ("given", "limit", "value"),
    [
        ({"target_batch_size": 4321}, "target_samples", 4321),
        ({"matchmaking_time": 3.25}, "matchmaking_s", 3.25),
        ({"next_chunk_timeout": 4.25}, "stall_s", 4.25),
        ({"allreduce_timeout": 17.5}, "round_s", 17.5),
        ({"averaging_timeout": 23.5, "matchmaking_time": 1.0}, "round_s", 23.5),
        ({"averager_opts": {"min_group_size": 3}}, "min_group_size", 3),
        ({}, "min_group_size", 1),
        ({}, "chunks", 4),
        ({}, "run", "a run"),
    ],
    ids=str,
)
def test_an_argument_is_a_limit_of_rounds(given: dict[str, Any], limit: str, value: object) -> None:
    arguments = Arguments(**{"target_batch_size": 64, **given})
    assert getattr(limits(arguments, "a run", LAYOUT), limit) == value


@pytest.mark.parametrize(
    ("given", "waits_s"),
    [
        ({}, 4.0),
        ({"reuse_grad_buffers": True}, 4.0),
        (ALL_DELAYS, 0.0),
        ({**ALL_DELAYS, "delay_grad_averaging": False}, 4.0),
        ({"use_local_updates": True}, 4.0),
        ({"use_local_updates": True, "delay_state_averaging": True}, 0.0),
    ],
    ids=str,
)
def test_who_trains_on_in_rounds_is_not_waited_for(given: dict[str, Any], waits_s: float) -> None:
    arguments = Arguments(**{"target_batch_size": 64, "matchmaking_time": 5.0, **given})
    assert longest_wait_s(arguments) == pytest.approx(waits_s)
