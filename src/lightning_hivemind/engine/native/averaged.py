"""Averaged gradients, where an optimizer looks for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_hivemind.engine.native.transfer import copy, finish
from lightning_hivemind.errors import ArgumentError


def refuse_more(count: int, model: Iterable[Tensor], trained: Sequence[bool]) -> None:
    """``count``: of the optimizer's parameters; ``model``: the model's own; ``trained``: which were so at first.

    Raises:
        ArgumentError: there are more parameters than there were, or more of them are trained.
    """
    if count != len(trained):
        raise ArgumentError(
            "parameters were added to the optimizer during the fit (by BackboneFinetuning, say): in a swarm all"
            " peers train the same ones from the start. Give it all of them in configure_optimizers."
        )
    if any(one.requires_grad and not was_trained for one, was_trained in zip(model, trained, strict=True)):
        raise ArgumentError(
            "a parameter that was frozen when the fit began is trained now (requires_grad): in a swarm all peers must"
            " train the same ones from the start. Unfreeze it before the fit."
        )


@torch.no_grad()
def put_gradients(
    average: Tensor, parameters: Sequence[Tensor], model: Sequence[Tensor], trained: Sequence[bool]
) -> int:
    """Into ``param.grad`` of the optimizer's ``parameters``; returns where they end in ``average``.

    ``average``: float32 CPU, gradients of what is trained, anything, and at the end for each of them whether anybody
    has one. ``model``: the model's own; ``trained``: which were so when the fit began.

    Raises:
        ArgumentError: as :func:`refuse_more`.
    """
    refuse_more(len(parameters), model, trained)
    start, reached = 0, iter(average[average.numel() - sum(trained) :].tolist())
    for parameter, was_trained in zip(parameters, trained, strict=True):
        part = average[start : start + (parameter.numel() if was_trained else 0)]
        start += part.numel()
        if not was_trained or not next(reached):  # (where only this peer has frozen it, it moves as the others' does)
            parameter.grad = None  # a zero gradient would still let weight decay change it
            continue
        part, gradient = part.view_as(parameter), parameter.grad
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            parameter.grad = part.to(parameter.dtype)
        elif gradient is None or gradient.is_sparse:
            parameter.grad = torch.empty_like(parameter)  # as it lies: fused optimizers do not look
            copy(part, parameter.grad)
        else:
            copy(part, gradient)
    if model:
        finish(parameters[0].device)  # before the average's memory is used again
    return start
