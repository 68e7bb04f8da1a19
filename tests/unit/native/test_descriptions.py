"""What another peer says of its state: a description that can be used, or a StateError that changes nothing."""

from __future__ import annotations

import copy
import tracemalloc
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state.snapshot import Description, install, read_description, take_state
from lightning_hivemind.engine.native.trail import Trail
from lightning_hivemind.errors import StateError


def adamw(seed: int, *, steps: int = 0) -> torch.optim.AdamW:
    """Of a parameter that is trained and a frozen one."""
    torch.manual_seed(seed)
    trained, frozen = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3), requires_grad=False)
    optimizer = torch.optim.AdamW([trained, frozen], lr=0.1, amsgrad=True)
    for _ in range(steps):
        trained.grad = torch.randn(4, 3)
        optimizer.step()
    return optimizer


def contents(optimizer: torch.optim.Optimizer) -> str:
    return str(optimizer.state_dict()) + str([group["params"] for group in optimizer.param_groups])


def plain() -> list[Any]:
    """A good description, taken apart: head, digests, parts, state, groups."""
    head = Head(epoch=3, lineage=b"x" * 16, samples=300)
    found = msgpack.unpackb(
        take_state(adamw(1, steps=1), [torch.zeros(3)], [torch.tensor(7)], Trail(head)).described().description
    )
    assert isinstance(found, list)
    return found


PLAIN = plain()
JOINER: tuple[torch.optim.Optimizer, list[Tensor], list[Tensor]] = (adamw(2), [torch.zeros(3)], [torch.tensor(0)])


def refused(described: object) -> None:
    before = contents(JOINER[0])
    with pytest.raises(StateError):
        read_description(msgpack.packb(described), *JOINER)
    assert contents(JOINER[0]) == before


def changed(path: tuple[Any, ...], value: object) -> list[Any]:
    """The good description with something else in one place."""
    whole = copy.deepcopy(PLAIN)
    inner: Any = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


def test_the_description_that_is_changed_below_is_a_good_one() -> None:
    read_description(msgpack.packb(PLAIN), *JOINER)
    assert [list(entry) for entry in PLAIN[3]] == [["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"], []]


WRONG: dict[str, tuple[tuple[Any, ...], object]] = {
    "no head": ((0,), None),
    "a head of two": ((0,), [1, 2]),
    "a negative epoch": ((0, 0), -1),
    "negative samples": ((0, 2), -1),
    "an epoch that is text": ((0, 0), "3"),
    "a lineage that is text": ((0, 1), "x"),
    "digests that are text": ((1,), "x"),
    "a digest that is text": ((1, 0), "x" * 32),
    "a digest of 31 bytes": ((1, 0), bytes(31)),
    "no marks": ((0, 3), None),
    "no mark of its own": ((0, 3), b""),
    "marks of another lineage": ((0, 3), b"y" * 8),
    "half a mark": ((0, 3), b"x" * 12),
    "more marks than there were steps": ((0, 3), b"x" * 8 * 5),
    "a head beyond all counting": ((0, 2), 2**63),
    "no digests": ((1,), []),
    "digests of more ranges": ((1,), [bytes(32)] * 3),
    "digests as keys": ((1,), {bytes(32): 1, b"x" * 32: 1}),
    "no parts": ((2,), None),
    "an unknown dtype": ((2, 0, 0), "torch.complex128"),
    "a dtype of this module's": ((2, 0, 0), "__class__"),
    "a negative size": ((2, 0, 1), [-4, -3]),
    "a size that is nothing": ((2, 0, 1), [None, 3]),
    "a huge tensor of the model": ((2, 0, 1), [2**62, 3]),
    "a huge tensor of the optimizer": ((2, 4, 1), [2**62]),
    "a tensor larger than its parameter": ((2, 4, 1), [4, 4]),
    "no state": ((3,), []),
    "a state that is text": ((3,), "xy"),
    "states that are lists": ((3, 0), [1, 2]),
    "a state that is a list": ((3, 0, "exp_avg"), [4]),
    "another dtype for a counter": ((2, 7, 0), "torch.int32"),
    "a tensor that is not there": ((3, 0, "extra"), None),
    "a flag as a state": ((3, 0, "exp_avg"), True),
    "a tensor that belongs to nothing": ((3, 0, "max_exp_avg_sq"), 1.0),
    "too many entries": ((3, 1), {str(number): number for number in range(99)}),
    "no groups": ((4,), []),
    "a group that is a list": ((4, 0), []),
    "a setting that nobody knows": ((4, 0, "unheard of"), 1),
    "an epoch between two": ((0, 0), 2.5),
    "samples that are no number": ((0, 2), float("nan")),
    "an epoch that is a flag": ((0, 0), True),
    "an epoch beyond all counting": ((0, 0), 2**64 - 1),
    "a lineage of a kilobyte": ((0, 1), bytes(1000)),
    "an infinite size": ((2, 0, 1), [float("inf"), 3]),
    "a size between two": ((2, 0, 1), [4.5, 3]),
    "sizes that are text": ((2, 0, 1), "43"),
    "a state that is text, too": ((3, 0, "extra"), "text"),
    "a state that is a dict": ((3, 0, "extra"), {"a": []}),
    "a name that is bytes": ((3, 0, b"extra"), 1),
    "a setting's name that is bytes": ((4, 0, b"unheard of"), 1),
    "a rate that is text": ((4, 0, "lr"), "fast"),
    "no rate": ((4, 0, "lr"), None),
    "a list for a flag": ((4, 0, "amsgrad"), []),
    "one beta": ((4, 0, "betas"), [0.9]),
    "betas that are text": ((4, 0, "betas"), ["a", "b"]),
}


@pytest.mark.parametrize(("path", "value"), WRONG.values(), ids=WRONG)
def test_a_description_with_something_wrong_is_refused(path: tuple[Any, ...], value: object) -> None:
    refused(changed(path, value))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(one for key, item in inner for one in places(item, (*path, key)))]


def understood(data: bytes) -> Description | None:
    """What is made of it, which costs no more memory than a state does; StateError is the only error that there is."""
    tracemalloc.start()
    try:
        description = read_description(data, *JOINER)
    except StateError:
        description = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20
    assert description is None or description.size <= 64 * 64
    return description


@given(st.binary(max_size=300))
@example(b"")
@example(msgpack.packb([]))
@example(b"\xdd\xff\xff\xff\xff" * 50)
@example(b"\x91" * 5000)
@example(b"\x9f" + (b"\xdd\x00\x04\x00\x00" + b"\x90" * (1 << 18)) * 15)  # of 4 MB, 250 in memory
@settings(max_examples=100)
def test_garbage_is_refused_and_does_nothing_else(data: bytes) -> None:
    assert understood(data) is None


@given(st.integers(0), st.integers(1, 255))
@settings(max_examples=150)
def test_a_description_with_a_wrong_byte_is_another_one_or_refused(position: int, bits: int) -> None:
    data = bytearray(msgpack.packb(PLAIN))
    data[position % len(data)] ^= bits
    understood(bytes(data))


@given(st.sampled_from(places(PLAIN)[1:]), VALUES)
@example((2, 0, 1), [float("inf")])
@settings(max_examples=150)
def test_a_description_with_a_wrong_value_is_another_one_or_refused(path: tuple[Any, ...], value: object) -> None:
    understood(msgpack.packb(changed(path, value)))


@given(st.sampled_from(places(PLAIN)[1:]), VALUES)
@example((3, 0, "extra"), 1)
@example((4, 0, "lr"), "fast")
@settings(max_examples=150)
def test_what_is_understood_can_be_used(path: tuple[Any, ...], value: object) -> None:
    description = understood(msgpack.packb(changed(path, value)))
    if description is not None:
        joiner = adamw(2)
        install(description, torch.zeros(description.size, dtype=torch.uint8), joiner, *JOINER[1:])
        joiner.step()
