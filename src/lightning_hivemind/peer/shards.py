"""How a rank holds its part of a model: what each kind of sharding tells :class:`.sharded.Sharded`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer.pieces import Piece, all_of


@dataclass(frozen=True, slots=True)
class OfPiece:
    """In an optimizer's state: a tensor of which a rank has the same piece as of the parameter."""

    dtype: torch.dtype


class Shards(ABC):
    """Of one rank, by parameter in the order of the optimizer's groups; behind them the module's others.

    Args:
        optimizer: by which ranks step, over what they have.
        module: the user's.

    Attributes:
        count: how many parameters are the optimizer's.
        shapes, dtypes: of whole parameters.
        pieces: which this rank has.
    """

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    pieces: list[Piece]

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        self.optimizer, self.module = optimizer, module
        self.parameters = parameters_of(optimizer)
        self.count, inside = len(self.parameters), {id(p) for p in self.parameters}
        self.parameters += [p for p in module.parameters() if id(p) not in inside]

    @property
    def of_optimizer(self) -> list[Tensor]:
        """Those parameters that are the optimizer's."""
        return self.parameters[: self.count]

    @property
    def kind(self) -> str:
        """Of the optimizer: the class's name, equal at all peers."""
        return type(self.optimizer).__name__

    @property
    def steps_by(self) -> str:
        """See :attr:`.PeerTraining.steps_by`."""
        return ""

    @abstractmethod
    def values(self) -> list[Tensor]:
        """The pieces themselves: what is written there is the model's, after :meth:`written`."""

    @abstractmethod
    def written(self) -> None:
        """Other values are in :meth:`values` now."""

    # Only of the optimizer's parameters:

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """Of the batch that has just ended; its mean over samples."""

    def stepping(self) -> list[Tensor | None]:
        """Those of which the next step is made."""
        return self.gradients()

    @abstractmethod
    def room_for_gradients(self, reached: Sequence[bool]) -> list[Tensor]:
        """Where to put averaged ones, of those parameters that are ``reached``; the others have none."""

    @abstractmethod
    def state(self) -> list[dict[str, Any]]:
        """Of the optimizer: pieces, single numbers as tensors, and plain values."""

    @abstractmethod
    def room_for_state(self, told: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        """Give the optimizer another state: of each parameter its entries, with :class:`OfPiece` for a piece.

        Returns where to put the pieces.
        """


class DistributedTensors(Shards):
    """Parameters are DTensors (FSDP2, tensor parallel), or whole ones that every rank has."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, model: torch.nn.Module) -> None:
        super().__init__(optimizer, module)
        for name, one in module.named_buffers():
            if isinstance(one, DTensor) and not all(place.is_replicate() for place in one.placements):
                raise ArgumentError(
                    f"the buffer {name} lies in parts over the ranks ({one.placements}), and a swarm averages whole"
                    " ones. Leave it whole on each rank, or make it a parameter with requires_grad=False."
                )
        self._sharded = [one for one in model.modules() if isinstance(one, FSDPModule)]
        self.shapes = [p.shape for p in self.parameters]
        self.dtypes = [p.dtype for p in self.parameters]
        self.pieces = [_piece_of(p) for p in self.parameters]

    def values(self) -> list[Tensor]:
        for one in self._sharded:  # what stays together after it was only evaluated would not see what is written
            one.reshard()
        return [local(p) for p in self.parameters]

    def written(self) -> None:
        """It is all there is of them."""

    def gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else local(_as(p.grad, p)) for p in self.of_optimizer]

    def room_for_gradients(self, reached: Sequence[bool]) -> list[Tensor]:
        for parameter, has in zip(self.of_optimizer, reached, strict=True):
            if not has:
                parameter.grad = None
            elif parameter.grad is None or not _alike(parameter.grad, parameter):
                parameter.grad = _like(parameter, torch.empty_like(local(parameter)))
        return [local(p.grad) for p in self.of_optimizer if p.grad is not None]

    def state(self) -> list[dict[str, Any]]:
        found = []
        for parameter in self.of_optimizer:
            entry = dict(self.optimizer.state.get(parameter, {}))
            found.append({name: local(one) if isinstance(one, Tensor) else one for name, one in entry.items()})
        return found

    def room_for_state(self, told: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        self.optimizer.state.clear()
        room: list[dict[str, Tensor]] = []
        for parameter, entry in zip(self.of_optimizer, told, strict=True):
            here, mine = local(parameter), {}
            for name, value in entry.items():
                if isinstance(value, OfPiece):
                    mine[name] = torch.empty_like(here, dtype=value.dtype)
                    self.optimizer.state[parameter][name] = _like(parameter, mine[name])
                else:
                    self.optimizer.state[parameter][name] = value
            room.append(mine)
        return room


#: parts of a name that are of what a module was wrapped into for sharding, and for ``torch.compile``
_WRAPPERS, _COMPILED = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module"}, {"_orig_mod"}


def names_of(module: torch.nn.Module) -> dict[int, str]:
    """Of its parameters, by id, as they are without what modules are wrapped into for sharding, or compiled."""
    return {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}


def plain_name(name: str) -> str:
    """Without what modules are wrapped into."""
    return _without(name, _WRAPPERS | _COMPILED)


def unwrapped(name: str) -> str:
    """As the module of a plain Trainer has it, which may be compiled."""
    return _without(name, _WRAPPERS)


def _without(name: str, parts: set[str]) -> str:
    return ".".join(part for part in name.split(".") if part and part not in parts)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it, as a view."""
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def _as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Laid out over the ranks as its parameter."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and not _alike(gradient, parameter):
        return gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _alike(gradient: Tensor, parameter: Tensor) -> bool:
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return bool(gradient.placements == parameter.placements)
    return type(gradient) is Tensor and gradient.layout is torch.strided


def _like(parameter: Tensor, piece: Tensor) -> Tensor:
    """``piece`` as what the optimizer has of it."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _piece_of(parameter: Tensor) -> Piece:
    if not isinstance(parameter, DTensor):
        return all_of(parameter.shape)
    shape, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(shape) != tuple(local(parameter).shape):
        raise ArgumentError(
            f"a parameter of shape {tuple(parameter.shape)} lies over the ranks as {parameter.placements}, and which"
            f" part is where torch cannot tell: it says {tuple(shape)}, and there is {tuple(local(parameter).shape)}."
            " Shard in such dimensions only as divide evenly among the ranks."
        )
    return Piece(tuple(parameter.shape), tuple((b, b + size) for b, size in zip(begin, shape, strict=True)))
