"""Averagers: processes that do not come up, rounds that fail."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hivemind
import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager

from lightning_hivemind.engine.stock.averagers import KeepsFeedback, TrainingState, checked, received_share
from lightning_hivemind.errors import DaemonError


@pytest.fixture
def dht() -> Iterator[hivemind.DHT]:
    running = hivemind.DHT(start=True)
    yield running
    running.shutdown()
    running.join()


def test_an_averager_that_dies_while_it_starts_is_said(dht: hivemind.DHT) -> None:
    base: Any = checked(GradientAverager)

    class OutOfMemory(base):
        def run(self) -> None:
            os._exit(3)

    with pytest.raises(DaemonError, match="died with exit code 3"):
        OutOfMemory(parameters=[torch.nn.Parameter(torch.zeros(1))], dht=dht, prefix="run", start=True)


def test_a_failed_round_leaves_the_error_feedback_of_powersgd_as_it_was() -> None:
    class Fails(PowerSGDGradientAverager):  # type: ignore[misc]
        async def _aggregate_with_group(self) -> None:
            self._ms[0].add_(1.0)
            raise ConnectionError

    class Kept(KeepsFeedback, Fails):
        def __init__(self) -> None:
            self._ms = [torch.full((2,), 3.0)]
            self._parent_pid = -1  # so that nothing is shut down that was never started

    averager = Kept()
    with pytest.raises(ConnectionError):
        asyncio.run(averager._aggregate_with_group())
    assert averager._ms[0].tolist() == [3.0, 3.0]
    assert issubclass(checked(PowerSGDGradientAverager), KeepsFeedback)


@pytest.mark.parametrize(
    ("failed", "arrived", "share"),
    [
        (0, [10, 10], 1.0),
        (500, [10, 10], 0.5),  # what others were to reduce did not come back: local values stand there
        (3, [10, 10], 0.997),
        (0, [10, 0], 0.5),  # what this peer reduces lacks a sender
        (100, [10, 5], 0.75),
        (1000, [0, 0], 0.0),
    ],
)
def test_the_share_of_values_that_were_averaged_is_the_smaller_of_both_ways(
    failed: int, arrived: list[int], share: float
) -> None:
    """hivemind reports each of these rounds as a success."""
    runner = SimpleNamespace(
        tensor_part_container=SimpleNamespace(failed_size=failed, total_size=1000),
        tensor_part_reducer=SimpleNamespace(num_parts=10, num_senders=2, num_parts_received=arrived),
    )
    assert received_share(runner) == pytest.approx(share)


def test_who_reduces_nothing_and_has_nothing_to_average_lacks_nothing() -> None:
    runner = SimpleNamespace(
        tensor_part_container=SimpleNamespace(failed_size=0, total_size=0),
        tensor_part_reducer=SimpleNamespace(num_parts=0, num_senders=2, num_parts_received=[0, 0]),
    )
    assert received_share(runner) == 1.0


def test_a_donor_sends_copies_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It steps on while they are sent."""
    live = torch.ones(3)
    monkeypatch.setattr(TrainingStateAverager, "get_current_state", lambda self: ({"epoch": 1}, (live,), ("info",)))

    class Donor(TrainingState):
        def __del__(self) -> None:
            """It was never started."""

    donor = Donor.__new__(Donor)
    donor.lock_commit = threading.RLock()
    metadata, (sent,), infos = donor.get_current_state()
    live.zero_()
    assert (metadata, sent.tolist(), infos) == ({"epoch": 1}, [1.0, 1.0, 1.0], ("info",))
