"""Parameters that the module has and the optimizer has not: each peer's own, so they had better be alike."""

from __future__ import annotations

import torch


def outside(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """By name. (They are neither averaged nor handed to peers that join.)"""
    inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in module.named_parameters() if id(p) not in inside}
