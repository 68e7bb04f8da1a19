"""A model in parts at two ranks: what is done together."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_hivemind.engine.base import Changed
from lightning_hivemind.errors import ArgumentError, RanksError
from lightning_hivemind.peer import portable
from lightning_hivemind.peer.sharded import Sharded
from lightning_hivemind.peer.shards import DistributedTensors
from unit.two_ranks import Told, of_both


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(3, 4)
        self.told: Any = None

    def get_extra_state(self) -> Any:
        return {"words": 7}

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def made(rank: int, group: Any, *, sums_first: bool = True) -> tuple[Sharded, Model]:
    model = Model()
    fully_shard(model.layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ranks: Any = Told(rank)
    shards = DistributedTensors(optimizer, model, model)
    return Sharded(ranks, group, shards, [], each_steps=True, sums_first=sums_first, hooked=False), model


def clipped(rank: int, group: Any) -> Any:
    """By a gradient of each rank's own, of ten times its loss."""
    sharded, model = made(rank, group, sums_first=False)
    torch.manual_seed(6)
    (10 * model.layer(torch.randn(5, 3))).square().mean().backward()
    sharded.clip_by_norm(0.5)
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


def test_the_norm_of_what_ranks_have_in_parts_is_that_of_the_whole() -> None:
    model = Model()
    torch.manual_seed(6)
    (10 * model.layer(torch.randn(5, 3))).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for found in of_both(clipped):
        for one, expected in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, expected.grad)


def refused(rank: int, group: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = Model()
    for placement in (Replicate(), Shard(0)):
        model.register_buffer("table", distribute_tensor(torch.arange(4.0), mesh, [placement]))
        try:
            DistributedTensors(torch.optim.SGD(model.parameters(), lr=0.1), model, model)
        except ArgumentError as error:
            return placement == Shard(0) and str(error)
    return "nothing"


def test_a_buffer_that_lies_in_parts_is_refused() -> None:
    assert all("the buffer table lies in parts" in one for one in of_both(refused))


def scalar(rank: int, group: Any) -> Any:
    """Of a model in parts that has a number for a parameter, too: what the optimizer keeps of it, told from rank 0."""
    model = Model()
    fully_shard(model.layer, mesh=init_device_mesh("cpu", (2,)))
    model.temperature = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    ranks: Any = Told(rank)
    shards = DistributedTensors(optimizer, model, model)
    sharded = Sharded(ranks, group, shards, [], each_steps=True, sums_first=True, hooked=False)
    (model.layer(torch.ones(5, 3)) / model.temperature).square().mean().backward()
    optimizer.step()
    sharded.refresh(Changed.OPTIMIZER)
    described = (
        [(name, type(one).__name__) for e in sharded._described() for name, one in e.items()] if not rank else []
    )
    sharded.values(Changed.OPTIMIZER)
    return described, {name: one.tolist() for name, one in optimizer.state[model.temperature].items()}


def test_what_an_optimizer_keeps_of_a_single_number_is_a_piece_but_for_its_counters() -> None:
    (described, mine), (_, theirs) = of_both(scalar)
    assert {kind for name, kind in described if name.startswith("exp")} == {"OfPiece"}
    assert {kind for name, kind in described if not name.startswith("exp")} == {"_Single"}
    assert mine == theirs
    assert mine["step"] == 1
    assert mine["exp_avg"] != 0


def failing(rank: int, group: Any) -> Any:
    sharded, _ = made(rank, group)
    try:
        sharded.at_rank_0(lambda: json.loads("{"))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing"


def test_what_fails_at_rank_0_fails_at_all() -> None:
    (first, _), (second, text) = of_both(failing)
    assert first == "JSONDecodeError"
    assert second == RanksError.__name__
    assert "JSONDecodeError" in text


def loaded(rank: int, group: Any) -> Any:
    sharded, model = made(rank, group)
    state = portable.state_dict(sharded)
    names = list(state)
    given = {"layer._orig_mod.weight" if name == "layer.weight" else name: one for name, one in state.items()}
    given |= {name: 2 * one for name, one in given.items() if isinstance(one, torch.Tensor)}
    portable.load_state_dict(sharded, given if rank == 0 else None, strict=True)
    return names, model.told, [p.full_tensor() for p in model.parameters()]  # type: ignore[operator]


def test_all_that_a_module_keeps_is_loaded_at_each_rank_whether_it_was_compiled_or_not() -> None:
    model = Model()
    (names, *first), (_, *second) = of_both(loaded)
    assert names == ["layer.weight", "layer.bias", "_extra_state"]
    for told, found in (first, second):
        assert told == {"words": 7}
        assert all(torch.equal(one, 2 * p) for one, p in zip(found, model.parameters(), strict=True))


def summed(rank: int, group: Any) -> Any:
    """Two batches; the bias has a gradient in the second one only. Rank 0 gets the sum, into what has other values."""
    sharded, model = made(rank, group)
    assert sharded.sums is not None
    torch.manual_seed(7)
    for factor in (0.5, 0.25):
        model.zero_grad()
        model.layer.bias.requires_grad_(factor == 0.25)
        model.layer(torch.randn(5, 3)).square().mean().backward()
        sharded.sums.add(factor, first=factor == 0.5)
    whole = [torch.full(shape, 9.0) for shape in sharded.shards.shapes] if rank == 0 else []
    reached = sharded.sums.gather(whole)
    return reached, whole


def test_ranks_sum_their_parts_and_rank_0_gets_the_whole_sum() -> None:
    model = Model()
    torch.manual_seed(7)
    expected = [torch.zeros(4, 3), torch.zeros(4)]
    for factor in (0.5, 0.25):
        model.zero_grad()
        model.layer(torch.randn(5, 3)).square().mean().backward()
        for number, one in enumerate(model.parameters()):
            assert one.grad is not None
            if number == 0 or factor == 0.25:
                expected[number] += factor * one.grad
    (reached, found), (also_reached, nothing) = of_both(summed)
    assert reached == also_reached == [True, True]
    assert not nothing
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right)


def added(rank: int, group: Any) -> Any:
    sharded, _ = made(rank, group)
    sharded.local.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    try:
        sharded.batch_ended()
    except Exception as error:
        return str(error)
    return "nothing"


def test_parameters_that_are_added_later_are_refused() -> None:
    assert all("added to the optimizer during the fit" in one for one in of_both(added))
