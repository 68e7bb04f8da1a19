"""Loss scales: local to a peer, and never in what is averaged."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.training.precision import LossScale


def make(reuses: bool) -> tuple[torch.nn.Parameter, torch.amp.GradScaler, LossScale]:
    p = torch.nn.Parameter(torch.ones(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return p, scaler, LossScale(scaler, torch.optim.SGD([p], lr=1.0), reuses_buffers=reuses)


def backward(p: torch.nn.Parameter, scaler: torch.amp.GradScaler, factor: float = 3.0) -> None:
    scaler.scale((p * factor).sum()).backward()


def test_gradients_are_unscaled_before_they_are_accumulated() -> None:
    p, scaler, scale = make(reuses=False)
    backward(p, scaler)
    assert scale.accept()
    assert p.grad is not None
    assert torch.equal(p.grad, torch.full((4,), 3.0))
    assert scale.buffer_scale == 1.0


def test_an_overflow_is_refused_and_lowers_the_scale() -> None:
    p, scaler, scale = make(reuses=False)
    backward(p, scaler, float("inf"))
    assert not scale.accept()
    assert scaler.get_scale() == 4.0
    p.grad = None
    backward(p, scaler)
    assert scale.accept()


@pytest.mark.parametrize("reuses", [False, True])
def test_a_batch_that_gives_no_parameter_a_gradient_is_accepted_and_leaves_the_scale(reuses: bool) -> None:
    p, scaler, scale = make(reuses)
    backward(torch.nn.Parameter(torch.ones(4)), scaler)
    assert p.grad is None
    assert scale.accept()
    scale.after_commit()
    assert scaler.get_scale() == 8.0


def test_a_step_before_the_first_backward_pass_leaves_the_scale() -> None:
    """Of who joins: the average has left something in the gradients."""
    p, scaler, scale = make(reuses=True)
    p.grad = torch.ones(4)
    assert scale.after_commit() == 1.0
    assert scaler.get_scale() == 8.0


def test_the_scale_grows_after_enough_good_batches() -> None:
    p, scaler, scale = make(reuses=False)
    for _ in range(2):
        p.grad = None
        backward(p, scaler)
        assert scale.accept()
    assert scaler.get_scale() == 16.0


def test_in_reused_buffers_the_scale_stands_still_until_the_commit() -> None:
    p, scaler, scale = make(reuses=True)
    for batch in range(1, 4):
        backward(p, scaler)
        assert scale.accept()
        assert p.grad is not None
        assert torch.equal(p.grad, torch.full((4,), 24.0 * batch))
    assert scale.buffer_scale == 8.0
    assert [scale.after_commit() for _ in range(2)] == [1.0, 2.0]
    assert scaler.get_scale() == 16.0
    assert torch.equal(p.grad, torch.full((4,), 72.0)), "what lies there is the engine's to multiply"


@pytest.mark.parametrize("reuses", [False, True])
def test_without_a_scaler_only_finiteness_is_checked(reuses: bool) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    scale = LossScale(None, torch.optim.SGD([p], lr=1.0), reuses_buffers=reuses)
    p.grad = torch.ones(2)
    assert scale.accept()
    p.grad[0] = float("nan")
    assert not scale.accept()
    assert not scale.active


def test_the_scale_grows_with_reused_buffers_that_a_step_has_taken_away() -> None:
    """In host memory there is no gradient between the sum before and the next one."""
    p, scaler, scale = make(reuses=True)
    for _ in range(2):
        backward(p, scaler)
        assert scale.accept()
        p.grad = None
        scale.after_commit()
    assert scaler.get_scale() == 16.0
