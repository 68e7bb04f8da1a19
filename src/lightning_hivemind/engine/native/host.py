"""Tensors in host memory, float32 or bytes, whatever a script has made torch's defaults.

``precision="bf16-true"`` makes bfloat16 the default of the whole process while a batch is computed, which is just when
the rounds' thread encodes and decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def host_bytes(count: int) -> Tensor:
    """uint8 CPU (count,) with anything in it."""
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def host_floats(count: int) -> Tensor:
    """float32 CPU (count,) with anything in it."""
    return torch.empty(count, dtype=torch.float32, device="cpu")


def host_zeros(*shape: int) -> Tensor:
    """float32 CPU (shape)."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")
