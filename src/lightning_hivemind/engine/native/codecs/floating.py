"""Half the bytes: float16 with a scale per chunk, and bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import memory_of, view_of

#: of float16: bits of the fraction, and half the distance of its smallest numbers
_HALF_ULP = 2.0**-11
_HALF_TINY = 2.0**-25
#: a chunk whose largest value is below becomes zero: its scale could not be inverted
_TINY = 2.0**-120


class ScaledFloat16:
    """Float16 of the values divided by the chunk's largest, which goes along: small gradients do not vanish.

    (Plain float16 has nothing below 6e-8, where gradients of large models lie, and nothing above 65504.)
    """

    name = "float16"
    leaves_out = False

    def size_bytes(self, elements: int) -> int:
        return 4 + 2 * elements

    def encode(self, values_N: Tensor) -> memoryview:
        data = torch.empty(self.size_bytes(values_N.numel()), dtype=torch.uint8)
        scale = _largest(values_N)
        data[:4].view(torch.float32).fill_(scale)
        torch.mul(values_N, 1.0 / scale if scale > _TINY else 0.0, out=(scaled := torch.empty_like(values_N)))
        data[4:].view(torch.float16).copy_(scaled)
        return memory_of(data)

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        scale = float(view_of(data[:4], torch.float32))
        out_N.copy_(view_of(data[4:], torch.float16)).mul_(scale)

    def error_bound(self, values_N: Tensor) -> Tensor:
        # the fraction's rounding, twice that of float32 (division, multiplication), and what is tiny beside the largest
        return values_N.abs() * (_HALF_ULP + 2.0**-22) + _HALF_TINY * _largest(values_N) + _TINY


class BFloat16:
    """The upper half of float32: its range, with 8 bits of precision."""

    name = "bfloat16"
    leaves_out = False

    def size_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values_N: Tensor) -> memoryview:
        return memory_of(values_N.to(torch.bfloat16))

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        out_N.copy_(view_of(data, torch.bfloat16))

    def error_bound(self, values_N: Tensor) -> Tensor:
        return values_N.abs() * 2.0**-8 + 2.0**-133


def _largest(values_N: Tensor) -> float:
    return float(values_N.abs().max()) if values_N.numel() else 0.0
