"""The optimizer's side of a global step: on the device or in host memory, now or in the background."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.engine.base import PeerTraining
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.statistics import Statistics


class Stepper:
    """Owns the optimizer that really steps. Its methods are called from the training thread.

    Args:
        head: whose state the model has now.
        delayed: steps are made in a thread of their own, on copies in host memory.

    Attributes:
        optimizer: the user's, or one like it over copies of the parameters in host memory.
        statistics: averaged with the gradients, behind them in the flat vector.
        tensors: that belong to a state besides parameters and optimizer.
        lock: held while any of it changes, and while it is copied.
        head: whose state the optimizer has.
    """

    def __init__(self, training: PeerTraining, head: Head, *, delayed: bool) -> None:
        self._training, self.head = training, head
        self._model = _parameters(training.optimizer)
        self.optimizer = training.optimizer
        if training.rebuild_optimizer is not None:
            copies = [p.detach().to("cpu", copy=True).requires_grad_(p.requires_grad) for p in self._model]
            self.optimizer = training.rebuild_optimizer(_over(training.optimizer, copies))
        self.statistics = Statistics(training.state_tensors)
        self.tensors = training.state_tensors
        self.lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, "lightning-hivemind-step") if delayed else None
        self._under_way: Future[None] | None = None

    @property
    def model_parameters(self) -> list[Tensor]:
        """The model's own, of which gradients are taken."""
        return self._model

    # ------------------------------------------------------------------ steps

    def step(self, average: Tensor, head: Head) -> None:
        """One global step to ``head``: ``average`` is float32 CPU, gradients of what is trained, then statistics.

        Delayed, the model has it after a later :meth:`settle`.
        """
        self.settle(wait=True)
        statistics = average[self._use(average) :]
        with torch.enable_grad():
            self._training.before_optimizer_step(self.optimizer)
        if self._executor is not None:
            self._under_way = self._executor.submit(self._make, statistics, head)
            return
        self._make(statistics, head)
        self.publish()

    def settle(self, *, wait: bool) -> None:
        """Give the model the step that was made in the background, if it is finished; ``wait`` until it is."""
        if self._under_way is not None and (wait or self._under_way.done()):
            under_way, self._under_way = self._under_way, None
            under_way.result()
            self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the parameters that the optimizer has."""
        for mine, stepped in zip(self._model, _parameters(self.optimizer), strict=True):
            if mine is not stepped:
                mine.copy_(stepped)

    def load(self, optimizer_state: Mapping[str, Any], head: Head) -> None:
        """Continue from a checkpoint, whose parameters the model has already."""
        with self.lock, torch.no_grad():
            self.optimizer.load_state_dict(dict(optimizer_state))
            for mine, stepped in zip(self._model, _parameters(self.optimizer), strict=True):
                if mine is not stepped:
                    stepped.copy_(mine)
            self.statistics.rebase()
            self.head = head

    def adopted(self, head: Head) -> None:
        """The state of ``head`` was put into the optimizer and ``tensors``; call it under the lock."""
        self.publish()
        self.statistics.rebase()
        self.head = head

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ private

    def _make(self, statistics: Tensor, head: Head) -> None:
        with self.lock:
            self.optimizer.step()
            self.statistics.step(statistics)
            self._training.advance_schedulers(head.epoch)
            self.head = head

    @torch.no_grad()
    def _use(self, average: Tensor) -> int:
        """Put the averaged gradients where the optimizer looks for them; returns where they end."""
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
        return start


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
