"""Parameters that the module has and the optimizer has not: each peer's own, so they had better be alike."""

from __future__ import annotations

import hashlib

import torch

#: values that are looked at of each: whoever drew them with another seed differs in all
SAMPLE = 1024


def outside(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """By name. (They are neither averaged nor handed to peers that join.)"""
    inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in module.named_parameters() if id(p) not in inside}


@torch.no_grad()
def print_of(parameters: dict[str, torch.Tensor]) -> str:
    """Sixteen hexadecimal digits of names, shapes and a sample of the values of each; empty if there are none."""
    if not parameters:
        return ""
    found = hashlib.sha256()
    for name, parameter in parameters.items():
        values = parameter.detach().flatten()
        sample = values[:: max(1, values.numel() // SAMPLE)].to("cpu").contiguous()
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
