"""An optimizer's state before its first step: made without changing anything else, and found by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hivemind.errors import ArgumentError

#: scalars that torch's optimizers keep for each parameter and change in a step: their values before the first one
_AT_FIRST = {"step": 0, "mu_product": 1}


def prime_optimizer_state(optimizer: torch.optim.Optimizer, *, frozen: bool = True) -> None:
    """Create state tensors, as before the first step, of all parameters that have none yet.

    With ``frozen=False`` only of parameters that require a gradient: those that a step really gives a state.

    hivemind makes one step with zero gradients for that, which applies weight decay and counts as a step. Here weight
    decay is switched off for it (it would enter the moments), parameters and settings are put back and counters begin
    anew. Gradients are left as they were. (With SGD's dampening the first gradient is dampened, too.)
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in parameters if not optimizer.state.get(p) and (frozen or p.requires_grad)]
    if not fresh:
        return
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    kept = [(p.detach().clone(), p.grad) for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        for p in fresh:
            p.grad = torch.zeros_like(p)
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        optimizer.step()
    finally:
        with torch.no_grad():
            for group, before in zip(optimizer.param_groups, settings, strict=True):
                group.update(before)
            for p, (value, grad) in zip(parameters, kept, strict=True):
                p.copy_(value)
                p.grad = grad
    for p in fresh:
        entry = optimizer.state.get(p, {})
        for name in _AT_FIRST.keys() & entry.keys():
            if isinstance(entry[name], Tensor):
                entry[name].fill_(_AT_FIRST[name])
            else:
                entry[name] = _AT_FIRST[name]


def prime_statistics(
    optimizer: torch.optim.Optimizer, names: Sequence[str], *, of_all: bool = False
) -> list[tuple[Tensor, str]]:
    """Prime, and return ``(parameter, name)`` of all that ``average_opt_statistics=names`` means.

    Args:
        of_all: every parameter must keep it, also those that are not trained: hivemind looks for it there.

    Raises:
        ArgumentError: it keeps none of that name, or none that can be averaged, or makes no step yet.
    """
    if not names:
        return []
    what, kind = f"average_opt_statistics={list(names)}", type(optimizer).__name__
    try:
        prime_optimizer_state(optimizer, frozen=of_all)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{what}: {kind} has none before its first step ({error}); leave it away.") from error
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad or of_all]
    kept: dict[str, list[Tensor]] = {}
    for p in parameters:
        for name, value in optimizer.state[p].items():
            if isinstance(value, Tensor) and value.is_floating_point():
                kept.setdefault(name, []).append(p)
    for name in names:
        if name not in kept or (of_all and len(kept[name]) < len(parameters)):
            wrong = f"{kind}, as it is configured, keeps no {name!r} that can be averaged"
            wrong += " of all parameters" if name in kept else ""
            there = f"it keeps {', '.join(map(repr, kept))}" if kept else "leave the argument away"
            raise ArgumentError(f"{what}: {wrong}; {there}.")
    return [(p, name) for name in names for p in kept[name]]
