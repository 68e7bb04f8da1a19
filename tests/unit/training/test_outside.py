"""Parameters of the module that the optimizer does not have."""

from __future__ import annotations

import torch

from lightning_hivemind.training.outside import outside


def test_they_are_found_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module[1].parameters(), lr=1.0)
    assert list(outside(module, optimizer)) == ["0.weight", "0.bias"]
    assert outside(module, torch.optim.SGD(module.parameters(), lr=1.0)) == {}
