"""What other ranks hear of rank 0's engine, and when: they step on what they have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_hivemind.engine.base import Changed, PeerTraining, StepOutcome
from lightning_hivemind.peer.leader import LeadingEngine
from lightning_hivemind.peer.words import Done, Gather, Step, Values
from swarm.training import training_of


class Told:
    """Ranks that note what they are told."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def tell(self, word: Any) -> None:
        self.words.append(word)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        yield


class Model:
    """Whose values are handed out, gathered and stepped on, in this order."""

    each_steps = changes_with_statistics = clips_elsewhere = True
    steps_on, steps_by, sums = None, "DeepSpeedCPUAdam", None

    def __init__(self, optimizer: torch.optim.Optimizer, *, in_parts: bool) -> None:
        self.optimizer = self.local = optimizer
        self.in_parts = in_parts
        self.done: list[Any] = []

    def batch_ended(self) -> None:
        self.done.append("batch ended")

    def values(self, changed: Changed) -> None:
        self.done.append(("values", changed))

    def refresh(self, what: Changed) -> None:
        self.done.append(("refreshed", what))

    def gradients(self, reached: list[bool]) -> None:
        self.done.append("gradients")


class Engine:
    """Does in :meth:`step` what the test says."""

    epoch, num_peers, local_samples, swarm_samples, stop_epoch = 3, 1, 0, 0, None

    def __init__(self, training: PeerTraining) -> None:
        self.training, self.optimizer = training, training.optimizer
        self.do: Any = lambda training: None

    def step(self, batch_samples: int, gradient_scale: float) -> StepOutcome:
        self.do(self.training)
        return StepOutcome(epoch=self.epoch, committed=False)

    def flush(self) -> None:
        self.do(self.training)


def leading(*, in_parts: bool = True, hooked: bool = False, **fields: Any) -> tuple[LeadingEngine, Engine, Told, Model]:
    """``fields``: of what the strategy gives to train."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    ranks, model, made = Told(), Model(optimizer, in_parts=in_parts), []

    def make(training: PeerTraining) -> Any:
        made.append(Engine(training))
        return made[0]

    like: Any = ranks, model
    training = training_of(optimizer, **fields)
    return LeadingEngine(make, training, *like, sums_first=True, hooked=hooked), made[0], ranks, model


def test_a_norm_that_is_computed_elsewhere_is_said_with_what_makes_the_steps() -> None:
    said = [leading(hooked=hooked)[1].training.steps_by for hooked in (False, True)]
    assert said == ["DeepSpeedCPUAdam", "DeepSpeedCPUAdam and a norm of elsewhere"]


def test_where_rank_0_alone_steps_hooks_see_its_settings_and_each_rank_its_own_gradients() -> None:
    host, seen = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.01), list[torch.optim.Optimizer]()
    _, engine, _, model = leading(in_parts=False, hooked=True, before_optimizer_step=seen.append)
    model.each_steps = False
    model.host_gradients = model.take_back = lambda *given: None  # type: ignore[attr-defined]
    engine.training.before_optimizer_step(host)
    (group,) = seen[0].param_groups
    assert group["lr"] == 0.01
    assert group["params"][0] is model.local.param_groups[0]["params"][0]
    group["lr"] = 0.02
    assert host.param_groups[0]["lr"] == 0.02


def adopt_and_step(training: PeerTraining) -> None:
    training.changed(Changed.STATE)
    training.before_optimizer_step(training.optimizer)


def test_a_state_that_was_taken_is_at_all_ranks_before_they_step_on_it() -> None:
    engine, real, ranks, model = leading()
    real.do = adopt_and_step
    engine.step(8)
    assert model.done == ["batch ended", ("values", Changed.STATE), "gradients"]
    assert [type(word) for word in ranks.words] == [Values, Step, Done]


def test_of_whole_models_what_was_stepped_on_goes_out_once_at_the_end() -> None:
    engine, real, ranks, model = leading(in_parts=False)
    real.do = adopt_and_step
    engine.step(8)
    assert model.done == ["batch ended", "gradients", ("values", Changed.STATE)]
    assert [type(word) for word in ranks.words] == [Step, Values, Done]


def test_what_the_engine_has_put_there_is_not_fetched_over() -> None:
    engine, real, ranks, model = leading()

    def outer_step(training: PeerTraining) -> None:
        training.changed(Changed.PARAMETERS)
        assert training.refresh is not None
        training.refresh(Changed.PARAMETERS)

    real.do = outer_step
    engine.step(8)
    assert model.done[1:] == [("values", Changed.PARAMETERS), ("refreshed", Changed.PARAMETERS)]
    assert [type(word) for word in ranks.words] == [Values, Gather, Done]


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_checkpoint_of_parts_has_what_was_under_way(in_parts: bool) -> None:
    """Of a whole model it is rank 0 that writes, and the others hear with the next batch."""
    engine, real, ranks, model = leading(in_parts=in_parts)
    real.do = lambda training: training.changed(Changed.PARAMETERS)
    engine.flush()
    assert model.done == ([("values", Changed.PARAMETERS)] if in_parts else [])
    assert bool(ranks.words) == in_parts
