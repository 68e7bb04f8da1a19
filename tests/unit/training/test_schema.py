"""What peers of one run must have in common."""

from __future__ import annotations

from typing import Any

import torch

from lightning_hivemind.peer.shards import DistributedTensors
from lightning_hivemind.training.schema import schema_of


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))


def test_it_names_each_parameter_with_its_shape_and_dtype() -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    assert schema_of(model, optimizer, None, {}) == ["optimizer SGD", "weight (2,) torch.float32"]
    model.weight.requires_grad_(False)
    assert schema_of(model, optimizer, None, {})[1:] == ["weight (2,) torch.float32 frozen"]


def test_of_parts_it_is_that_of_the_whole_and_of_what_the_optimizer_has() -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    shards: Any = DistributedTensors(optimizer, model, model)
    assert len(shards.shapes) == 2, "the module's others come behind"
    assert schema_of(model, optimizer, shards, {}) == schema_of(model, optimizer, None, {})


def test_what_there_is_besides_is_counted() -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    others = {"buffers": [torch.zeros(4), torch.zeros(1)], "extra_tensors": []}
    assert schema_of(model, optimizer, None, others)[2:] == ["buffers, 5 values"]
