"""Statistics that an optimizer keeps (``average_opt_statistics``), as tensors that stay the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hivemind.engine.priming import prime_optimizer_state, prime_statistics


class Moments:
    """``names`` of the state of ``optimizer``, of every parameter that is trained; zeros before the first step.

    Attributes:
        tensors: what the optimizer uses, on the parameters' devices; the same objects after :meth:`keep`.

    Raises:
        ArgumentError: the optimizer keeps no such thing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._places = prime_statistics(optimizer, names)
        self.tensors: list[Tensor] = [optimizer.state[parameter][name] for parameter, name in self._places]

    @torch.no_grad()
    def keep(self) -> None:
        """Where the optimizer has other tensors now (it stepped, or a state was loaded), take over their values."""
        state = self._optimizer.state
        if any(not state.get(parameter) for parameter, _ in self._places):  # a checkpoint may have none of it
            prime_optimizer_state(self._optimizer, frozen=False)
        for (parameter, name), tensor in zip(self._places, self.tensors, strict=True):
            other = state[parameter].get(name)
            if other is not tensor and isinstance(other, Tensor) and other.shape == tensor.shape:
                tensor.copy_(other)
            state[parameter][name] = tensor
