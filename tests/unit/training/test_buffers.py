"""Modules that replace their buffers instead of changing them."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.training.buffers import Buffers


class Running(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.norm = torch.nn.BatchNorm1d(3)


def test_a_buffer_that_was_replaced_is_the_old_tensor_with_the_new_values() -> None:
    module = Running()
    buffers, held = Buffers(module), module.mean
    assert [one.data_ptr() for one in buffers.tensors] == [one.data_ptr() for one in module.buffers()]
    module.mean = 0.5 * module.mean + torch.nn.Parameter(torch.ones(3))
    buffers.keep()
    assert module.mean is held
    assert held.tolist() == [1.0] * 3
    assert not held.requires_grad


@pytest.mark.parametrize("how", ["expanded", "of inference"])
def test_a_buffer_that_cannot_be_written_is_copied(how: str) -> None:
    module = Running()
    with torch.inference_mode(how == "of inference"):
        module.mean = torch.ones(1).expand(3)
    (tensor,) = (one for one in Buffers(module).tensors if one is module.mean)
    tensor.copy_(torch.arange(3.0))
    assert module.mean.tolist() == [0.0, 1.0, 2.0]


def test_what_is_not_dense_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Running()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    module.late = torch.nn.LazyBatchNorm1d()
    buffers = Buffers(module)
    assert len(buffers.tensors) == 5, "the mean, those of the norms, of which one has no shape but counts"
    assert "buffer graph is not dense" in caplog.text
    buffers.keep()


def test_a_buffer_that_is_a_part_of_a_parameter_is_that() -> None:
    module = Running()
    module.norm.register_buffer("alias", module.norm.weight.detach()[1:])
    assert len(Buffers(module).tensors) == 4


def test_buffers_that_are_one_stay_one() -> None:
    module = Running()
    module.mean = torch.ones(1).expand(3)
    module.norm.register_buffer("tied", module.mean)
    assert len(Buffers(module).tensors) == 4
    assert module.norm.tied is module.mean


def test_a_buffer_of_another_shape_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = Running()
    buffers = Buffers(module)
    for size in (4, 5):
        module.mean = torch.zeros(size)
        buffers.keep()
    assert module.mean.numel() == 5
    (line,) = caplog.messages
    assert "buffer mean of Running" in line
