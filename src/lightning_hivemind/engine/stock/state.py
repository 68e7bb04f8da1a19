"""Taking another peer's state over: parameters, optimizer, epoch. All of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from hivemind.optim.state_averager import load_optimizer_state
from hivemind.utils import nested_flatten

from lightning_hivemind.engine.priming import prime_optimizer_state
from lightning_hivemind.errors import StateError


def _entries(optimizer: torch.optim.Optimizer) -> int:
    return sum(1 for _ in nested_flatten(optimizer.state_dict()))


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer made (or was given) a step."""
    return any(isinstance(value, torch.Tensor) for entry in optimizer.state.values() for value in entry.values())


@dataclass(frozen=True, slots=True)
class Installed:
    """What was taken over: the donor's epoch, and the learning rates of its groups (none before its first step)."""

    epoch: int
    rates: tuple[Any, ...] = ()

    def settle_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """After the schedulers caught up: the donor's learning rates are the swarm's, so they win."""
        for group, rate in zip(optimizer.param_groups, self.rates, strict=False):
            group["lr"] = rate


def install_state(
    optimizer: torch.optim.Optimizer,
    extra_tensors: Sequence[torch.Tensor],
    metadata: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
) -> Installed:
    """Put a downloaded state into ``optimizer`` (its parameters included) and ``extra_tensors``.

    The groups' learning rates stay this peer's own, so that schedulers can be advanced from there to the donor's
    epoch; then :meth:`Installed.settle_rates` makes them the donor's. (Advancing a chainable scheduler from the donor's
    rate would apply its factor twice, as hivemind does.)

    Raises:
        StateError: the state does not fit this model or optimizer. Nothing was changed.
    """
    epoch = metadata.get("epoch")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise StateError(f"a peer sent epoch={epoch!r} with its state; expected a count. Its state was not used.")
    targets = list(chain((p for group in optimizer.param_groups for p in group["params"]), extra_tensors))
    if len(tensors) < len(targets):
        raise StateError(f"a peer sent {len(tensors)} tensors, this model needs {len(targets)}: another model?")
    for index, (mine, theirs) in enumerate(zip(targets, tensors, strict=False)):
        if mine.shape != theirs.shape:
            raise StateError(
                f"tensor {index} of a peer's state has shape {tuple(theirs.shape)}, here it is {tuple(mine.shape)}."
                " All peers of a run_id must train the same model; give this one another run_id."
            )
    rates = _install_optimizer(optimizer, metadata.get("optimizer_metadata"), tensors[len(targets) :])
    with torch.no_grad():
        for mine, theirs in zip(targets, tensors, strict=False):
            mine.copy_(theirs)
    return Installed(epoch, rates)


def _install_optimizer(optimizer: torch.optim.Optimizer, flat: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Returns the donor's learning rates; the groups keep their own."""
    if not isinstance(flat, (list, tuple)) or not all(isinstance(item, dict) for item in flat):
        raise StateError("a peer sent no usable optimizer state. Its state was not used.")
    if not tensors:
        return ()  # the donor made no step yet: neither has its optimizer a state
    fresh = not has_state(optimizer)
    for frozen in (False, True) if fresh else ():  # stock donors have a state for frozen parameters, too
        optimizer.state.clear()
        prime_optimizer_state(optimizer, frozen=frozen)
        if _entries(optimizer) == len(flat):
            break
    needed = _entries(optimizer)
    if len(flat) != needed:
        if fresh:
            optimizer.state.clear()
        raise StateError(
            f"a peer's optimizer state has {len(flat)} entries, {type(optimizer).__name__} here has {needed}."
            " All peers of a run_id must use the same optimizer."
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    load_optimizer_state(optimizer, flat, tensors)
    donors = tuple(group["lr"] for group in optimizer.param_groups)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return donors
