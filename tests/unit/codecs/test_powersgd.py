"""PowerSGD's arithmetic on one machine: low rank, full rank, and models in which nothing can be compressed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import hivemind
import pytest
import torch
from hivemind.optim import power_sgd_averager

from lightning_hivemind.codecs import PowerSGDGradientAverager
from lightning_hivemind.codecs.powersgd import orthonormalise_


@pytest.fixture(scope="module")
def dht() -> Iterator[hivemind.DHT]:
    running = hivemind.DHT(start=True)
    yield running
    running.shutdown()
    running.join()


class Group:
    """A complete group of one, as matchmaking hands it over."""

    group_id = b"group"
    peer_ids = ("me",)

    def __init__(self, averager: Any) -> None:
        self.gathered = (averager.serializer.dumps((1.0, 0, averager.serializer.dumps(None))),)


def make(dht: hivemind.DHT, gradients: list[torch.Tensor], rank: int) -> Any:
    factory = functools.partial(PowerSGDGradientAverager, averager_rank=rank, min_compression_ratio=0.5)
    torch.manual_seed(0)  # of hivemind's random first Qs, one in 300 leaves a direction to the next round
    averager = factory(
        parameters=[torch.nn.Parameter(torch.zeros_like(one)) for one in gradients], dht=dht, prefix="run", start=False
    )

    async def exchange(tensors: object, *args: object, **kwargs: object) -> None:
        """Nothing to add in a group of one."""

    averager._run_allreduce_inplace_ = exchange
    return averager


def average(averager: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    with averager.get_tensors() as tensors:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.copy_(gradient)
    asyncio.run(averager._aggregate_with_group(Group(averager), 0))
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("true_rank", [0, 1, 3, 4])
def test_gradient_of_at_most_the_averagers_rank_comes_out_as_it_is(dht: hivemind.DHT, true_rank: int) -> None:
    generator = torch.Generator().manual_seed(true_rank)
    left, right = (torch.randn(128, true_rank, generator=generator) for _ in range(2))
    gradients = [left @ right.t(), torch.randn(64, generator=generator)]
    averager = make(dht, gradients, rank=4)
    assert len(averager._qs) == 1
    for _ in range(3):  # what error feedback carries over must not grow either
        for result, gradient in zip(average(averager, gradients), gradients, strict=True):
            # Q's condition (up to 1000) times float32's rounding (6e-8); a direction counted twice would be 0.1 or more
            assert float((result - gradient).norm()) <= 1e-3 * float(gradient.norm())


def test_gradient_of_higher_rank_is_made_up_for_by_error_feedback(dht: hivemind.DHT) -> None:
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    averager = make(dht, [gradient], rank=8)
    steps = 60
    total = sum(average(averager, [gradient])[0] for _ in range(steps))
    assert float((total / steps - gradient).norm() / gradient.norm()) < 0.2


def test_model_without_a_compressible_tensor_is_averaged_as_it_is(dht: hivemind.DHT) -> None:
    gradients = [torch.randn(16, 16), torch.randn(5)]
    averager = make(dht, gradients, rank=32)
    assert averager._qs == []
    assert all(torch.equal(a, b) for a, b in zip(average(averager, gradients), gradients, strict=True))


def test_hivemind_uses_the_replacement() -> None:
    assert power_sgd_averager.orthogonalize_ is orthonormalise_


def test_dependent_columns_become_zero_and_the_rest_orthonormal() -> None:
    first, second = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).t()
    matrix = torch.stack([first, 3 * first + 1e-6 * second, second, torch.zeros(50)], dim=1)
    orthonormalise_(matrix)
    expected = torch.diag(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(matrix.t() @ matrix, expected, rtol=0, atol=1e-5)
