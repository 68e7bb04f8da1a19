"""Half the bytes: float16 with a scale per chunk, and bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import PIECE, largest, memory_of, room, view_of
from lightning_hivemind.engine.native.host import host_floats
from lightning_hivemind.engine.native.memory import Memory

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

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        data = room(memory, self.size_bytes(values_N.numel()))
        scale = largest(values_N)
        data[:4].view(torch.float32).fill_(scale)
        factor = 0.0 if scale <= _TINY else 1.0 / scale
        halves, scaled = data[4:].view(torch.float16), host_floats(min(PIECE, values_N.numel()))
        for part, half in zip(torch.split(values_N, PIECE), torch.split(halves, PIECE), strict=True):
            half.copy_(torch.mul(part, factor, out=scaled[: part.numel()]))
        return memory_of(data)

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        scale = float(view_of(data[:4], torch.float32))
        out_N.copy_(view_of(data[4:], torch.float16)).mul_(scale)

    def error_bound(self, values_N: Tensor) -> Tensor:
        # the fraction's rounding, twice that of float32 (division, multiplication), and what is tiny beside the largest
        return values_N.abs() * (_HALF_ULP + 2.0**-22) + _HALF_TINY * largest(values_N) + _TINY


class BFloat16:
    """The upper half of float32: its range, with 8 bits of precision."""

    name = "bfloat16"
    leaves_out = False

    def size_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        data = room(memory, self.size_bytes(values_N.numel()))
        data.view(torch.bfloat16).copy_(values_N)
        return memory_of(data)

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        out_N.copy_(view_of(data, torch.bfloat16))

    def error_bound(self, values_N: Tensor) -> Tensor:
        bound = values_N.abs() * 2.0**-8 + 2.0**-133
        return bound.masked_fill(values_N.abs() > torch.finfo(torch.bfloat16).max, torch.inf)
