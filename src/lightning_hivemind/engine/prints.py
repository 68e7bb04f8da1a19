"""Are these the values that were there before, or that another peer has? Told by some of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

#: values that are looked at of each: another seed, or an average of many steps, makes all of them others
SAMPLE = 1024


@torch.no_grad()
def print_of(tensors: Iterable[Tensor]) -> str:
    """Sixteen hexadecimal digits of shapes and a sample of the values of each."""
    found = hashlib.sha256()
    for tensor in tensors:
        if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            continue
        values = tensor.detach().flatten()
        sample = values[:: max(1, values.numel() // SAMPLE)].to("cpu").contiguous()
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
