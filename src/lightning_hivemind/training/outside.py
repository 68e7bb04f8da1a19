"""Parameters that the module has and the optimizer has not: each peer's own, so they had better be alike."""

from __future__ import annotations

import torch

from lightning_hivemind.engine.groups import parameters_of


def outside(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """By name. (They are neither averaged nor handed to peers that join.)"""
    inside = {id(p) for p in parameters_of(optimizer)}
    return {name: p for name, p in module.named_parameters() if id(p) not in inside}
