"""The optimizer's side of a global step, on the device or in host memory (``offload_optimizer``)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.engine.base import PeerTraining
from lightning_hivemind.engine.native.statistics import Statistics


class Stepper:
    """Owns the optimizer that really steps.

    Attributes:
        optimizer: the user's, or one like it over copies of the parameters in host memory.
        statistics: averaged with the gradients, behind them in the flat vector.
        tensors: that belong to a state besides parameters and optimizer.
        lock: held while any of it changes, and while it is copied.
    """

    def __init__(self, training: PeerTraining) -> None:
        self._training = training
        self._model = _parameters(training.optimizer)
        self.optimizer = training.optimizer
        if training.rebuild_optimizer is not None:
            copies = [p.detach().to("cpu", copy=True).requires_grad_(p.requires_grad) for p in self._model]
            self.optimizer = training.rebuild_optimizer(_over(training.optimizer, copies))
        self.statistics = Statistics(training.state_tensors)
        self.tensors = training.state_tensors
        self.lock = threading.Lock()

    @property
    def model_parameters(self) -> list[Tensor]:
        """The model's own, of which gradients are taken."""
        return self._model

    @torch.no_grad()
    def step(self, average: Tensor, epoch: int) -> None:
        """One global step to ``epoch``: ``average`` is float32 CPU, gradients of what is trained, then statistics."""
        start = 0
        for parameter in _parameters(self.optimizer):
            if not parameter.requires_grad:
                parameter.grad = None  # a zero gradient would still let weight decay change it
                continue
            part = average[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = part.to(parameter.device, parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(part)
        with torch.enable_grad():
            self._training.before_optimizer_step(self.optimizer)
            self.optimizer.step()
        self.statistics.step(average[start:])
        self._training.advance_schedulers(epoch)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the parameters that the optimizer has."""
        for mine, stepped in zip(self._model, _parameters(self.optimizer), strict=True):
            if mine is not stepped:
                mine.copy_(stepped)

    def load(self, optimizer_state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, whose parameters the model has already."""
        self.optimizer.load_state_dict(dict(optimizer_state))
        with torch.no_grad():
            for mine, stepped in zip(self._model, _parameters(self.optimizer), strict=True):
                if mine is not stepped:
                    stepped.copy_(mine)
        self.statistics.rebase()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _over(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[dict[str, Any]]:
    """The optimizer's groups with their settings, over other parameters."""
    groups, start = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        groups.append({**group, "params": parameters[start : start + count]})
        start += count
    return groups
