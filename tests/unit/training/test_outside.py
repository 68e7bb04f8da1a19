"""Parameters of the module that the optimizer does not have."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.training.outside import SAMPLE, outside, print_of


def test_they_are_found_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module[1].parameters(), lr=1.0)
    assert list(outside(module, optimizer)) == ["0.weight", "0.bias"]
    assert outside(module, torch.optim.SGD(module.parameters(), lr=1.0)) == {}
    assert print_of({}) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, SAMPLE + 1, 10 * SAMPLE])
def test_who_has_drawn_others_has_another_print(size: int, dtype: torch.dtype) -> None:
    prints = []
    for seed in (0, 0, 1):
        values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
        prints.append(print_of({"a": torch.nn.Parameter(values)}))
    assert prints[0] == prints[1]
    assert (prints[0] == prints[2]) is (size == 0)
    assert len(prints[0]) == 16
    assert prints[0] != print_of({"b": torch.nn.Parameter(values)})
