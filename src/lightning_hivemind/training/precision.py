"""Loss scaling (``precision="16-mixed"``) when one step gathers many micro-batches of many peers.

Each peer has its own scale. Gradients are unscaled before they are accumulated, so that peers with unlike scales (or
none) average the same thing, and an overflow costs its own micro-batch only. In reused buffers (``reuse_grad_buffers``)
that is impossible: they are unscaled when they are handed to the round, the scale grows after a step only, with what
lies in them, and an overflow costs what was accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.training.samples import gradients_are_finite


class LossScale:
    """Drives one ``torch.amp.GradScaler`` (None: no scaling) for one optimizer over the model's parameters.

    ``gradients``: what this process has after a backward pass; None: ``param.grad`` of the optimizer's parameters.
    """

    def __init__(
        self,
        scaler: Any | None,
        optimizer: torch.optim.Optimizer,
        *,
        reuses_buffers: bool,
        gradients: Callable[[], Iterable[torch.Tensor]] | None = None,
    ) -> None:
        self._scaler, self._optimizer, self._reuses = scaler, optimizer, reuses_buffers
        self._scaled = False  # whether the scaler has seen a gradient: before that it refuses everything
        self._gradients = gradients or self._of_parameters
        self._parameters = parameters_of(optimizer)

    @property
    def active(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())

    @property
    def buffer_scale(self) -> float:
        """What gradients in reused buffers are still multiplied by."""
        return float(self._scaler.get_scale()) if self._scaler is not None and self._reuses and self.active else 1.0

    def accept(self) -> bool:
        """After a backward pass: unscale, and say whether the gradients may count."""
        shown = _has_gradients(self._optimizer)
        self._scaled |= shown
        if self._scaler is not None and self.active and not self._reuses and shown:
            self._scaler.unscale_(self._optimizer)
            finite = gradients_are_finite(self._gradients())
            self._scaler.update()
            return finite
        finite = gradients_are_finite(self._gradients())
        if not finite:
            self._update_scale(self._optimizer)
        return finite

    def after_commit(self) -> float:
        """After a step the scale may grow. Returns what gradients in reused buffers are to be multiplied by."""
        if self._scaler is None or not self.active or not self._reuses or not self._scaled:
            return 1.0
        before, fine = float(self._scaler.get_scale()), torch.zeros_like(self._parameters[0].reshape(-1)[:1])
        fine.grad = torch.zeros_like(fine)  # the buffers themselves were looked at after each batch
        self._update_scale(torch.optim.SGD([fine], lr=0.0))
        return float(self._scaler.get_scale()) / before

    def _of_parameters(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _update_scale(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is not None and self.active and _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)  # only to let the scaler see infinities
            self._scaler.update()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """A scaler that was shown no gradient refuses to update."""
    return any(p.grad is not None for p in parameters_of(optimizer))
