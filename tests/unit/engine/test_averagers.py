"""Averager processes that do not come up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hivemind
import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager

from lightning_hivemind.engine.stock.averagers import checked
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
