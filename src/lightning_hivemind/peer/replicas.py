"""Ranks each of which has the whole model (DDP): what rank 0 has goes to the others as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.engine.base import Changed
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.peer.model import PeerModel


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor of an optimizer's state that comes next."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool


class Replicas(PeerModel):
    """See the module. Where :attr:`each_steps` does not hold, only rank 0 has the optimizer's state."""

    @property
    def parameters(self) -> list[Tensor]:
        return parameters_of(self.local)

    @property
    def clips_elsewhere(self) -> bool:
        return not self.each_steps and any(p.device.type != "cpu" for p in self.parameters)

    def batch_ended(self) -> None:
        """Rank 0's engine looks."""

    def refresh(self, what: Changed) -> None:
        """The engine has rank 0's own."""

    @torch.no_grad()
    def gradients(self, reached: Sequence[bool]) -> None:
        for parameter, has in zip(self.parameters, reached, strict=True):
            if not has:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = torch.empty_like(parameter)
        self._broadcast(p.grad for p in self.parameters if p.grad is not None)

    @torch.no_grad()
    def host_gradients(self, reached: Sequence[bool], given: Sequence[Tensor] | None = None) -> None:
        for place, (parameter, has) in enumerate(zip(self.parameters, reached, strict=True)):
            gradient = given[place].grad if given is not None else None
            if given is None and has:
                gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            parameter.grad = None
            if gradient is not None:
                self._broadcast([gradient])
                parameter.grad = gradient.to(parameter.device)

    @torch.no_grad()
    def take_back(self, reached: Sequence[bool], given: Sequence[Tensor] | None = None) -> None:
        for parameter, one in zip(self.parameters, given or (), strict=False):
            if parameter.grad is None or one.grad is None:
                one.grad = None if parameter.grad is None else parameter.grad.to(one.device)
            else:
                one.grad.copy_(parameter.grad)
            parameter.grad = None  # on a CPU it is the same tensor: from now on the optimizer's alone

    def _spread_parameters(self) -> None:
        self._broadcast(p.data for p in self.parameters)

    def _spread_state(self) -> None:
        optimizer, leads = self.local, self._ranks.leads
        state, settings = self._group.broadcast((self._described(), self._told_settings()) if leads else None)
        if not leads:
            for parameter, entry in zip(self.parameters, state, strict=True):
                optimizer.state.pop(parameter, None)
                if entry:
                    optimizer.state[parameter] = {name: _made(one, parameter) for name, one in entry.items()}
            self._take_settings(settings)
        told = (optimizer.state[p][name] for p, entry in zip(self.parameters, state, strict=True) for name in entry)
        self._broadcast(one for one in told if isinstance(one, Tensor))

    def _described(self) -> list[dict[str, Any]]:
        state = self.local.state
        return [{name: _described(value) for name, value in state.get(p, {}).items()} for p in self.parameters]


def _described(value: Any) -> Any:
    return _Like(value.dtype, tuple(value.shape), value.device.type == "cpu") if isinstance(value, Tensor) else value


def _made(told: Any, parameter: Tensor) -> Any:
    if not isinstance(told, _Like):
        return told
    device = torch.device("cpu") if told.on_host else parameter.device
    if told.shape == parameter.shape:  # as it lies: fused optimizers do not look
        return torch.empty_like(parameter, dtype=told.dtype, device=device, requires_grad=False)
    return torch.empty(told.shape, dtype=told.dtype, device=device)
