"""Settings of an optimizer's groups, as one peer tells them and another has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hivemind.errors import StateError

#: settings of optimizers that depend on the device: each peer keeps its own
LOCAL_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
#: those that only some have: a scheduler adds them, a checkpoint from before there was one removes them, a newer torch
#: knows more
EXTRA_SETTINGS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "decoupled_weight_decay"}
)


def fits(own: Any, value: Any) -> bool:
    """Whether a setting can take the place of this peer's own."""
    if isinstance(own, (list, tuple)):
        return isinstance(value, list) and len(value) == len(own) and all(map(fits, own, value))
    if isinstance(own, bool) or own is None or isinstance(own, str):
        return value is None or isinstance(value, (bool, str))
    return isinstance(value, (int, float))


def plain(optimizer: torch.optim.Optimizer, name: str, value: Any) -> Any:
    """What is told of a setting. Raises StateError if that cannot be."""
    if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate may be one
        return float(value)
    if isinstance(value, np.generic):  # of a scheduler that computes with them
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(optimizer, name, one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise cannot_be_told(optimizer, name, value)


def cannot_be_told(optimizer: torch.optim.Optimizer, name: str, value: Any) -> StateError:
    """For the user of a peer that nobody could take a state from."""
    return StateError(
        f"{type(optimizer).__name__} keeps {name}, a {type(value).__name__}, which cannot be handed to peers that join:"
        " use an optimizer whose state is tensors and numbers."
    )


def like(own: Any, value: Any) -> Any:
    """As msgpack gave it, in the type that this peer's optimizer has it in."""
    if isinstance(own, Tensor):
        return torch.full_like(own, float(value))
    if isinstance(own, (list, tuple)):
        return type(own)(like(mine, theirs) for mine, theirs in zip(own, value, strict=True))
    return value
