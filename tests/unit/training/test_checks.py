"""What is refused before anything is started."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("hivemind")

from lightning_hivemind import HivemindStrategy
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.training.checks import check_trainer


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def check(
    precision: str, model: Model | None = None, callbacks: Any = (), num_nodes: int = 1, **arguments: Any
) -> None:
    strategy: Any = HivemindStrategy(target_batch_size=8, initial_peers=[], **arguments)
    trainer = pl.Trainer(
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        accelerator="cpu",
        devices=1,
        num_nodes=num_nodes,
        logger=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
    )
    strategy._lightning_module = model = Model() if model is None else model
    model.trainer = trainer
    strategy.connect(strategy.precision_plugin.convert_module(model))
    strategy.setup_optimizers(trainer)
    check_trainer(strategy.arguments, strategy, trainer)


class WithOptimizer(Model):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda parameters: None, "returned 0 optimizers"),
        (lambda parameters: torch.optim.SparseAdam(list(parameters)), "sparse gradients only"),
        (torch.optim.LBFGS, "several times in one step"),
    ],
    ids=["none", "SparseAdam", "LBFGS"],
)
def test_an_optimizer_that_cannot_step_on_averages_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        check("32-true", WithOptimizer(make))


def test_a_module_without_a_shape_is_refused() -> None:
    model = Model()
    model.layer = torch.nn.LazyLinear(2)  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"layer\.weight has no shape yet"):
        check("32-true", model)


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (pl.callbacks.LearningRateFinder, "before the fit"),
        (pl.callbacks.BatchSizeFinder, "before the fit"),
        (lambda: pl.callbacks.StochasticWeightAveraging(0.1), "by each peer's own passes"),
        (lambda: pl.callbacks.ModelPruning("l1_unstructured"), "unlike masks"),
    ],
    ids=["learning rate", "batch size", "SWA", "pruning"],
)
def test_a_callback_that_would_part_peers_is_refused(callback: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        check("32-true", callbacks=[callback()])


OFFLOADED = [{"offload_optimizer": True}, {"delay_state_averaging": True}]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("arguments", OFFLOADED, ids=lambda a: next(iter(a)))
def test_a_host_optimizer_steps_in_float32_only(precision: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"parameter .* has dtype torch\.\w*float\d+.*Trainer\(precision="):
        check(precision, **arguments)


class Scheduled(Model):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@pytest.mark.parametrize("arguments", OFFLOADED, ids=lambda a: next(iter(a)))
def test_a_scheduler_of_the_module_is_refused_where_the_optimizer_is_created_anew(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"configure_optimizers returned a scheduler.*scheduler_fn="):
        check("32-true", Scheduled(), **arguments)
    check("32-true", Scheduled(), **{**arguments, "offload_optimizer": False})
    check("32-true", **arguments, scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def test_double_precision_is_refused_because_averaging_would_round_it() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.float64.*round it to float32.*32-true"):
        check("64-true")


def test_a_module_that_converts_itself_is_seen_too() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.bfloat16"):
        check("32-true", Model().bfloat16(), offload_optimizer=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true"])
def test_what_two_peers_can_train_in_is_let_through(precision: str) -> None:
    check(precision)
    if precision in ("32-true", "bf16-mixed"):
        check(precision, offload_optimizer=True)


@pytest.mark.parametrize("engine", ["native", "hivemind"])
def test_extra_tensors_that_have_no_average_are_refused(engine: str) -> None:
    for extra in (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.bool), torch.zeros(1).to(torch.cfloat)):
        with pytest.raises(ArgumentError, match=r"extra_tensors: one of torch\.\w+, with shape .*has no average"):
            check("32-true", extra_tensors=[torch.zeros(3), extra], engine=engine)
    counter = torch.zeros((), dtype=torch.int64)
    if engine == "native":
        check("32-true", extra_tensors=[counter], engine=engine)
    else:
        with pytest.raises(ArgumentError, match=r"torch\.int64"):
            check("32-true", extra_tensors=[counter], engine=engine)


def test_extra_tensors_on_a_device_exclude_a_host_optimizer() -> None:
    there = torch.zeros(1, device="meta")
    with pytest.raises(ArgumentError, match=r"extra_tensors on meta.*offload_optimizer"):
        check("32-true", extra_tensors=[there], offload_optimizer=True)
    check("32-true", extra_tensors=[there])


def test_several_nodes_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ArgumentError, match="Leave num_nodes away, and start the script on each machine"):
        check("32-true", num_nodes=2)


def test_who_accumulates_by_a_callback_is_told_of_that() -> None:
    with pytest.raises(ArgumentError, match=r"^GradientAccumulationScheduler: the swarm accumulates already"):
        check("32-true", callbacks=[pl.callbacks.GradientAccumulationScheduler({0: 2})])
