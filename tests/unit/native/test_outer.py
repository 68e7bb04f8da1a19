"""The outer step is that of torch's SGD, whose gradient is how far peers have moved, the other way round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hivemind.engine.native.outer import OuterStep
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.outer import DiLoCo

SETTINGS = [DiLoCo(), DiLoCo(0.5, 0.9, nesterov=False), DiLoCo(1.0, 0.0, nesterov=False)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_torchs_sgd(settings: DiLoCo, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    base = torch.randn(3, 4).to(dtype)
    outer = OuterStep(settings, [base])
    reference = torch.nn.Parameter(base.double())
    sgd = torch.optim.SGD([reference], settings.lr, settings.momentum, nesterov=settings.nesterov)
    for _ in range(5):
        change = torch.randn(12) / 16
        base = outer.moved(0, base, change)
        reference.grad = -change.view(3, 4).double()
        sgd.step()
        with torch.no_grad():  # as rounded as ours
            reference.copy_(reference.to(dtype))
        torch.testing.assert_close(
            base.double(), reference.detach(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7
        )
        assert base.dtype == dtype


def test_averaging_moves_by_just_the_average() -> None:
    base, change = torch.randn(5), torch.randn(5)
    moved = OuterStep(DiLoCo(1.0, 0.0, nesterov=False), [base]).moved(0, base, change)
    assert torch.equal(moved, (base.double() + change).float())


def test_what_is_averaged_besides_parameters_has_no_momentum() -> None:
    weight, buffer = torch.zeros(2), torch.zeros(1)
    statistics = Statistics([weight, buffer], carries=True, outer=OuterStep(DiLoCo(0.5, 0.5, nesterov=True), [weight]))
    for step, expected in ((1, 0.75), (2, 0.75 + 0.875)):  # 0.5 * (1 + 0.5 * 1), then 0.5 * (1 + 0.5 * 1.5)
        statistics.step(torch.ones(3), step)
        statistics.publish()
        assert weight.tolist() == [expected] * 2
        assert buffer.tolist() == [float(step)]


def test_a_checkpoint_brings_momentum_and_base_back() -> None:
    first, base = OuterStep(DiLoCo(), [torch.zeros(2)]), [torch.zeros(2), torch.ones(1)]
    base[0] = first.moved(0, base[0], torch.tensor([1.0, 2.0]))
    kept = first.kept(base)
    second, other = OuterStep(DiLoCo(), [torch.zeros(2)]), [torch.full((2,), 9.0), torch.ones(1)]
    second.load(kept, other)
    assert torch.equal(other[0], base[0])
    assert torch.equal(second.moved(0, other[0], torch.ones(2)), first.moved(0, base[0], torch.ones(2)))


def test_a_checkpoint_of_another_model_or_of_none_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    outer, base = OuterStep(DiLoCo(), [torch.zeros(2)]), [torch.ones(2)]
    outer.load({}, base)
    assert not caplog.text
    outer.load({"velocity": [torch.ones(3)], "base": [torch.ones(3)]}, base)
    assert "of another model" in caplog.text
    assert base[0].tolist() == [1.0, 1.0]
    assert outer.velocity[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": True}, "lr=True"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": "0.9"}, "momentum='0.9'"),
        ({"nesterov": 1}, "nesterov=1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=f"DiLoCo\\({says}"):
        DiLoCo(**settings)
