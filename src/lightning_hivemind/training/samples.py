"""How many samples a batch holds, and whether its gradient may count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_hivemind.errors import ArgumentError


def count_samples(batch: Any, batch_size: int | None) -> int:
    """Samples in ``batch``: the leading dimension that all its tensors share.

    Args:
        batch: what the data loader gave: tensors in any nest of mappings, sequences and dataclasses. Three or more
            alike items in one list, with tensors of three or more dimensions, may be one sample each (images): that
            is not guessed. A pair counts as fields, and so does whatever has names (a mapping, a named tuple).
        batch_size: the strategy's argument. It wins, except over a batch that visibly holds fewer (the last one).

    Raises:
        ArgumentError: it cannot be told, and ``batch_size`` was not given.
    """
    sizes, perhaps_samples = set(_leading_dimensions(batch)), _may_list_samples(batch)
    clear = len(sizes) == 1 and not perhaps_samples
    if batch_size is not None:
        return min(*sizes, batch_size) if clear else batch_size
    if clear:
        return sizes.pop()
    if perhaps_samples:
        raise ArgumentError(
            f"the batch size cannot be inferred: a list in this batch (a {type(batch).__name__}) may hold one sample"
            " per item, or one field of all samples. Pass HivemindStrategy(batch_size=...), with drop_last=True in the"
            " DataLoader; or let the data set give its fields names (a dict)."
        )
    found = f"its tensors have leading dimensions {sorted(sizes)}" if sizes else "it holds no tensor with a dimension"
    raise ArgumentError(
        f"the batch size cannot be inferred from a batch of type {type(batch).__name__}: {found}."
        " Pass HivemindStrategy(batch_size=...)."
    )


def gradients_are_finite(found: Iterable[torch.Tensor]) -> bool:
    """Whether every value of all of them is; one reduction per tensor, one transfer from the device."""
    gradients = list(found)
    if not gradients:
        return True
    # NaN and infinity survive a sum; a sum of finite float32 values overflows only beyond 1e38
    sums = [g.detach().sum(dtype=torch.float32 if g.dtype.itemsize < 4 else None) for g in gradients]
    device, dtype = sums[0].device, sums[0].dtype
    if all(one.device == device and one.dtype == dtype for one in sums):
        return bool(torch.isfinite(torch.stack(sums)).all())
    return bool(torch.stack([torch.isfinite(one).to(device) for one in sums]).all())


def _leading_dimensions(item: Any) -> Iterator[int]:
    if isinstance(item, torch.Tensor):
        if item.ndim > 0:
            yield item.shape[0]
    elif isinstance(item, PackedSequence):
        yield int(item.batch_sizes[0])
    elif hasattr(item, "num_graphs"):  # torch_geometric's batches count graphs, not nodes
        yield int(item.num_graphs)
    else:
        for part in _parts(item):
            yield from _leading_dimensions(part)


def _may_list_samples(item: Any) -> bool:
    parts = _parts(item)
    if isinstance(item, (list, tuple)) and not hasattr(item, "_fields") and len(parts) > 2:
        first, *others = ([tensor.ndim for tensor in _tensors(part)] for part in parts)
        if max(first, default=0) >= 3 and all(other == first for other in others):
            return True
    return any(_may_list_samples(part) for part in parts)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    for part in _parts(item):
        yield from _tensors(part)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple)):
        return list(item)
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in fields(item)]
    return []
