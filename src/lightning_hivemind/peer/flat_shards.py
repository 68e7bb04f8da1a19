"""FSDP (of version 1): a rank has an interval of the values of each parameter, as they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer.pieces import Piece, all_of, interval
from lightning_hivemind.peer.shards import OfPiece, Shards


class FlatShards(Shards):
    """``model``: wrapped, with ``use_orig_params``: the optimizer's parameters are then those intervals.

    Raises:
        ArgumentError: the optimizer has others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, model: torch.nn.Module) -> None:
        super().__init__(optimizer, module)
        self._wrapped = [one for one in FullyShardedDataParallel.fsdp_modules(model) if one._handle is not None]
        found = dict(_pieces_of(self._wrapped))
        missing = [p for p in self.of_optimizer if id(p) not in found]
        if missing:
            raise ArgumentError(
                f"{len(missing)} of the optimizer's parameters are none of FSDP's (of shape {tuple(missing[0].shape)},"
                " say). Make the optimizer in configure_optimizers from self.parameters(), and leave"
                " FSDPStrategy(use_orig_params=...) away."
            )
        for one in self.parameters:  # what FSDP was told to ignore every rank has
            found.setdefault(id(one), (one.shape, all_of(one.shape)))
        self.shapes = [found[id(p)][0] for p in self.parameters]
        self.dtypes = [p.dtype for p in self.parameters]
        self.pieces = [found[id(p)][1] for p in self.parameters]

    def values(self) -> list[Tensor]:
        self._reshard()
        return [p.detach() for p in self.parameters]

    def written(self) -> None:
        """The wrapped modules gather them anew before they are used."""

    def gradients(self) -> list[Tensor | None]:
        return [p.grad if piece.numel else None for p, piece in zip(self.of_optimizer, self.pieces, strict=False)]

    def room_for_gradients(self, reached: Sequence[bool]) -> list[Tensor]:
        self._reshard()
        room = []
        for parameter, has, piece in zip(self.of_optimizer, reached, self.pieces, strict=False):
            if not has or not piece.numel:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if has:
                room.append(parameter.detach() if parameter.grad is None else parameter.grad)
        return room

    def state(self) -> list[dict[str, Any]]:
        return [dict(self.optimizer.state.get(p, {})) for p in self.of_optimizer]

    def room_for_state(self, told: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        self.optimizer.state.clear()
        room: list[dict[str, Tensor]] = []
        for parameter, entry, piece in zip(self.of_optimizer, told, self.pieces, strict=False):
            mine = {}
            for name, value in entry.items():
                if isinstance(value, OfPiece):
                    value = mine[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                if piece.numel:
                    self.optimizer.state[parameter][name] = value
            room.append(mine)
        return room

    def _reshard(self) -> None:
        """Also what stays together after it was only evaluated, which would not see what is written."""
        for one in self._wrapped:
            handle = one._handle
            gathered = handle is not None and getattr(handle.flat_param, "_full_param_padded", None) is not None
            if handle is not None and gathered and handle.uses_sharded_strategy and not handle.needs_unshard():
                _reshard(one, handle, True)


def _pieces_of(
    wrapped: Sequence[FullyShardedDataParallel],
) -> list[tuple[int, tuple[torch.Size, Piece]]]:
    """By the id of a parameter: its whole shape, and what this rank has of it."""
    found = []
    for one in wrapped:
        assert one._handle is not None
        flat = one._handle.flat_param
        if flat._params is None:
            raise ArgumentError(
                "FSDPStrategy(use_orig_params=False): peers could not tell whose part is whose. Leave it away."
            )
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            if not one._handle.uses_sharded_strategy:
                piece = all_of(shape)
            elif info.intra_param_start_idx is None or info.intra_param_end_idx is None:
                piece = interval(shape.numel(), 0, 0)
            else:
                piece = interval(shape.numel(), info.intra_param_start_idx, info.intra_param_end_idx + 1)
            found.append((id(parameter), (shape, piece)))
    return found
