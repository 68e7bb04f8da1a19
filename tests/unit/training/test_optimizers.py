"""Re-created optimizers, and what Lightning sees in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer.whole import HostedOptimizer
from lightning_hivemind.training.optimizers import rebuilder


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_a_rebuilt_optimizer_has_the_groups_and_settings_of_the_first(kind: Any) -> None:
    a, b, c = parameters()
    first = kind([{"params": [a], "lr": 0.3}, {"params": [b, c], "weight_decay": 0.1}], lr=0.7)
    hosts = [p.detach().clone().requires_grad_() for p in (a, b, c)]
    groups = [{**first.param_groups[0], "params": hosts[:1]}, {**first.param_groups[1], "params": hosts[1:]}]
    again = rebuilder(first)(groups)
    assert type(again) is kind
    for old, new in zip(first.param_groups, again.param_groups, strict=True):
        assert {k: v for k, v in old.items() if k != "params"} == {k: v for k, v in new.items() if k != "params"}
    assert [p for group in again.param_groups for p in group["params"]] == hosts


def test_a_rebuilt_optimizer_has_what_the_first_keeps_besides_its_groups() -> None:
    class Clamped(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, clamp: float = 10.0) -> None:
            super().__init__(params, lr=lr)
            self.clamp, self.made_of = clamp, self
            self.register_step_pre_hook(self.count)
            self.counted = 0

        def count(self, *_: Any) -> None:
            self.counted += 1

    first = Clamped(parameters(), clamp=0.5)
    stepped: list[Any] = []
    first.register_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    again = rebuilder(first)([{"params": parameters(), "lr": 0.2}])
    again.step()
    assert stepped == [again]
    assert first.counted == 0
    assert isinstance(again, Clamped)
    assert (again.clamp, again.param_groups[0]["lr"], again.made_of, again.counted) == (0.5, 0.2, again, 1)


def test_an_optimizer_that_cannot_be_rebuilt_is_refused_with_the_fix() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, secret: int, model: list[torch.nn.Parameter]) -> None:
            super().__init__(model, lr=float(secret))

    with pytest.raises(ArgumentError, match="offload_optimizer=False"):
        rebuilder(Odd(1, parameters()))([{"params": parameters()}])


def test_the_view_clears_the_models_gradients_and_never_the_averaged_ones() -> None:
    model = parameters()
    hosts = [p.detach().clone().requires_grad_() for p in model]
    hosted = torch.optim.AdamW([{"params": hosts[:1], "lr": 0.5}, {"params": hosts[1:]}])
    view = HostedOptimizer(hosted, model)
    for p in (*model, *hosts):
        p.grad = torch.ones(2)
    view.zero_grad()
    assert all(p.grad is None for p in model)
    assert all(p.grad is not None for p in hosts)
    assert [p for group in view.param_groups for p in group["params"]] == model
    assert view.param_groups[0]["lr"] == 0.5
    view.param_groups[0]["lr"] = 0.25
    assert hosted.param_groups[0]["lr"] == 0.25
    view.param_groups[0].update(lr=0.125)
    assert hosted.param_groups[0]["lr"] == 0.125
    group = view.param_groups[0]
    group |= {"lr": 0.25}
    assert group.setdefault("initial_lr", 0.75) == 0.75
    assert (hosted.param_groups[0]["lr"], hosted.param_groups[0]["initial_lr"]) == (0.25, 0.75)
    assert hosted.param_groups[0]["params"] == hosts[:1]
    assert view.state_dict() == hosted.state_dict()
    with pytest.raises(RuntimeError, match="do not call step"):
        view.step()
