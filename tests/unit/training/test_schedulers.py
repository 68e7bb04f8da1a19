"""Schedulers are a function of the global step."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.training.schedulers import MARKED, SwarmSchedulers, log, refuse_plateau, scheduler_from


@dataclass
class Config:
    scheduler: Any
    interval: str = "step"
    frequency: int = 1
    reduce_on_plateau: bool = False


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def taken(config: Config, *, goes_back: bool = False) -> SwarmSchedulers:
    schedulers = SwarmSchedulers(lambda scheduler, epoch: scheduler.step(), goes_back=goes_back)
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


class Warmup(LRScheduler):
    """As in other packages: another scheduler, which has the optimizer, is part of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = ExponentialLR(optimizer, gamma=0.5)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch <= 2:
            return [0.1 * self.last_epoch for _ in self.base_lrs]
        self.after.step()
        return [group["lr"] for group in self.optimizer.param_groups]


MAKERS: dict[str, Any] = {
    "chainable": partial(ExponentialLR, gamma=0.5),
    "closed": lambda o: LambdaLR(o, lambda n: 0.5**n),
    "one cycle": lambda o: OneCycleLR(o, 1.0, total_steps=20),
    "sequence": lambda o: SequentialLR(o, [ExponentialLR(o, 0.9), ExponentialLR(o, 0.5)], milestones=[2]),
    "chained": lambda o: ChainedScheduler([ExponentialLR(o, 0.9), StepLR(o, 2)], optimizer=o),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "of another package": Warmup,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("frequency", [1, 2])
def test_who_takes_a_state_of_fewer_steps_goes_on_from_there(make: Any, frequency: int) -> None:
    """After a partition has healed: what two peers compute with then has to be the same."""
    back, straight = optimizer(), optimizer()
    for optim in (back, straight):
        optim.step()
    parameter, loser = back.param_groups[0]["params"][0], taken(Config(make(back), frequency=frequency), goes_back=True)
    others = taken(Config(make(straight), frequency=frequency))
    loser.resume(0)
    loser.advance(7)
    loser.take_back(3)
    for epoch in (3, 4, 9):
        loser.advance(epoch)
        others.advance(epoch)
        assert back.param_groups[0]["lr"] == straight.param_groups[0]["lr"]
    loser.take_back(9)
    loser.take_back(11)  # ahead is not back
    assert back.param_groups[0]["lr"] == straight.param_groups[0]["lr"]
    assert back.param_groups[0]["params"][0] is parameter


def test_no_more_steps_than_there_are_between_two_marks_are_repeated_to_go_back_a_little() -> None:
    optim = optimizer()
    optim.step()
    scheduler, calls = ExponentialLR(optim, gamma=0.99), 0

    def step(scheduler: Any, epoch: int) -> None:
        nonlocal calls
        calls += 1
        scheduler.step()

    schedulers = SwarmSchedulers(step, goes_back=True)
    schedulers.take_over([Config(scheduler)])
    schedulers.resume(0)
    for epoch in range(1, 1001):
        schedulers.advance(epoch)
    calls = 0
    for epoch in (999, 930, 10):  # the last one a long way
        schedulers.take_back(epoch)
        assert (scheduler.last_epoch, optim.param_groups[0]["lr"]) == (epoch, pytest.approx(0.99**epoch))
        assert calls <= MARKED
        calls = 0
    schedulers.advance(12)
    assert optim.param_groups[0]["lr"] == pytest.approx(0.99**12)


def test_what_a_checkpoint_has_put_into_a_scheduler_is_there_when_it_goes_back() -> None:
    """Lightning loads it after the scheduler was taken over; it may say something else than the script does now."""
    optim, other = optimizer(), optimizer()
    for one in (optim, other):
        one.step()
    saved = ExponentialLR(other, gamma=0.5)
    for _ in range(5):
        saved.step()
    scheduler = ExponentialLR(optim, gamma=0.9)
    schedulers = taken(Config(scheduler), goes_back=True)
    scheduler.load_state_dict(saved.state_dict())
    optim.param_groups[0]["lr"] = other.param_groups[0]["lr"]
    schedulers.resume(5)
    schedulers.advance(8)
    schedulers.take_back(6)
    assert optim.param_groups[0]["lr"] == 0.5**6
    schedulers.take_back(4)  # this fit has not been there
    assert (scheduler.last_epoch, optim.param_groups[0]["lr"]) == (6, 0.5**6)
    schedulers.advance(5)
    assert scheduler.last_epoch == 6
    schedulers.advance(7)
    assert scheduler.last_epoch == 7


class Bound(LRScheduler):
    """With a method of its own in its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rate = self.halved
        super().__init__(optimizer)

    def halved(self) -> float:
        return float(0.5**self.last_epoch)

    def get_lr(self) -> list[float]:
        return [self.rate() for _ in self.base_lrs]


def test_a_scheduler_s_own_methods_stay_its_own() -> None:
    optim = optimizer()
    optim.step()
    schedulers = taken(Config(Bound(optim)), goes_back=True)
    schedulers.resume(0)
    schedulers.advance(5)
    schedulers.take_back(2)
    schedulers.advance(4)
    assert optim.param_groups[0]["lr"] == 0.5**4


def test_a_scheduler_whose_state_cannot_be_copied_trains_all_the_same_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    optim = optimizer()
    optim.step()
    scheduler = ExponentialLR(optim, gamma=0.5)
    scheduler.lock = threading.Lock()  # type: ignore[attr-defined]
    schedulers = taken(Config(scheduler), goes_back=True)
    schedulers.resume(0)
    assert "a scheduler's state cannot be copied" in caplog.text
    schedulers.advance(5)
    schedulers.take_back(3)
    assert scheduler.last_epoch == 5
    schedulers.advance(6)
    assert scheduler.last_epoch == 6


def test_lightning_never_advances_what_was_taken_over() -> None:
    config = Config(StepLR(optimizer(), 1), interval="epoch", frequency=3)
    taken(config)
    assert config.interval == "step"
    assert all(batch % config.frequency != 0 for batch in (1, 3, 10**6))


def test_a_resumed_scheduler_is_not_advanced_to_where_its_state_already_is() -> None:
    optim = optimizer()
    scheduler = ExponentialLR(optim, gamma=0.5)
    schedulers = taken(Config(scheduler))
    optim.step()
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 10})
    schedulers.resume(10)
    assert optim.param_groups[0]["lr"] == 1.0
    schedulers.advance(11)
    assert optim.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("make", [lambda o: LambdaLR(o, lambda n: 0.5**n), partial(ExponentialLR, gamma=0.5)])
@pytest.mark.parametrize(("loaded", "frequency"), [(0, 1), (3, 1), (3, 2)])
def test_passes_over_the_data_in_a_plain_checkpoint_become_global_steps(make: Any, loaded: int, frequency: int) -> None:
    """A second fit begins at 0, a plain Trainer's ``interval="epoch"`` at 3; a joiner makes all steps itself."""
    resumed, joined = optimizer(), optimizer()
    for optim in (resumed, joined):
        optim.step()
    scheduler = make(resumed)
    schedulers = taken(Config(scheduler, interval="epoch", frequency=frequency))
    for _ in range(loaded):
        scheduler.step()
    schedulers.resume(10)
    joiner = taken(Config(make(joined), frequency=frequency))
    for epoch in (10, 11, 12):
        schedulers.advance(epoch)
        joiner.advance(epoch)
        assert resumed.param_groups[0]["lr"] == joined.param_groups[0]["lr"] == 0.5 ** (epoch // frequency)


def test_a_scheduler_that_is_made_or_kept_at_a_position_counts_from_there() -> None:
    optim = optimizer()
    optim.param_groups[0]["initial_lr"] = 1.0
    optim.step()
    made_at_7 = LambdaLR(optim, lambda n: 1.0 / n, last_epoch=6)
    schedulers = taken(Config(made_at_7))
    schedulers.resume(0)
    schedulers.advance(3)
    assert made_at_7.last_epoch == 10
    again = SwarmSchedulers(lambda scheduler, epoch: scheduler.step())
    again.take_over([Config(made_at_7)], epoch=3)  # the second fit got the same object
    again.resume(3)
    assert made_at_7.last_epoch == 10


def test_a_scheduler_that_is_past_the_global_step_is_refused_with_the_fix() -> None:
    optim = optimizer()
    scheduler = ExponentialLR(optim, gamma=0.5)
    schedulers = taken(Config(scheduler, frequency=2))
    scheduler.last_epoch = 10
    with pytest.raises(ArgumentError, match=r"position 10.*frequency=2 global step 10.*position 5"):
        schedulers.resume(10)


def test_whoever_advances_a_scheduler_is_told_the_global_step_of_each_of_its_positions() -> None:
    told: list[int] = []
    schedulers = SwarmSchedulers(lambda scheduler, epoch: (told.append(epoch), scheduler.step()))
    schedulers.take_over([Config(StepLR(optimizer(), 10), frequency=2)])
    schedulers.resume(5)
    schedulers.advance(9)
    assert told == [2, 4, 6, 8]


def test_chained_schedulers_tell_their_position_and_strange_ones_are_believed() -> None:
    optim = optimizer()
    optim.step()
    chained = ChainedScheduler([ExponentialLR(optim, gamma=0.5), StepLR(optim, 100)], optimizer=optim)
    calls: list[Any] = []
    schedulers = SwarmSchedulers(lambda scheduler, epoch: calls.append(scheduler))
    schedulers.take_over([Config(chained), Config(strange := SimpleNamespace(state_dict=dict))])
    schedulers.resume(4)
    assert calls == [chained] * 4
    schedulers.advance(5)
    assert calls[4:] == [chained, strange]


def test_two_threads_that_advance_to_one_epoch_advance_once() -> None:
    calls: list[str] = []

    def step(_: Any, epoch: int) -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            second.start()
            second.join(0.5)  # without a lock it is through at once, and has advanced, too

    schedulers = SwarmSchedulers(step)
    schedulers.take_over([Config(StepLR(optimizer(), 1))])
    second = threading.Thread(target=schedulers.advance, args=(1,), name="second")
    schedulers.advance(1)
    second.join()
    assert calls == [threading.current_thread().name]


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
