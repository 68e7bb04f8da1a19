"""What peers of one run must have in common, in lines that people can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.peer.shards import Shards, names_of


def schema_of(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    shards: Shards | None,
    others: Mapping[str, Sequence[torch.Tensor]],
) -> list[str]:
    """The optimizer's kind, its parameters, and how many values there are besides.

    ``shards``: where ranks have the model in parts. ``others``: by what they are.
    """
    parameters, names = parameters_of(optimizer), names_of(module)
    # (behind those of the optimizer shards have the module's others)
    shapes = [p.shape for p in parameters] if shards is None else shards.shapes[: shards.count]
    dtypes = [p.dtype for p in parameters] if shards is None else shards.dtypes[: shards.count]
    lines = [f"optimizer {type(optimizer).__name__ if shards is None else shards.kind}"]
    lines += [
        f"{names.get(id(p), '?')} {tuple(shape)} {dtype}{'' if p.requires_grad else ' frozen'}"
        for p, shape, dtype in zip(parameters, shapes, dtypes, strict=True)
    ]
    sizes = {name: sum(tensor.numel() for tensor in tensors) for name, tensors in others.items()}
    return lines + [f"{name}, {size} values" for name, size in sizes.items() if size]
