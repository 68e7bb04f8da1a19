"""An optimizer over whole parameters, of which ranks have parts."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.peer.whole import WholeOptimizer


def made(groups: int = 2) -> tuple[torch.optim.Optimizer, list[torch.Tensor], WholeOptimizer]:
    parts = [torch.nn.Parameter(torch.zeros(2)) for _ in range(groups)]
    real = torch.optim.AdamW([{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(parts)])
    whole: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(4)) for _ in parts]
    return real, whole, WholeOptimizer(real, whole)


def test_settings_are_those_of_the_ranks_optimizer_and_reach_it() -> None:
    real, whole, optimizer = made()
    real.param_groups[1]["lr"] = 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    optimizer.param_groups[0]["lr"] = 0.25
    assert real.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["params"][0] is whole[1]


def test_its_step_is_the_ranks_own() -> None:
    real, whole, optimizer = made()
    part = real.param_groups[0]["params"][0]
    part.grad = torch.ones(2)
    optimizer.step()
    assert (part < 0).all()
    assert not whole[0].any()


def test_a_state_is_saved_and_loaded_as_torchs_own() -> None:
    _, whole, optimizer = made()
    plain = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(4))], "lr": 0.1} for _ in range(2)])
    for group in plain.param_groups:
        group["params"][0].grad = torch.ones(4)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    assert torch.equal(optimizer.state[whole[1]]["exp_avg"], plain.state_dict()["state"][1]["exp_avg"])
    again = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(4))]} for _ in range(2)])
    again.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(again.state_dict()["state"], plain.state_dict()["state"], rtol=0, atol=0)
    assert again.param_groups[0]["lr"] == 0.1


def test_a_state_of_other_parameters_is_refused() -> None:
    optimizer, other = made()[2], made(3)[2]
    with pytest.raises(ValueError, match="other parameter groups"):
        optimizer.load_state_dict(other.state_dict())
