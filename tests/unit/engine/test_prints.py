"""A print of some of the values."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.engine.prints import SAMPLE, print_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, SAMPLE + 1, 10 * SAMPLE])
def test_who_has_drawn_others_has_another_print(size: int, dtype: torch.dtype) -> None:
    prints = []
    for seed in (0, 0, 1):
        values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
        prints.append(print_of([torch.nn.Parameter(values)]))
    assert prints[0] == prints[1]
    assert (prints[0] == prints[2]) is (size == 0)
    assert len(prints[0]) == 16


def test_what_has_no_values_to_look_at_is_passed_over() -> None:
    others = [torch.nn.parameter.UninitializedParameter(), torch.zeros(3, device="meta"), torch.eye(2).to_sparse()]
    assert print_of(others) == print_of([])
