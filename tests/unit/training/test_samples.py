"""How many samples a batch holds, and which gradients may count."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.training.samples import count_samples, gradients_are_finite

Pair = namedtuple("Pair", "x y")


@dataclass
class Item:
    x: torch.Tensor
    label: str = "name"


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(7, 3),
        (torch.zeros(7, 3), torch.zeros(7)),
        {"x": torch.zeros(7, 3), "names": ["a"] * 7, "scale": torch.tensor(2.0)},
        Pair(torch.zeros(7), [torch.zeros(7, 1)]),
        Item(torch.zeros(7, 2)),
    ],
)
def test_the_shared_leading_dimension_is_the_number_of_samples(batch: Any) -> None:
    assert count_samples(batch, None) == 7


@pytest.mark.parametrize("batch", [["text"] * 4, {}, torch.tensor(1.0), (torch.zeros(3), torch.zeros(4))])
def test_a_batch_of_unclear_size_is_refused_with_the_fix(batch: Any) -> None:
    with pytest.raises(ArgumentError, match=r"HivemindStrategy\(batch_size="):
        count_samples(batch, None)
    assert count_samples(batch, 16) == 16


IMAGE = torch.zeros(3, 32, 32)


@pytest.mark.parametrize(
    "batch",
    [
        [IMAGE] * 8,
        tuple([IMAGE] * 8),
        [torch.zeros(3, 32, 32 + n) for n in range(8)],
        ([IMAGE] * 8, [0] * 8),
        {"images": [IMAGE] * 8},
        [(IMAGE, torch.tensor(1))] * 8,
        [{"image": IMAGE, "label": 1}] * 8,
        [torch.zeros(8, 3, 32, 32)] * 3,
    ],
)
def test_a_list_that_may_hold_one_sample_per_item_is_refused_with_both_fixes(batch: Any) -> None:
    with pytest.raises(ArgumentError, match=r"HivemindStrategy\(batch_size=.*a dict"):
        count_samples(batch, None)
    assert count_samples(batch, 8) == 8


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(7, 3, 32, 32)],
        [torch.zeros(7, 3, 32, 32), torch.zeros(7)],
        [torch.zeros(7, 3, 32, 32)] * 2,
        (torch.zeros(7, 3, 32, 32), torch.zeros(7), torch.zeros(7, 4)),
        [torch.zeros(7, 128)] * 3,
        {"image": torch.zeros(7, 3, 8, 8), "mask": torch.zeros(7, 1, 8, 8), "depth": torch.zeros(7, 1, 8, 8)},
        namedtuple("Views", "a b c")(*[torch.zeros(7, 3, 8, 8)] * 3),
        [[torch.zeros(7, 3, 8, 8), torch.zeros(7)], [torch.zeros(7, 3, 8, 8), torch.zeros(7)]],
    ],
)
def test_fields_of_a_batch_are_not_taken_for_samples(batch: Any) -> None:
    assert count_samples(batch, None) == 7
    assert count_samples(batch, 16) == 7


def test_a_last_smaller_batch_counts_what_it_holds_even_if_batch_size_is_given() -> None:
    assert count_samples(torch.zeros(5, 2), 16) == 5
    assert count_samples(torch.zeros(64, 2), 16) == 16  # rows that are not samples: the user knows better


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found(dtype: torch.dtype, bad: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(100, dtype=dtype)) for _ in range(3)]
    assert gradients_are_finite(p.grad for p in parameters if p.grad is not None)
    for p in parameters[:2]:
        p.grad = torch.full_like(p, 100.0)
    assert gradients_are_finite(p.grad for p in parameters if p.grad is not None)
    gradient = parameters[1].grad
    assert gradient is not None
    gradient[57] = bad
    assert not gradients_are_finite(p.grad for p in parameters if p.grad is not None)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([float("inf"), -float("inf")])
    assert not gradients_are_finite([p.grad])


def test_packed_sequences_count_each_once_however_long_they_are() -> None:
    sequences = [torch.zeros(7, 3), torch.zeros(2, 3)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    assert count_samples({"x": packed, "y": torch.zeros(2)}, None) == 2
