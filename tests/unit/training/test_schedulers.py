"""Schedulers are a function of the global step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.training.schedulers import SwarmSchedulers, refuse_plateau, scheduler_from


@dataclass
class Config:
    scheduler: Any
    interval: str = "step"
    frequency: int = 1
    reduce_on_plateau: bool = False


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def taken(config: Config) -> SwarmSchedulers:
    schedulers = SwarmSchedulers(lambda scheduler: scheduler.step())
    schedulers.take_over([config])
    return schedulers


@pytest.mark.parametrize("path", [[1, 2, 3, 4, 5, 6], [2, 2, 6], [6], [6, 3, 6]])
@pytest.mark.parametrize("frequency", [1, 2, 4])
def test_the_rate_depends_on_the_epoch_and_not_on_the_way_there(path: list[int], frequency: int) -> None:
    optim = optimizer()
    schedulers = taken(Config(ExponentialLR(optim, gamma=0.5), frequency=frequency))
    optim.step()
    for epoch in path:
        schedulers.advance(epoch)
    assert optim.param_groups[0]["lr"] == pytest.approx(0.5 ** (6 // frequency))


def test_lightning_never_advances_what_was_taken_over() -> None:
    config = Config(StepLR(optimizer(), 1), interval="epoch", frequency=3)
    taken(config)
    assert config.interval == "step"
    assert all(batch % config.frequency != 0 for batch in (1, 3, 10**6))


def test_a_resumed_scheduler_is_not_advanced_to_where_its_state_already_is() -> None:
    optim = optimizer()
    schedulers = taken(Config(ExponentialLR(optim, gamma=0.5)))
    optim.step()
    schedulers.mark(10)
    schedulers.advance(11)
    assert optim.param_groups[0]["lr"] == 0.5


def test_plateau_is_refused() -> None:
    with pytest.raises(ArgumentError, match="CosineAnnealingLR"):
        refuse_plateau(Config(ReduceLROnPlateau(optimizer()), reduce_on_plateau=True))


def test_scheduler_fn_may_be_a_callable_or_a_ready_scheduler_of_the_same_optimizer() -> None:
    optim = optimizer()
    assert isinstance(scheduler_from(partial(ExponentialLR, gamma=0.9), optim), ExponentialLR)
    ready = StepLR(optim, 5)
    assert scheduler_from(ready, optim) is ready
    with pytest.raises(ArgumentError, match="another optimizer"):
        scheduler_from(StepLR(optimizer(), 5), optim)
    with pytest.raises(ArgumentError, match="expected a torch LRScheduler"):
        scheduler_from(lambda _: "no scheduler", optim)
