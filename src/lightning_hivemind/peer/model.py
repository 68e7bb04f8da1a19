"""What a peer of several processes is for its engine: the one seam between rank 0 and how ranks hold their model."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hivemind.engine.base import Changed, RanksSums
from lightning_hivemind.engine.groups import parameters_of, settings_of
from lightning_hivemind.engine.native.state.settings import LOCAL_SETTINGS, like, plain
from lightning_hivemind.engine.native.statistics import has_mean
from lightning_hivemind.errors import StateError
from lightning_hivemind.peer.ranks import Group, Ranks


class PeerModel(ABC):
    """See the module. What takes or hands out values is a collective of all ranks: rank 0 has what comes from the swarm
    or goes to it. The rest each rank does by itself (but see :meth:`batch_gradients`).

    Args:
        local: this rank's own optimizer.
        tensors: what belongs to a state besides parameters, on each rank in the same order, and whole.
        each_steps: every rank steps with its own optimizer. Else rank 0 alone does, in host memory.

    Attributes:
        optimizer: what rank 0's engine is given for an optimizer: over whole parameters.
        in_parts: no rank has whole parameters by itself: what :attr:`optimizer` has is as old as the last call.
    """

    in_parts = False
    #: of what the backward passes leave, where rank 0 cannot sum it by itself
    sums: RanksSums | None = None
    #: where the ranks' optimizers step, if not where the parameters of :attr:`optimizer` are
    steps_on: torch.device | None = None
    #: see :attr:`.PeerTraining.steps_by`
    steps_by = ""
    optimizer: torch.optim.Optimizer

    def __init__(
        self, ranks: Ranks, group: Group, local: torch.optim.Optimizer, tensors: Sequence[Tensor], *, each_steps: bool
    ) -> None:
        self._ranks, self._group, self.each_steps = ranks, group, each_steps
        self.local = self.optimizer = local
        self._averaged = [one for one in tensors if has_mean(one)]
        self._own = [one for one in tensors if not has_mean(one)]
        #: for what lies in host memory: NCCL does not send that
        self._host = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    @property
    @abstractmethod
    def clips_elsewhere(self) -> bool:
        """Whether, with a hook before steps, a norm is computed on another device than the step: in other last bits."""

    @property
    def changes_with_statistics(self) -> bool:
        """Whether there is anything that :attr:`.Changed.STATISTICS` means."""
        return bool(self._averaged)

    def batch_gradients(self) -> list[Tensor]:
        """What this rank has after a backward pass. All ranks ask: to lay a gradient out as its parameter is may take
        all of them.
        """
        return [p.grad for p in parameters_of(self.local) if p.grad is not None]

    # ------------------------------------------------------------------ to rank 0

    @abstractmethod
    def batch_ended(self) -> None:
        """What was averaged before is done with. Raises ArgumentError: the optimizer has parameters that it had not."""

    @abstractmethod
    def refresh(self, what: Changed) -> None:
        """Into the parameters, or the state, too, of :attr:`optimizer`: what the ranks have now."""

    # ------------------------------------------------------------------ from rank 0

    @abstractmethod
    def gradients(self, reached: Sequence[bool]) -> None:
        """To ``param.grad`` of each rank, of those parameters that have one; the others have none."""

    @abstractmethod
    def host_gradients(self, reached: Sequence[bool], given: Sequence[Tensor] | None = None) -> None:
        """As :meth:`gradients`, from ``given`` parameters of rank 0 in host memory."""

    @abstractmethod
    def take_back(self, reached: Sequence[bool], given: Sequence[Tensor] | None = None) -> None:
        """What hooks have made of it, into the ``given`` ones."""

    @torch.no_grad()
    def values(self, changed: Changed) -> None:
        """What has changed."""
        if changed & Changed.PARAMETERS:
            self._spread_parameters()
        if changed & Changed.STATISTICS:
            self._broadcast(self._averaged)
        if changed & Changed.OPTIMIZER and self.each_steps:
            self._spread_state()
        if changed & Changed.STATE == Changed.STATE:
            self._broadcast(self._own)

    @abstractmethod
    def _spread_parameters(self) -> None: ...

    @abstractmethod
    def _spread_state(self) -> None: ...

    def _told_settings(self) -> list[dict[str, Any]]:
        """Of rank 0's optimizer, without tensors, which would be on its device; and without what each rank has of its
        own, or cannot be told.
        """
        told: list[dict[str, Any]] = []
        for group in settings_of(self.local):
            told.append({})
            for name in group.keys() - LOCAL_SETTINGS:
                with contextlib.suppress(StateError):
                    told[-1][name] = plain(self.local, name, group[name])
        return told

    def _take_settings(self, told: Sequence[dict[str, Any]]) -> None:
        for group, theirs in zip(self.local.param_groups, told, strict=True):
            group.update({name: like(group.get(name), value) for name, value in theirs.items()})

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """What rank 0 has, to all: each has all of it. As bytes: not every dtype can be sent."""
        under_way = []
        for one in tensors:
            whole = one if one.is_contiguous() else one.contiguous()
            group = self._host if one.device.type == "cpu" else None
            flat = whole.detach().view(-1)
            told = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # of one value the stride may be any
            under_way.append((dist.broadcast(told, 0, group=group, async_op=True), one, whole))
        for work, one, whole in under_way:
            work.wait()
            if whole is not one and not self._ranks.leads:
                one.copy_(whole)
