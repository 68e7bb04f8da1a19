"""Ranks each of which has the whole model (DDP): what rank 0 has goes to the others as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hivemind.engine.base import Changed
from lightning_hivemind.engine.native.statistics import has_mean
from lightning_hivemind.peer.ranks import Group, Ranks

#: settings of an optimizer's groups that each rank keeps
_OWN = {"params"}


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor of an optimizer's state that comes next."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool


class Replicas:
    """See the module. Every method is a collective: rank 0 gives, the others take.

    Args:
        tensors: what belongs to a state besides parameters, on each rank in the same order.
        each_steps: every rank has the optimizer's state, and steps. Else only rank 0 has (it lies in host memory).
    """

    def __init__(
        self,
        ranks: Ranks,
        group: Group,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[Tensor],
        *,
        each_steps: bool,
    ) -> None:
        self._ranks, self._group, self._optimizer, self._each_steps = ranks, group, optimizer, each_steps
        self._averaged = [one for one in tensors if has_mean(one)]
        self._own = [one for one in tensors if not has_mean(one)]
        #: for what lies in host memory: NCCL does not send that
        self._host = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def changes_with_statistics(self) -> bool:
        """Whether there is anything that :attr:`.Changed.STATISTICS` means."""
        return bool(self._averaged)

    @torch.no_grad()
    def gradients(self, reached: Sequence[bool]) -> None:
        """``param.grad``, of those that have one; the others have none."""
        for parameter, has in zip(self.parameters, reached, strict=True):
            if not has:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = torch.empty_like(parameter)
        self._broadcast(p.grad for p in self.parameters if p.grad is not None)

    @torch.no_grad()
    def host_gradients(self, reached: Sequence[bool], given: Sequence[Tensor] | None = None) -> None:
        """As :meth:`gradients`, from ``given`` parameters of rank 0 in host memory."""
        for place, (parameter, has) in enumerate(zip(self.parameters, reached, strict=True)):
            gradient = given[place].grad if given is not None else None
            if given is None:
                gradient = torch.empty(parameter.shape, dtype=torch.float32, device="cpu") if has else None
                parameter.grad = None
            if gradient is not None:
                self._broadcast([gradient])
            if given is None and gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype)

    @torch.no_grad()
    def values(self, changed: Changed) -> None:
        """What has changed."""
        if changed & Changed.PARAMETERS:
            self._broadcast(p.data for p in self.parameters)
        if changed & Changed.STATISTICS:
            self._broadcast(self._averaged)
        if changed & Changed.OPTIMIZER and self._each_steps:
            self._share_optimizer()
        if changed & Changed.STATE == Changed.STATE:
            self._broadcast(self._own)

    # ------------------------------------------------------------------ private

    def _share_optimizer(self) -> None:
        optimizer, leads = self._optimizer, self._ranks.leads
        state, groups = self._group.broadcast(self._described() if leads else None)
        if not leads:
            for parameter, entry in zip(self.parameters, state, strict=True):
                optimizer.state.pop(parameter, None)
                if entry:
                    optimizer.state[parameter] = {name: _made(one, parameter) for name, one in entry.items()}
            for group, theirs in zip(optimizer.param_groups, groups, strict=True):
                group.update(theirs)
        told = (optimizer.state[p][name] for p, entry in zip(self.parameters, state, strict=True) for name in entry)
        self._broadcast(one for one in told if isinstance(one, Tensor))

    def _described(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        state = [
            {name: _described(value) for name, value in self._optimizer.state.get(p, {}).items()}
            for p in self.parameters
        ]
        groups = [
            {name: value for name, value in group.items() if name not in _OWN} for group in self._optimizer.param_groups
        ]
        return state, groups

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        under_way = []
        for one in tensors:
            whole = one if one.is_contiguous() else one.contiguous()
            group = self._host if one.device.type == "cpu" else None
            under_way.append((dist.broadcast(whole, 0, group=group, async_op=True), one, whole))
        for work, one, whole in under_way:
            work.wait()
            if whole is not one and not self._ranks.leads:
                one.copy_(whole)


def _described(value: Any) -> Any:
    return _Like(value.dtype, tuple(value.shape), value.device.type == "cpu") if isinstance(value, Tensor) else value


def _made(told: Any, parameter: Tensor) -> Any:
    if not isinstance(told, _Like):
        return told
    device = torch.device("cpu") if told.on_host else parameter.device
    if told.shape == parameter.shape:  # as it lies: fused optimizers do not look
        return torch.empty_like(parameter, dtype=told.dtype, device=device, requires_grad=False)
    return torch.empty(told.shape, dtype=told.dtype, device=device)
