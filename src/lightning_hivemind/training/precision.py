"""Loss scaling (``precision="16-mixed"``) when one step gathers many micro-batches of many peers.

Each peer has its own scale. Gradients are unscaled before they are accumulated, so that peers with unlike scales (or
none) average the same thing, and an overflow costs its own micro-batch only. In reused buffers (``reuse_grad_buffers``)
that is impossible: there the scale stands still while gradients accumulate, they are unscaled when they are handed to
the round, and an overflow costs what was accumulated.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_hivemind.training.samples import gradients_are_finite


class LossScale:
    """Drives one ``torch.amp.GradScaler`` (None: no scaling) for one optimizer over the model's parameters."""

    def __init__(self, scaler: Any | None, optimizer: torch.optim.Optimizer, *, reuses_buffers: bool) -> None:
        self._scaler, self._optimizer, self._reuses = scaler, optimizer, reuses_buffers
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @property
    def active(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())

    @property
    def buffer_scale(self) -> float:
        """What gradients in reused buffers are still multiplied by."""
        return float(self._scaler.get_scale()) if self._scaler is not None and self._reuses and self.active else 1.0

    def accept(self) -> bool:
        """After a backward pass: unscale, and say whether the gradients may count."""
        if self._scaler is not None and self.active and not self._reuses and self._has_gradients():
            self._scaler.unscale_(self._optimizer)
            finite = gradients_are_finite(self._parameters)
            self._scaler.update()
            return finite
        finite = gradients_are_finite(self._parameters)
        if not finite:
            self._update_scale()
        return finite

    def after_commit(self) -> None:
        """The buffers are empty again: now the scale may grow."""
        if self._reuses:
            self._update_scale()

    def _update_scale(self) -> None:
        if self._scaler is not None and self.active and self._has_gradients():
            self._scaler.unscale_(self._optimizer)  # only to let the scaler see infinities
            self._scaler.update()

    def _has_gradients(self) -> bool:
        """A scaler that was shown no gradient refuses to update."""
        return any(p.grad is not None for p in self._parameters)
