"""Ranks that have a model in parts: rank 0 has it whole, in host memory, for the swarm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hivemind.engine.base import Changed
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.native.averaged import refuse_more
from lightning_hivemind.errors import RanksError, StateError
from lightning_hivemind.peer.model import PeerModel
from lightning_hivemind.peer.partial_sums import PartialSums
from lightning_hivemind.peer.pieces import Pieces
from lightning_hivemind.peer.ranks import Group, Ranks
from lightning_hivemind.peer.shards import OfPiece, Shards
from lightning_hivemind.peer.whole import WholeOptimizer

T = TypeVar("T")

#: what torch's optimizers count with, in one number for a parameter of any shape
_COUNTERS = {"step", "mu_product", "eta", "mu"}


@dataclass(frozen=True, slots=True)
class _Single:
    """In an optimizer's state: a number in a tensor."""

    dtype: str
    value: float

    @classmethod
    def of(cls, tensor: Tensor) -> _Single:
        return cls(str(tensor.dtype).removeprefix("torch."), tensor.item())

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.tensor(self.value, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True, slots=True)
class _Other:
    """In an optimizer's state: what is none of what a rank can have a part of."""

    shape: tuple[int, ...]


class Sharded(PeerModel):
    """See the module, and :class:`.PeerModel`.

    In rank 0's host memory there are the parameters. Of what a rank has itself there is a sum of gradients, in float32.

    Args:
        sums_first: gradients are averaged before a step.
        hooked: hooks of the user's may change gradients just before a step.
    """

    in_parts = True

    def __init__(
        self,
        ranks: Ranks,
        group: Group,
        shards: Shards,
        tensors: Sequence[Tensor],
        *,
        each_steps: bool,
        sums_first: bool,
        hooked: bool,
    ) -> None:
        super().__init__(ranks, group, shards.optimizer, tensors, each_steps=each_steps)
        self.shards = shards
        self._hooked = hooked
        self._trained = [p.requires_grad for p in shards.of_optimizer]
        #: which have an averaged gradient, and at rank 0 where they all are; None before the first one
        self._averages: tuple[Sequence[bool], Sequence[Tensor] | None] | None = None
        self._pieces = Pieces(ranks, shards.pieces, self._host)
        self.sums = PartialSums(ranks, shards, self._pieces) if sums_first else None
        self._all = range(shards.count)
        #: at rank 0
        self._whole: list[Tensor] = []
        if ranks.leads:
            self._whole = [
                torch.empty(shape, dtype=dtype, device="cpu").requires_grad_(parameter.requires_grad)
                for shape, dtype, parameter in zip(
                    shards.shapes[: shards.count], shards.dtypes, shards.parameters, strict=False
                )
            ]
            self.optimizer = WholeOptimizer(shards.optimizer, self._whole)
            self.steps_on = self._values()[0].device if each_steps else None
            self.steps_by = shards.steps_by
        self.refresh(Changed.PARAMETERS)

    @property
    def clips_elsewhere(self) -> bool:
        return self.steps_on is not None and self.steps_on.type != "cpu"

    def batch_gradients(self) -> list[Tensor]:
        return [one for one in self.shards.gradients() if one is not None]

    # ------------------------------------------------------------------ to rank 0

    def batch_ended(self) -> None:
        refuse_more(len(parameters_of(self.local)), self.shards.of_optimizer, self._trained)
        for parameter in self._whole:
            parameter.grad = None

    @torch.no_grad()
    def refresh(self, what: Changed) -> None:
        if what & Changed.PARAMETERS:
            whole = [one.detach() for one in self._whole]
            self._pieces.gather(self._all, self._values(), self._dtypes(self._all), whole)
        if what & Changed.OPTIMIZER and self.each_steps:
            self._gather_state()

    # ------------------------------------------------------------------ from rank 0

    def gradients(self, reached: Sequence[bool]) -> None:
        self.host_gradients(reached, self._whole)

    @torch.no_grad()
    def host_gradients(self, reached: Sequence[bool], given: Sequence[Tensor] | None = None) -> None:
        self._averages = reached, given
        which, whole = self._with_gradient(reached, given)
        self._pieces.spread(which, self.shards.room_for_gradients(reached), self._dtypes(which), whole)

    @torch.no_grad()
    def take_back(self, reached: Sequence[bool], given: Sequence[Tensor] | None = None) -> None:
        which, whole = self._with_gradient(reached, given)
        found = self.shards.stepping()
        self._pieces.gather(which, [found[n] for n in which], self._dtypes(which), whole)

    @torch.no_grad()
    def clip_by_norm(self, limit: float) -> None:
        """Of which ranks step now, as ``torch.nn.utils.clip_grad_norm_`` of the whole model would, to the last bit."""
        stepping = self.shards.stepping()
        if self._averages is None:
            norm = self._norm_of_parts(stepping)
        else:
            if self._hooked:
                self.take_back(*self._averages)
            given, norm = self._averages[1] or (), 0.0
            if self._ranks.leads:
                norm = float(torch.nn.utils.clip_grad_norm_(given, limit))
            norm = self._ranks.share("norm", norm)[0]
        total = torch.tensor(norm, dtype=torch.float32, device="cpu")
        share = torch.clamp(limit / (total + 1e-6), max=1.0).item()
        for one in stepping:
            if one is not None:
                one.mul_(share)

    def _spread_parameters(self) -> None:
        whole = [one.detach() for one in self._whole]
        self._pieces.spread(self._all, self._values(), self._dtypes(self._all), whole)
        self.shards.written()

    def _spread_state(self) -> None:
        told = self._group.broadcast((self._described(), self._told_settings()) if self._ranks.leads else None)
        entries, settings = told
        self._take_settings(settings)
        on_device = [bool(g.get("capturable") or g.get("fused")) for g in self.local.param_groups for _ in g["params"]]
        made = [
            {
                name: one.tensor(p.device if fused else "cpu") if isinstance(one, _Single) else one
                for name, one in e.items()
            }
            for e, fused, p in zip(entries, on_device, self.shards.parameters, strict=False)
        ]
        room = self.shards.room_for_state(made)
        for name, which, dtypes in _by_name(entries):
            states = [self.optimizer.state[self._whole[n]] for n in which] if self._ranks.leads else []
            whole = [one[name].contiguous() for one in states]
            self._pieces.spread(which, [room[n][name] for n in which], dtypes, whole)

    # ------------------------------------------------------------------ checkpoints: of the module's other ones, too

    @torch.no_grad()
    def everything(self) -> list[Tensor]:
        """At rank 0: each parameter in host memory, in the order of :attr:`.Shards.parameters`; else nothing."""
        shards, which = self.shards, range(len(self.shards.parameters))
        whole: list[Tensor] = []
        if self._ranks.leads:
            made = zip(shards.shapes, shards.dtypes, strict=True)
            whole = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in made]
        self._pieces.gather(which, shards.values(), shards.dtypes, whole)
        return whole

    @torch.no_grad()
    def take_everything(self, whole: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """The way back; and ``tensors`` that each rank has, as rank 0 has them."""
        which = range(len(self.shards.parameters))
        self._pieces.spread(which, self.shards.values(), self.shards.dtypes, whole)
        self.shards.written()
        self._broadcast(tensors)

    def at_rank_0(self, do: Callable[[], T]) -> T | None:
        """What it returns there, else None; what it raises there is raised at all ranks."""
        made: T | None = None
        failed: Exception | None = None
        try:
            made = do() if self.leads else None
        except Exception as error:  # of whatever kind: the others wait
            failed = error
        told = self.say(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        if told is not None:
            raise RanksError(f"rank 0 of this peer has ended: {told}")
        return made

    def say(self, what: Any) -> Any:
        """Rank 0's, at all ranks."""
        return self._group.broadcast(what)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._ranks.leads

    # ------------------------------------------------------------------ private

    def _norm_of_parts(self, parts: Sequence[Tensor | None]) -> float:
        """Each value counted once."""
        mine = [one for one, counts in zip(parts, self._pieces.speaks_for, strict=False) if counts and one is not None]
        squares = self._ranks.share("squares", sum(float(one.double().square().sum()) for one in mine))
        return math.sqrt(sum(squares))

    def _values(self) -> list[Tensor]:
        return self.shards.values()[: self.shards.count]

    def _with_gradient(self, reached: Sequence[bool], given: Sequence[Tensor] | None) -> tuple[list[int], list[Tensor]]:
        """Which have one, and at rank 0 those of ``given``."""
        which = [n for n in self._all if reached[n]]
        gradients = [given[n].grad for n in which] if given and self._ranks.leads else []
        return which, [one for one in gradients if one is not None]

    def _dtypes(self, which: Sequence[int]) -> list[torch.dtype]:
        return [self.shards.dtypes[n] for n in which]

    def _described(self) -> list[dict[str, Any]]:
        """At rank 0, of the whole optimizer's state."""
        found = [
            {name: _told(name, one, whole.shape) for name, one in self.optimizer.state.get(whole, {}).items()}
            for whole in self._whole
        ]
        self._refuse_others(found)
        return found

    def _refuse_others(self, entries: Sequence[Mapping[str, Any]]) -> None:
        for name, other in (item for entry in entries for item in entry.items() if isinstance(item[1], _Other)):
            raise StateError(
                f"{type(self.local).__name__} keeps {name!r} of shape {other.shape}, which is not its parameter's: the"
                " checkpoint is of another model; or else this optimizer's state cannot go from peer to peer where a"
                " model is in parts: use another one, or DDP."
            )

    def _gather_state(self) -> None:
        """(A rank whose piece of a parameter is empty may have no state of it.)"""
        state, pieces = self.shards.state(), self.shards.pieces
        mine = [
            {name: _told(name, one, piece.shape) for name, one in entry.items()}
            for entry, piece in zip(state, pieces, strict=False)
        ]
        everybody: list[list[dict[str, Any]]] = [[] for _ in range(self._ranks.size)]
        dist.all_gather_object(everybody, mine, group=self._host)
        entries = [max((one[n] for one in everybody), key=len) for n in self._all]
        if self._ranks.leads:
            self._refuse_others(entries)
        elif any(isinstance(one, _Other) for entry in entries for one in entry.values()):
            return
        leads, found = self._ranks.leads, [dict[str, Any]() for _ in self._all]
        for n, entry in enumerate(entries):
            for name, one in entry.items():
                if isinstance(one, _Single):
                    found[n][name] = one.tensor()
                elif not isinstance(one, OfPiece):
                    found[n][name] = one
                elif leads:
                    found[n][name] = torch.empty(self.shards.shapes[n], dtype=one.dtype, device="cpu")
        for name, which, dtypes in _by_name(entries):
            parts = [state[n].get(name) for n in which]
            self._pieces.gather(which, parts, dtypes, [found[n][name] for n in which] if leads else [])
        if leads:
            made: dict[Tensor, Any] = {
                w: {name: one[name] for name in e} for w, one, e in zip(self._whole, found, entries, strict=True) if e
            }
            self.optimizer.state = defaultdict(dict, made)  # at once: other threads look how large it is


def _told(name: str, value: Any, shape: Sequence[int]) -> Any:
    """``shape``: of what there is of the parameter; it may be a single number, too."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and (tuple(shape) != () or name in _COUNTERS):
        return _Single.of(value)
    if tuple(value.shape) == tuple(shape):
        return OfPiece(value.dtype)
    return _Other(tuple(value.shape))


def _by_name(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int], list[torch.dtype]]]:
    """Of each name in a state: which parameters have a piece of it, and its dtypes."""
    names = dict.fromkeys(name for entry in entries for name, one in entry.items() if isinstance(one, OfPiece))
    found = []
    for name in names:
        which = [n for n, entry in enumerate(entries) if isinstance(entry.get(name), OfPiece)]
        found.append((name, which, [entries[n][name].dtype for n in which]))
    return found
