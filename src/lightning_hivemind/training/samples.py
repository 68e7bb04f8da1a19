"""How many samples a batch holds, and whether its gradient may count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from lightning_hivemind.errors import ArgumentError


def count_samples(batch: Any, batch_size: int | None) -> int:
    """Samples in ``batch``: the leading dimension that all its tensors share.

    Args:
        batch: what the data loader gave: tensors in any nest of mappings, sequences and dataclasses.
        batch_size: the strategy's argument. It wins, except over a batch that visibly holds fewer (the last one).

    Raises:
        ArgumentError: it cannot be told, and ``batch_size`` was not given.
    """
    sizes = set(_leading_dimensions(batch))
    if batch_size is not None:
        return min(sizes) if len(sizes) == 1 and min(sizes) < batch_size else batch_size
    if len(sizes) == 1:
        return sizes.pop()
    found = f"its tensors have leading dimensions {sorted(sizes)}" if sizes else "it holds no tensor with a dimension"
    raise ArgumentError(
        f"the batch size cannot be inferred from a batch of type {type(batch).__name__}: {found}."
        " Pass HivemindStrategy(batch_size=...)."
    )


def gradients_are_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether every value of every ``.grad`` is finite; one reduction per tensor, one transfer from the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return True
    # NaN and infinity survive a sum; a sum of finite float32 values overflows only beyond 1e38
    sums = [g.detach().sum(dtype=torch.float32 if g.dtype.itemsize < 4 else None) for g in gradients]
    device = sums[0].device
    return bool(torch.isfinite(torch.stack([s.to(device=device, dtype=torch.float64) for s in sums])).all())


def _leading_dimensions(item: Any) -> Iterator[int]:
    if isinstance(item, torch.Tensor):
        if item.ndim > 0:
            yield item.shape[0]
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _leading_dimensions(value)
    elif is_dataclass(item) and not isinstance(item, type):
        for field in fields(item):
            yield from _leading_dimensions(getattr(item, field.name))
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _leading_dimensions(value)
    elif hasattr(item, "num_graphs"):  # torch_geometric's batches count graphs, not nodes
        yield int(item.num_graphs)
