"""A training state as bytes and back: whole, checked, and harmless where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state.ranges import digest_of
from lightning_hivemind.engine.native.state.snapshot import (
    Description,
    can_stay,
    install,
    read_description,
    state_bytes,
    take_state,
)
from lightning_hivemind.engine.native.trail import Trail
from lightning_hivemind.errors import StateError

HEAD = Head(epoch=3, lineage=b"x" * 16, samples=300)
Kind = Callable[[list[Tensor]], Optimizer]
KINDS: dict[str, Kind] = {
    "SGD": lambda params: SGD(params, lr=0.1),
    "SGD with momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: AdamW(params, lr=0.1),
    "AdamW with amsgrad": lambda params: AdamW(params, lr=0.1, betas=(0.8, 0.99), amsgrad=True),
    "Adam, rate a tensor": lambda params: Adam(params, lr=torch.tensor(0.1), foreach=False),
    "RMSprop": lambda params: RMSprop(params, lr=0.1, centered=True, momentum=0.5),
    "Adagrad": lambda params: Adagrad(params, lr=0.1),
}


def adamw(params: list[Tensor]) -> Optimizer:
    return AdamW(params, lr=0.1, amsgrad=True)


def parameters(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One of several dimensions, a frozen one, one of half the precision, a number, an empty one."""
    torch.manual_seed(seed)
    shapes = ((4, 3), (3,), (5,), (), (0, 2))
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    params[1].requires_grad_(False)
    params[2] = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
    return params


def owned(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def train(optimizer: Optimizer, steps: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        for parameter in owned(optimizer):
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def digests(memory: Tensor, description: Description) -> tuple[bytes, ...]:
    return tuple(digest_of(bytes(memory[place].numpy())) for place in description.spans)


def transfer(donor: Optimizer, joiner: Optimizer, mine: list[Tensor], theirs: list[Tensor]) -> Description:
    snapshot = take_state(donor, mine, [], Trail(HEAD)).described()
    description, memory = read_description(snapshot.description, joiner, theirs, []), snapshot.content.copy().clone()
    assert digests(memory, description) == description.ranges
    install(description, memory, joiner, theirs, [])
    memory.fill_(255)  # it is not used any more
    return description


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.detach().clone().flatten().view(torch.uint8).tolist()
    return found


def contents(optimizer: Optimizer) -> dict[str, tuple[Any, ...]]:
    """Everything that is in it, to be compared bit for bit."""
    found: dict[str, tuple[Any, ...]] = {}
    for index, parameter in enumerate(owned(optimizer)):
        for name, value in {"itself": parameter, **optimizer.state.get(parameter, {})}.items():
            plain = (bits(value), value.dtype, value.shape) if isinstance(value, Tensor) else (value,)
            found[f"{index}.{name}"] = plain
    for index, group in enumerate(optimizer.param_groups):
        found[f"group {index}"] = tuple((k, type(v), str(v)) for k, v in sorted(group.items()) if k != "params")
    return found


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_who_takes_a_state_goes_on_bit_for_bit_as_who_gave_it(kind: Kind, steps: int) -> None:
    donor, joiner = kind(parameters(1)), kind(parameters(2))
    train(donor, steps)
    assert contents(donor) != contents(joiner)
    transfer(donor, joiner, [], [])
    assert contents(donor) == contents(joiner)
    train(donor, 3, seed=7)
    train(joiner, 3, seed=7)
    assert contents(donor) == contents(joiner)


LAYOUTS: dict[str, tuple[torch.dtype, Kind]] = {
    "fused AdamW": (torch.float32, lambda params: AdamW(params, lr=0.1, fused=True)),
    "half the precision": (torch.bfloat16, lambda params: SGD(params, lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("layout", ["channels last", "transposed"])
@pytest.mark.parametrize("which", LAYOUTS)
def test_what_the_optimizer_keeps_lies_in_memory_as_its_parameter_does(which: str, layout: str) -> None:
    """Fused optimizers look at memory only; and rounding may depend on the order."""
    dtype, kind = LAYOUTS[which]

    def make(seed: int) -> Optimizer:
        torch.manual_seed(seed)
        weights = torch.randn(16, 8, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
        return kind([torch.nn.Parameter(weights if layout == "channels last" else weights.flatten(1).T)])

    def train_equally(optimizer: Optimizer) -> None:
        torch.manual_seed(7)
        for _ in range(20):
            for one in owned(optimizer):
                one.grad = torch.empty_like(one).copy_(torch.randn(one.shape))
            optimizer.step()

    donor, joiner = make(1), make(2)
    assert not owned(donor)[0].is_contiguous()
    train(donor, 2)
    transfer(donor, joiner, [], [])
    train_equally(donor)
    train_equally(joiner)
    assert contents(joiner) == contents(donor)


def test_what_sparse_gradients_have_left_is_given_as_plain_tensors() -> None:
    """A momentum of an embedding, with local updates."""

    def make(seed: int) -> Optimizer:
        torch.manual_seed(seed)
        return SGD([torch.nn.Parameter(torch.randn(5, 3))], lr=0.1, momentum=0.9)

    def train_sparse(optimizer: Optimizer) -> None:
        (one,) = owned(optimizer)
        one.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 3), (5, 3), check_invariants=True)
        optimizer.step()

    donor, joiner = make(1), make(2)
    train_sparse(donor)
    (kept,) = (entry["momentum_buffer"] for entry in donor.state.values())
    assert kept.is_sparse
    assert not can_stay(donor)
    transfer(donor, joiner, [], [])
    assert state_bytes(donor, [], []) == state_bytes(joiner, [], [])
    for one in (donor, joiner):
        train_sparse(one)
    assert torch.equal(owned(donor)[0], owned(joiner)[0])


def test_what_the_taker_had_learned_itself_is_gone() -> None:
    donor, joiner = adamw(parameters(1)), adamw(parameters(2))
    train(joiner, 2)
    transfer(donor, joiner, [], [])
    assert contents(donor) == contents(joiner)
    assert not joiner.state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_number_that_an_optimizer_keeps_has_its_own_precision(dtype: torch.dtype) -> None:
    """NAdam's mu_product is float32 whatever the parameter is: else the two peers drift apart."""
    donor, joiner = (NAdam(parameters(seed, dtype)[:1], lr=0.1) for seed in (1, 2))
    train(donor, 3)
    transfer(donor, joiner, [], [])
    assert contents(donor) == contents(joiner)


def test_tensors_of_all_sorts_come_along() -> None:
    mine = [
        torch.tensor(41),
        torch.tensor([True, False, True]),
        torch.arange(12, dtype=torch.float64).view(3, 4).t(),
        torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float16),
        torch.empty(0),
        torch.arange(7, dtype=torch.int8),
        torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64),  # frequencies of rotary embeddings, say
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1, 2, 65535], dtype=torch.uint16),
    ]
    theirs = [torch.zeros_like(one) for one in mine]
    kept = theirs[2].data_ptr()
    transfer(SGD(parameters(1), lr=0.1), SGD(parameters(2), lr=0.1), mine, theirs)
    assert [bits(one) for one in theirs] == [bits(one) for one in mine]
    assert theirs[2].data_ptr() == kept, "the model holds the old tensor still"


def test_rates_are_the_donors_and_settings_keep_their_types() -> None:
    mine, theirs = parameters(1), parameters(2)
    donor = AdamW([{"params": mine[:2], "lr": 0.5}, {"params": mine[2:]}], lr=0.25, betas=(0.5, 0.75))
    rates = [torch.tensor(0.0), 0.0]
    joiner = AdamW([{"params": theirs[:2], "lr": rates[0]}, {"params": theirs[2:]}], lr=0.0, foreach=False)
    donor.param_groups[0]["foreach"] = donor.param_groups[1]["foreach"] = False
    transfer(donor, joiner, [], [])
    first, second = joiner.param_groups
    assert isinstance(first["lr"], Tensor)
    assert (float(first["lr"]), second["lr"]) == (0.5, 0.25)
    assert first["betas"] == second["betas"] == (0.5, 0.75)
    assert [len(group["params"]) for group in joiner.param_groups] == [2, 3]
    assert first["params"][0] is theirs[0]


@pytest.mark.parametrize("scheduled", ["donor", "joiner"])
def test_who_has_no_scheduler_s_settings_in_its_groups_takes_and_gives_a_state(scheduled: str) -> None:
    """torch replaces groups by those of a checkpoint, which may be from before there was a scheduler."""
    peers = {"donor": adamw(parameters(1)), "joiner": adamw(parameters(2))}
    for group in peers[scheduled].param_groups:
        group["initial_lr"] = 0.75
    transfer(peers["donor"], peers["joiner"], [], [])
    assert ("initial_lr" in peers["joiner"].param_groups[0]) == (scheduled == "joiner")


def test_settings_that_go_with_a_device_stay_the_takers() -> None:
    donor, joiner = adamw(parameters(1)), adamw(parameters(2))
    donor.param_groups[0]["capturable"] = True  # as on a GPU
    transfer(donor, joiner, [], [])
    train(joiner, 1)


def test_a_snapshot_does_not_change_when_training_goes_on() -> None:
    donor, tensor = adamw(parameters(1)), torch.zeros(3)
    train(donor, 1)
    snapshot = take_state(donor, [tensor], [], Trail(HEAD)).described()
    before = snapshot.content.copy().clone()
    train(donor, 2)
    tensor.add_(1)
    assert torch.equal(snapshot.content.copy(), before)
    assert snapshot.content.copy().dtype == torch.uint8


def digest(optimizer: torch.optim.Optimizer) -> bytes:
    return take_state(optimizer, [], [], Trail(HEAD)).described().digest


def test_equal_states_are_equal_bytes() -> None:
    first, second = adamw(parameters(1)), adamw(parameters(1))
    train(first, 2)
    train(second, 2)
    assert digest(first) == digest(second)
    train(second, 1)
    assert digest(first) != digest(second)


def test_what_lies_between_tensors_is_equal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = digest(adamw(parameters(1)))
    monkeypatch.setattr(Memory, "bytes", lambda _, count: torch.full((count,), 7, dtype=torch.uint8))
    assert digest(adamw(parameters(1))) == clean


def test_a_description_says_whose_it_is_and_how_much() -> None:
    donor = adamw(parameters(1))
    train(donor, 1)
    snapshot = take_state(donor, [], [], Trail(HEAD)).described()
    description = read_description(memoryview(snapshot.description), donor, [], [])
    assert description.head == snapshot.head == HEAD
    assert description.size == snapshot.content.copy().numel()
    assert description.digest == snapshot.digest


def test_one_wrong_bit_is_found() -> None:
    donor = adamw(parameters(1))
    snapshot = take_state(donor, [], [], Trail(HEAD)).described()
    description, memory = read_description(snapshot.description, donor, [], []), snapshot.content.copy().clone()
    memory[17] ^= 4
    assert digests(memory, description) != description.ranges


# ---------------------------------------------------------------------- what cannot be handed over


class Remembers(SGD):
    """Keeps something besides tensors and numbers."""

    what: object = "text"

    def step(self, closure: Any = None) -> Any:
        for parameter in owned(self):
            self.state[parameter]["what"] = self.what
        return super().step(closure)


@pytest.mark.parametrize("what", ["text", [1.0], {"a": 1}, object()], ids=["text", "list", "dict", "object"])
def test_an_optimizer_that_keeps_other_things_is_refused_by_name(what: object) -> None:
    donor = Remembers(parameters(1), lr=0.1)
    donor.what = what
    train(donor, 1)
    with pytest.raises(StateError, match="Remembers keeps what"):
        take_state(donor, [], [], Trail(HEAD)).described()


@pytest.mark.parametrize(
    "setting",
    [lambda: None, torch.float32, torch.tensor([0.1, 0.2]), {1, 2}],
    ids=["function", "dtype", "two rates", "set"],
)
def test_a_setting_that_is_no_plain_value_is_refused(setting: object) -> None:
    donor = SGD(parameters(1), lr=0.1)
    donor.param_groups[0]["setting"] = setting
    with pytest.raises(StateError):
        take_state(donor, [], [], Trail(HEAD)).described()


def test_a_dtype_that_nobody_else_may_have_is_refused() -> None:
    with pytest.raises(StateError, match="complex32"):
        take_state(SGD(parameters(1), lr=0.1), [torch.zeros(2, dtype=torch.complex32)], [], Trail(HEAD)).described()


# ---------------------------------------------------------------------- what does not fit

MISFITS: dict[str, tuple[str, Callable[[], tuple[Optimizer, list[Tensor]]]]] = {
    "another shape": (r"tensor 0 .*\(4, 3\), here .*\(3, 4\)", lambda: (adamw([matrix(3, 4), *parameters(1)[1:]]), [])),
    "another precision": ("float32 .* here .*bfloat16", lambda: (adamw([matrix().bfloat16(), *parameters(1)[1:]]), [])),
    "fewer parameters": ("5 parameters in 1 groups, here 4 in 1", lambda: (adamw(parameters(1)[:4]), [])),
    "more parameters": ("here 6 in 1", lambda: (adamw([*parameters(1), torch.zeros(9)]), [])),
    "more tensors": ("tensor", lambda: (adamw(parameters(1)), [torch.zeros(2)])),
    "another optimizer": ("groups have", lambda: (SGD(parameters(1), lr=0.1, momentum=0.9), [])),
    "more groups": ("1 groups, here 5 in 5", lambda: (AdamW([{"params": [one]} for one in parameters(1)]), [])),
}


def matrix(rows: int = 4, columns: int = 3) -> Tensor:
    return torch.zeros(rows, columns)


@pytest.mark.parametrize(("message", "other"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_of_another_training_is_refused_and_nothing_changes(
    message: str, other: Callable[[], tuple[Optimizer, list[Tensor]]], steps: int
) -> None:
    donor, (joiner, tensors) = adamw(parameters(1)), other()
    train(donor, steps)
    before = contents(joiner)
    with pytest.raises(StateError, match=message):
        read_description(take_state(donor, [], [], Trail(HEAD)).described().description, joiner, tensors, [])
    assert contents(joiner) == before
