"""What one fit asks of the loop and of the module, with a real Trainer and an engine that only counts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("hivemind")

from lightning_hivemind import HivemindStrategy
from lightning_hivemind.engine.base import Engine, StepOutcome
from lightning_hivemind.peer.ranks import Ranks
from lightning_hivemind.training.precision import LossScale
from lightning_hivemind.training.session import TrainingSession


class Model(pl.LightningModule):
    """Its scheduler counts passes over the data; its gradient clipping is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.clipped: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.weight], lr=1.0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}]

    def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
        self.clipped.append(settings)


def make_session(**arguments: Any) -> tuple[TrainingSession, Any, Any]:
    strategy = HivemindStrategy(target_batch_size=8, initial_peers=[], **arguments)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    model = Model()
    model.trainer = trainer
    strategy.connect(model)
    strategy._lightning_module = model
    strategy.setup_optimizers(trainer)
    return TrainingSession(strategy.arguments, strategy, trainer, strategy.events), trainer, model


DELAYS = {"delay_grad_averaging": True, "delay_state_averaging": True}


@pytest.mark.parametrize("arguments", [{}, DELAYS], ids=["at once", "delayed"])
def test_overridden_gradient_clipping_is_called_without_gradient_clip_val_too(arguments: dict[str, Any]) -> None:
    session, trainer, model = make_session(**arguments)
    session._before_optimizer_step(trainer.optimizers[0])
    assert model.clipped == [{"gradient_clip_val": None, "gradient_clip_algorithm": None}]


def test_of_several_steps_in_a_row_each_has_its_own_global_step_in_hooks() -> None:
    """After a long validation, say, while the others stepped on: what a hook does by it must be the same everywhere."""
    session, trainer, model = make_session()
    engine, seen = CountingEngine(epoch=0), list[int]()
    session.engine = cast(Engine, engine)
    model.on_before_optimizer_step = lambda optimizer: seen.append(trainer.global_step)
    for engine.epoch in (4, 5, 6):
        session._before_optimizer_step(trainer.optimizers[0])
    assert seen == [4, 5, 6]


def test_a_scheduler_of_the_modules_own_way_sees_the_global_step_that_was_made() -> None:
    """As in a plain Trainer: timm's go by it."""
    session, trainer, model = make_session()
    seen = list[int]()
    model.lr_scheduler_step = lambda scheduler, metric: seen.append(trainer.global_step)
    session._make_scheduler(trainer.optimizers[0])
    session._schedulers.advance(1)
    session._progress.follow(5, committed=False)
    session._schedulers.advance(3)
    assert seen == [1, 5, 5], "a global step was undone for a scheduler"


def test_what_a_model_says_that_is_not_the_swarms_is_not_published() -> None:
    """Lightning's sanity check comes before the first batch, with a model that has not taken the swarm's state yet."""
    for arguments in ({}, {"auxiliary": True}):
        session, *_ = make_session(**arguments)
        engine, published = CountingEngine(epoch=0), list[tuple[str, float, int]]()
        engine.swarm_mean = lambda *said: published.append(said) or 2.0  # type: ignore[attr-defined] # noqa: B023
        session.engine = cast(Engine, engine)
        assert session.swarm_mean("loss", 10.8, 64) == 10.8
        assert not published
        session.started = True
        assert session.swarm_mean("loss", 10.8, 64) == 2.0
        assert published == [("loss", 10.8, 0 if arguments else 64)]


def test_a_helper_gives_its_trainer_back_what_it_left_away() -> None:
    session, trainer, _ = make_session(auxiliary=True)
    stops = pl.callbacks.EarlyStopping("val_loss")
    trainer.callbacks.append(stops)
    before = [*trainer.callbacks], trainer.limit_val_batches
    with pytest.raises(AttributeError):
        session.start(lambda: cast(Any, None))  # there is no network
    assert stops not in trainer.callbacks
    assert trainer.limit_val_batches == 0
    for _ in range(2):
        session.close(1.0)
        assert (set(trainer.callbacks), trainer.limit_val_batches) == (set(before[0]), before[1])
        assert len(trainer.callbacks) == len(before[0])


def test_a_helper_that_wants_to_stop_stops_alone() -> None:
    """It has no parameters of the swarm by which it could say that the run is over."""
    session, trainer, _ = make_session(auxiliary=True)
    engine = CountingEngine(epoch=0)
    engine.num_peers = 3
    session.engine = cast(Engine, engine)
    loop = trainer.fit_loop.epoch_loop
    session.step(0)
    trainer.should_stop = True
    session.begin_batch(8)
    session.step(0)
    assert not engine.stop_wanted
    assert loop.min_steps is None


class CountingEngine:
    """An engine alone in its swarm, whose step does nothing."""

    num_peers = 1

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.stop_wanted = False
        self.rescale: Callable[[float], None] = lambda factor: None

    def request_stop(self, reason: str) -> None:
        self.stop_wanted = True

    def restore(self, optimizer_state: Any, epoch: int, kept: Any) -> None:
        self.epoch = epoch

    def synchronise(self) -> StepOutcome:
        return StepOutcome(epoch=self.epoch, committed=False)

    def begin_batch(self) -> StepOutcome:
        """A step that was decided since the batch before."""
        self.epoch += 1
        return StepOutcome(epoch=self.epoch, committed=True)

    def step(self, samples: int, scale: float) -> StepOutcome:
        return StepOutcome(epoch=self.epoch, committed=False)

    def shutdown(self, timeout_s: float) -> None:
        pass

    def kept(self) -> dict[str, Any]:
        return {}

    stop_epoch, local_samples, swarm_samples = None, 0, 0


def test_a_step_that_is_made_just_before_a_batch_is_logged_with_that_batch() -> None:
    """Lightning logs, and counts steps for ``log_every_n_steps``, at the end of batches that stepped."""
    session, trainer, _ = make_session()
    session.engine = cast(Engine, CountingEngine(epoch=4))
    loop = trainer.fit_loop.epoch_loop
    session.begin_batch(8)
    assert trainer.global_step == 5
    assert session._progress._should_accumulate(), "the batch itself may still turn out to have no gradient"
    session.step(8)
    assert not session._progress._should_accumulate()
    assert loop._batches_that_stepped + 1 == trainer.global_step == 5


def test_a_sum_in_place_that_goes_on_after_a_commit_follows_the_loss_scale() -> None:
    """With offload, or overlap, what this peer has summed in ``p.grad`` is in no commit yet: it may never be empty."""
    session, *_ = make_session(reuse_grad_buffers=True, offload_optimizer=True)
    engine, calls = CountingEngine(epoch=4), list[float]()
    engine.local_samples, engine.rescale = 8, calls.append
    session.engine = cast(Engine, engine)
    for factor in (1.0, 2.0):
        session._scale = cast(LossScale, SimpleNamespace(after_commit=lambda: factor, buffer_scale=1.0))  # noqa: B023
        session.begin_batch(8)
    assert calls == [2.0]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_fit_that_ends_before_the_first_global_step_says_that_nothing_was_learned(
    stepped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session, trainer, _ = make_session()
    engine = CountingEngine(epoch=4)
    engine.local_samples, engine.swarm_samples = 5, 6
    session.engine = cast(Engine, engine)
    session._make_scheduler(trainer.optimizers[0])
    session.synchronise()
    if stepped:
        session.begin_batch(8)
    session.close(1.0)
    said = "of target_batch_size=8 samples it had 5 when it ended, the swarm 6" in caplog.text
    assert said is not stepped


@pytest.mark.parametrize("loaded", [0, 3], ids=["second fit", "plain checkpoint"])
def test_schedulers_stand_where_the_global_step_says_before_the_first_batch(loaded: int) -> None:
    session, trainer, _ = make_session()
    (config,) = trainer.strategy.lr_scheduler_configs
    optimizer = trainer.optimizers[0]
    session.engine = cast(Engine, CountingEngine(epoch=0))
    session._make_scheduler(optimizer)
    session.restore(optimizer.state_dict(), 10, {})
    config.scheduler.load_state_dict({**config.scheduler.state_dict(), "last_epoch": loaded})
    optimizer.param_groups[0]["lr"] = 0.5**loaded
    session.synchronise()
    assert config.scheduler.last_epoch == trainer.global_step == 10
    assert optimizer.param_groups[0]["lr"] == 0.5**10


def test_the_reason_to_stop_is_logged_where_it_arose(caplog: pytest.LogCaptureFixture) -> None:
    session, _, _ = make_session()
    engine = CountingEngine(epoch=0)
    session.engine = cast(Engine, engine)
    with caplog.at_level("INFO", logger="lightning_hivemind"):
        session.request_stop("the loss is low enough")
    assert engine.stop_wanted
    assert "asking the whole run to stop: the loss is low enough" in caplog.text


def test_a_session_that_got_no_engine_can_be_closed() -> None:
    session, _, _ = make_session()
    assert session.epoch == 0
    session.close(1.0)


@pytest.mark.parametrize(("reason", "told"), [("enough", "enough"), ("", "requested"), (ValueError("x"), "x")])
def test_whatever_the_reason_of_another_rank_is_rank_0_hears_that_it_wants_to_stop(reason: Any, told: str) -> None:
    session, _, _ = make_session()
    session._ranks = Ranks(1, 2)
    session.request_stop(reason)
    assert session._wish == told
