"""``average_opt_statistics`` with local updates: moments of the optimizer become those of the swarm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lightning_hivemind.codecs import BlockwiseQuantization, PerTensorCompression
from lightning_hivemind.engine.native.codecs.integer import Blockwise8Bit
from lightning_hivemind.engine.native.codecs.mapping import map_codec
from lightning_hivemind.engine.native.moments import Moments
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.stepper import Stepper
from lightning_hivemind.engine.priming import prime_statistics
from lightning_hivemind.errors import ArgumentError
from swarm.training import training_of

ROOT = Head.root("run", "founder")
ONE = Head(epoch=1, lineage=b"x" * 16, samples=64)
MOMENTS = ["exp_avg", "exp_avg_sq"]


class Local:
    """A peer that makes steps of Adam by itself."""

    def __init__(self, moments: list[str]) -> None:
        torch.manual_seed(0)
        self.weight, self.frozen = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.ones(2), False)
        self.optimizer = torch.optim.Adam([self.weight, self.frozen], lr=0.1)
        self.stepper = Stepper(training_of(self.optimizer), ROOT, delayed=False, local=True, moments=moments)

    def batch(self, gradient: list[float]) -> None:
        self.weight.grad = torch.tensor(gradient)
        self.stepper.step_alone()

    def state(self, name: str) -> list[float]:
        found: list[float] = self.optimizer.state[self.weight][name].tolist()
        return found


def adam(weight: Tensor) -> torch.optim.Optimizer:
    return torch.optim.Adam([weight], lr=0.1)


def test_before_the_first_step_there_are_zeros_and_the_first_step_is_as_without() -> None:
    with_moments, without = Local(MOMENTS), Local([])
    assert with_moments.state("exp_avg") == [0.0] * 3
    assert with_moments.frozen not in with_moments.optimizer.state
    for peer in (with_moments, without):
        peer.batch([1.0, -2.0, 0.0])
    assert torch.equal(with_moments.weight, without.weight)
    assert with_moments.state("exp_avg_sq") == without.state("exp_avg_sq")


def test_after_a_round_all_have_the_mean_of_the_moments() -> None:
    peers = [Local(MOMENTS), Local(MOMENTS), Local([])]
    gradients = [[1.0, 0.0, 3.0], [-1.0, 2.0, 3.0], [1.0, 0.0, 3.0]]
    for peer, gradient in zip(peers, gradients, strict=True):
        peer.batch(gradient)
    mean = [(a + b) / 2 for a, b in zip(peers[0].state("exp_avg_sq"), peers[1].state("exp_avg_sq"), strict=True)]
    alone = peers[2].state("exp_avg_sq")
    changes = [peer.stepper.statistics.changes(0) for peer in peers]
    assert [one.numel() for one in changes] == [9, 9, 3]
    average = (changes[0] + changes[1]) / 2
    for peer, change in zip(peers, changes, strict=True):
        peer.stepper.step(average[: change.numel()], ONE, change)
    assert peers[0].state("exp_avg_sq") == peers[1].state("exp_avg_sq") == pytest.approx(mean)
    assert peers[0].state("exp_avg") == peers[1].state("exp_avg") == pytest.approx([0.0, 0.1, 0.3], abs=1e-7)
    assert torch.equal(peers[0].weight, peers[1].weight)
    assert peers[2].state("exp_avg_sq") == alone, "each keeps its own unless it was asked for"


def test_what_came_meanwhile_is_carried_in_parameters_and_not_in_moments() -> None:
    """A moment that this peer's batches made smaller meanwhile would get below zero."""
    own, moment = torch.zeros(1), torch.tensor([8.0])
    statistics = Statistics([own], carries=True, moments=[moment])
    own += 1.0
    given = statistics.changes(0)
    own += 2.0
    moment *= 0.5
    statistics.step(torch.tensor([1.5, -6.0]), 1, given)
    statistics.publish()
    assert (own.item(), moment.item()) == (3.5, 2.0)


def test_rounding_makes_no_second_moment_negative() -> None:
    tensors = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])]
    statistics = Statistics([tensors[0]], carries=True, moments=[tensors[1]])
    statistics.step(torch.tensor([-1.0000001, -3.0, -1e-9] * 2), 1)
    statistics.publish()
    assert tensors[0].tolist() == pytest.approx([0.0, -2.0, 0.0], abs=1e-6)
    assert tensors[0][0] < 0
    assert tensors[1].tolist() == pytest.approx([0.0, -2.0, -1e-9]), "a first moment may be negative"
    assert tensors[1][0] == 0.0


@pytest.mark.parametrize("found", ["loaded", "replaced", "gone"])
def test_the_optimizer_goes_on_with_the_tensors_that_are_averaged(found: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = adam(weight)
    moments = Moments(optimizer, ["exp_avg_sq"])
    (kept,) = moments.tensors
    weight.grad = torch.ones(2)
    optimizer.step()
    before = kept.tolist()
    if found == "loaded":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif found == "replaced":
        optimizer.state[weight]["exp_avg_sq"] = kept * 2
        before = [2 * value for value in before]
    else:  # a checkpoint from before the first step
        optimizer.state.clear()
        before = [0.0, 0.0]
    moments.keep()
    assert optimizer.state[weight]["exp_avg_sq"] is kept
    assert kept.tolist() == before
    optimizer.step()
    assert kept.tolist() != before


def test_a_state_that_is_there_is_left_as_it_is() -> None:
    """A user's warm optimizer, or that of a fit before."""
    warm, new = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.NAdam([{"params": [warm]}, {"params": [new], "weight_decay": 0.5}])
    warm.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    before = copy.deepcopy(optimizer.state[warm])
    moments = Moments(optimizer, ["exp_avg"])
    assert [tensor.shape for tensor in moments.tensors] == [(2,), (3,)]
    for name, value in before.items():
        assert torch.equal(optimizer.state[warm][name], value), name
    assert (optimizer.state[new]["step"].item(), optimizer.state[new]["mu_product"].item()) == (0.0, 1.0)
    assert optimizer.param_groups[1]["weight_decay"] == 0.5
    assert warm.grad is not None
    assert new.grad is None
    assert new.tolist() == [1.0] * 3


def test_an_optimizer_that_has_no_first_step_without_a_gradient_is_named() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SparseAdam([weight])
    with pytest.raises(ArgumentError, match="SparseAdam has none before its first step"):
        Moments(optimizer, ["exp_avg"])
    assert weight.grad is None


def test_where_hivemind_looks_every_parameter_must_have_it() -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], "momentum": 0.9},
        {"params": [torch.nn.Parameter(torch.zeros(3))]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert len(prime_statistics(optimizer, ["momentum_buffer"])) == 1
    with pytest.raises(ArgumentError, match="keeps no 'momentum_buffer' that can be averaged of all parameters"):
        prime_statistics(optimizer, ["momentum_buffer"], of_all=True)


def test_what_is_not_given_to_the_model_yet_is_no_change() -> None:
    """A step that was made in the background: the tensors are still those of the step before."""
    own = torch.zeros(2)
    statistics = Statistics([own])
    own += 3.0
    statistics.step(torch.tensor([1.0, 1.0]), 1)
    assert statistics.changes(1).tolist() == [0.0, 0.0]
    statistics.publish()
    own += 2.0
    assert statistics.changes(1).tolist() == [2.0, 2.0]


def test_a_joiner_has_the_swarms_moments() -> None:
    donor, joiner = Local(MOMENTS), Local(MOMENTS)
    donor.batch([1.0, -2.0, 3.0])
    donor.stepper.step(donor.stepper.statistics.changes(0), ONE, donor.stepper.statistics.changes(0))
    common = donor.state("exp_avg_sq")
    donor.batch([5.0, 5.0, 5.0])
    snapshot = donor.stepper.snapshot(None)
    assert snapshot is not None
    joiner.stepper.adopt(joiner.stepper.read(memoryview(snapshot.description)), snapshot.content.copy())
    assert joiner.state("exp_avg_sq") == common != donor.state("exp_avg_sq")
    joiner.batch([0.0, 0.0, 0.0])
    assert joiner.state("exp_avg_sq") != common
    assert joiner.stepper.statistics.changes(1)[-3:].any()


@pytest.mark.parametrize(
    ("optimizer", "names", "says"),
    [
        (
            adam,
            ["exp_avg_sq", "momentum_buffer"],
            "Adam, .* no 'momentum_buffer' .*; it keeps 'step', 'exp_avg', 'exp_avg_sq'",
        ),
        (lambda weight: torch.optim.SGD([weight], lr=0.1), ["momentum_buffer"], "SGD, .*; leave the argument away"),
    ],
)
def test_what_the_optimizer_does_not_keep_is_named(optimizer, names: list[str], says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=says):
        Moments(optimizer(torch.nn.Parameter(torch.zeros(2))), names)


def test_moments_are_sent_as_they_are() -> None:
    """Beside large ones small ones would be rounded to zero, which Adam divides by."""
    coding = map_codec(PerTensorCompression([BlockwiseQuantization()]), "state_averaging_compression")
    assert [type(codec).__name__ for _, codec in coding.of_all([100, 100], 0, 1)] == [Blockwise8Bit.__name__, "Exact"]
