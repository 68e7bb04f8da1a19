"""``reuse_grad_buffers``: real backward passes, in host memory and as on a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.sums import InPlaceSum

MARKS = 3


class Model:
    """An embedding, a layer, and one that no batch reaches unless it is told to; the sum of their gradients."""

    def __init__(self, *, on_device: bool, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5, 3, sparse=sparse)
        self.layer, self.spare = torch.nn.Linear(3, 2, bias=False, dtype=dtype), torch.nn.Linear(3, 2, bias=False)
        self.parameters = [self.embedding.weight, self.layer.weight, self.spare.weight]
        elements = sum(one.numel() for one in self.parameters)
        self.sum = InPlaceSum(self.parameters, Memory(1 << 20), elements + MARKS)
        if on_device:  # there is none here
            self.sum._joined = [False] * len(self.parameters)

    def batch(self, *rows: int, spare: bool = False, create_graph: bool = False) -> None:
        weight = self.sum.weight(len(rows))
        self.sum.begin_batch()
        loss = self.loss(rows, spare=spare)
        torch.autograd.backward(loss * weight, create_graph=create_graph)
        assert self.sum.add(len(rows), 0, 1.0) == 0

    def loss(self, rows: tuple[int, ...], *, spare: bool = False) -> Tensor:
        found = self.embedding(torch.tensor(rows))
        loss: Tensor = self.layer(found.to(self.layer.weight.dtype)).float().square().sum(1).mean()
        return loss + self.spare(found).square().sum(1).mean() if spare else loss

    def plainly(self, *rows: int, spare: bool = False) -> Tensor:
        """The mean gradient over these samples."""
        found = torch.autograd.grad(self.loss(rows, spare=spare), self.parameters, materialize_grads=True)
        return torch.cat([one.to_dense().float().flatten() for one in found])

    def taken(self) -> tuple[Tensor, list[float]]:
        values = self.sum.take()
        return values[:-MARKS], values[-MARKS:].tolist()


@pytest.fixture(params=[False, True], ids=["host", "device"])
def on_device(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def model(on_device: bool) -> Model:
    return Model(on_device=on_device)


def test_batches_of_unlike_size_add_up_to_their_mean_over_samples(model: Model) -> None:
    for _ in range(3):
        model.batch(0, 1, 2)
        model.batch(4)
        values, marks = model.taken()
        assert torch.allclose(values, model.plainly(0, 1, 2, 4))
        assert marks == [1.0, 1.0, 0.0]


def test_in_host_memory_what_is_given_is_where_the_gradients_added_up() -> None:
    model = Model(on_device=False)
    model.batch(0, 1)
    first, last = (one.weight.grad for one in (model.embedding, model.spare))
    assert first is not None
    assert last is not None
    values = model.sum.take()
    kept = values.clone()
    assert (values.data_ptr(), values[21:].data_ptr()) == (first.data_ptr(), last.data_ptr())
    model.batch(2, 3)
    assert torch.equal(values, kept), "the next sum has memory of its own"


def test_a_parameter_has_a_gradient_in_those_sums_only_in_which_a_batch_reached_it() -> None:
    model = Model(on_device=False)
    for spare in (True, False, True):
        model.batch(0, 1, spare=spare)
        values, marks = model.taken()
        assert torch.allclose(values, model.plainly(0, 1, spare=spare))
        assert marks == [1.0, 1.0, float(spare)]


def test_a_gradient_that_is_zero_is_one(model: Model) -> None:
    with torch.no_grad():
        model.embedding.weight.zero_()
    model.batch(0, 1)
    values, marks = model.taken()
    assert not values.any()
    assert marks == [1.0, 1.0, 0.0]


def test_a_sparse_gradient_adds_up_as_a_dense_one(on_device: bool) -> None:
    model = Model(on_device=on_device, sparse=True)
    for _ in range(2):
        model.batch(0, 1)
        model.batch(1, 2)
        assert torch.allclose(model.taken()[0], model.plainly(0, 1, 1, 2))


def test_what_has_another_precision_adds_up_in_that(on_device: bool) -> None:
    model = Model(on_device=on_device, dtype=torch.bfloat16)
    for _ in range(2):
        model.batch(0, 1)
        model.batch(2, 3)
        values, marks = model.taken()
        assert torch.allclose(values, model.plainly(0, 1, 2, 3), rtol=0.05, atol=0.01)
        assert marks == [1.0, 1.0, 0.0]


def test_what_somebody_has_put_in_the_place_of_a_gradient_counts(model: Model) -> None:
    """A backward pass that keeps its graph does so; a hook may, and may take one away."""
    model.batch(0, 1, create_graph=True)
    model.batch(2, 3)
    assert torch.allclose(model.taken()[0], model.plainly(0, 1, 2, 3))
    model.batch(0, 1, spare=True)
    expected = model.plainly(0, 1, spare=True)
    model.layer.weight.grad = torch.ones(2, 3)
    model.spare.weight.grad = None
    values, marks = model.taken()
    assert torch.allclose(values, torch.cat((expected[:15], torch.ones(6), torch.zeros(6))))
    assert marks == [1.0, 1.0, 0.0]


def test_what_is_written_to_a_gradient_that_no_batch_reaches_counts(model: Model) -> None:
    """Also if it was not seen to change."""
    model.batch(0, 1)
    if model.spare.weight.grad is None:
        model.spare.weight.grad = torch.zeros(2, 3)
    model.spare.weight.grad.data.add_(1.0)
    values, marks = model.taken()
    assert torch.equal(values[21:], torch.ones(6))
    assert marks == [1.0, 1.0, 1.0]


def test_where_all_have_another_precision_no_vector_is_held_between_batches() -> None:
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    found = InPlaceSum(list(layer.parameters()), Memory(), 8 + 2)
    assert found.weight(4) == 1.0
    found.begin_batch()
    layer(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    assert found.add(4, 0, 1.0) == 0
    assert found._values is None
    assert found.take().tolist() == [4.0] * 8 + [1.0] * 2


def test_a_change_of_the_loss_scale_multiplies_each_gradient_once(on_device: bool) -> None:
    model = Model(on_device=on_device, dtype=torch.bfloat16)
    model.batch(0, 1)
    assert model.embedding.weight.grad is not None
    model.embedding.weight.grad = model.embedding.weight.grad.clone()
    before = [one.grad.clone() for one in model.parameters if one.grad is not None]
    model.sum.rescale(2.0)
    after = [one.grad for one in model.parameters if one.grad is not None]
    assert len(before) >= 2
    assert all(torch.equal(one, 2 * other) for one, other in zip(after, before, strict=True))
    assert model.taken()[1] == [1.0, 1.0, 0.0], "and makes none"


def test_what_is_discarded_is_in_no_sum(model: Model) -> None:
    model.batch(0, 1, spare=True)
    model.sum.begin_batch()
    model.loss((2, 3)).backward()
    model.sum.clear()  # it is still being computed
    assert model.sum.add(2, 0, 1.0) == 2
    model.batch(4)
    assert torch.allclose(model.taken()[0], model.plainly(4))
