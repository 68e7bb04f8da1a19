"""Eight and four bits: whole numbers times a scale, which is the largest value of a chunk or of a block.

Rounded to the nearest, so the error is at most half a step; with the mean of many peers it averages out further.
Blocks follow Dettmers et al. 2022 (arXiv:2110.02861): an outlier costs precision in its own block only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import PIECE, largest, memory_of, room, view_of
from lightning_hivemind.engine.native.host import host_floats, host_zeros
from lightning_hivemind.engine.native.memory import Memory

_BYTE, _NIBBLE = 127, 7
#: a block whose largest value is below becomes zero: its scale could not be inverted
_TINY = 2.0**-120


class _Blocks:
    """Symmetric whole numbers of -levels to levels per block; scales are float32 and come first."""

    leaves_out = False

    def __init__(self, name: str, levels: int, block: int | None) -> None:
        self.name, self._levels, self._block = name, levels, block

    def size_bytes(self, elements: int) -> int:
        return 4 * self._blocks(elements) + self._packed_bytes(elements)

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        elements = values_N.numel()
        data = room(memory, self.size_bytes(elements))
        if elements:
            split = 4 * self._blocks(elements)
            packed, block = data[split:], self._block or elements
            plain = self._packed_bytes(elements) == elements
            numbers = (packed if plain else room(memory, elements)).view(torch.int8)
            whole = elements // block * block
            scales = data[:split].view(torch.float32)
            self._round(values_N[:whole].view(-1, block), scales[: whole // block], numbers[:whole].view(-1, block))
            if whole < elements:
                self._round(values_N[None, whole:], scales[-1:], numbers[None, whole:])
            if not plain:
                self._pack(numbers, packed)
        return memory_of(data)

    def _round(self, rows: Tensor, scales: Tensor, out: Tensor) -> None:
        """Whole numbers of each row (of one row, if it is long) by its largest value, which goes to ``scales``."""
        one = len(rows) == 1
        if one:
            scales[0] = largest(rows)
        dim, at_once = (1, PIECE) if one else (0, max(1, PIECE // rows.shape[1]))
        pieces = torch.split(rows, at_once, dim)
        scratch = host_floats(pieces[0].numel())
        for part, (piece, numbers) in enumerate(zip(pieces, torch.split(out, at_once, dim), strict=True)):
            between = scratch[: piece.numel()].view_as(piece)
            mine = scales if one else scales[part * at_once : (part + 1) * at_once]
            if not one:
                torch.amax(torch.abs(piece, out=between), dim=1, out=mine)
            factors = torch.where(mine > _TINY, self._levels / mine, host_zeros())
            torch.mul(piece, factors[:, None], out=between)
            numbers.copy_(between.round_().clamp_(-self._levels, self._levels))

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        elements = out_N.numel()
        if not elements:
            return
        split = 4 * self._blocks(elements)
        steps = view_of(data[:split], torch.float32) / self._levels
        numbers = self._unpack(view_of(data[split:], torch.int8), elements)
        block = self._block or elements
        whole = elements // block * block
        out_N.copy_(numbers)
        out_N[:whole].view(-1, block).mul_(steps[: whole // block, None])
        if whole < elements:
            out_N[whole:].mul_(steps[-1])

    def error_bound(self, values_N: Tensor) -> Tensor:
        if not values_N.numel():
            return host_zeros(0)
        largest = self._rows(values_N).abs().amax(dim=1, keepdim=True)
        bound = largest * (0.5 / self._levels + 2.0**-20) + _TINY
        return bound.expand(-1, self._block or values_N.numel()).flatten()[: values_N.numel()]

    def _blocks(self, elements: int) -> int:
        return -(-elements // self._block) if self._block else min(elements, 1)

    def _rows(self, values_N: Tensor) -> Tensor:
        """(blocks, block), the last one filled with zeros."""
        block = self._block or values_N.numel()
        missing = -values_N.numel() % block
        return (torch.nn.functional.pad(values_N, (0, missing)) if missing else values_N).view(-1, block)

    def _packed_bytes(self, elements: int) -> int:
        return elements

    def _pack(self, numbers_N: Tensor, out: Tensor) -> None:
        """Where they take fewer bytes than one each."""

    def _unpack(self, data: Tensor, elements: int) -> Tensor:
        return data


class Uniform8Bit(_Blocks):
    """One byte per value, one scale per chunk. Error: at most 1/254 of the chunk's largest value."""

    def __init__(self) -> None:
        super().__init__("uniform 8 bit", _BYTE, None)


class Blockwise8Bit(_Blocks):
    """One byte per value, one scale per 1024 of them. Error: at most 1/254 of the block's largest value."""

    def __init__(self, block: int = 1024) -> None:
        super().__init__(f"blockwise 8 bit, {block}", _BYTE, block)


class Blockwise4Bit(_Blocks):
    """Half a byte per value, one scale per ``block`` of them. Error: at most 1/14 of the block's largest value."""

    def __init__(self, block: int = 64) -> None:
        super().__init__(f"blockwise 4 bit, {block}", _NIBBLE, block)

    def _packed_bytes(self, elements: int) -> int:
        return -(-elements // 2)

    def _pack(self, numbers_N: Tensor, out: Tensor) -> None:
        """Two in a byte: the first half of the chunk in the lower bits, the second in the upper ones."""
        half = out.numel()
        lower, upper = numbers_N[:half], numbers_N[half:]
        packed = lower & 15
        packed[: upper.numel()] |= upper << 4
        out.copy_(packed.view(torch.uint8))

    def _unpack(self, data: Tensor, elements: int) -> Tensor:
        upper = data[: elements - data.numel()] >> 4  # the sign comes along
        return torch.cat(((data << 4) >> 4, upper))
