"""What an optimizer's groups hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """In the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group, without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def rates_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The learning rate of each group."""
    return [group["lr"] for group in optimizer.param_groups]


def set_rates(optimizer: torch.optim.Optimizer, rates: list[Any]) -> None:
    """What :func:`rates_of` gave."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def over(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[dict[str, Any]]:
    """The optimizer's groups with their settings, over other parameters."""
    groups, start = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        groups.append({**group, "params": parameters[start : start + count]})
        start += count
    return groups
