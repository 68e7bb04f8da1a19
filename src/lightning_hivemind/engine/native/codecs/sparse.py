"""Top-k: the largest values of each block, and where they are; what is left out waits for later rounds.

What is small would never be sent without error feedback (Stich et al. 2018, arXiv:1809.07599), for which
:attr:`.ChunkCodec.leaves_out` asks. The largest of 256 neighbours, instead of those of a whole model, need one byte
each to say where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_hivemind.engine.native.codecs.base import memory_of, room, view_of
from lightning_hivemind.engine.native.codecs.floating import ScaledFloat16
from lightning_hivemind.engine.native.host import host_floats, host_zeros
from lightning_hivemind.engine.native.memory import Memory

#: a place within it is one byte
BLOCK = 256


class TopK:
    """The ``kept`` largest of 256 values in float16, the others zero: 3 bytes for each that is kept.

    Error: of a value that is kept, :class:`.ScaledFloat16`'s; of one that is not, itself.
    """

    leaves_out = True

    def __init__(self, kept: int) -> None:
        self.name, self._kept, self._values = f"top {kept} of {BLOCK}", kept, ScaledFloat16()

    def size_bytes(self, elements: int) -> int:
        return self._split(elements) + self._count(elements) if elements else 0

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        elements = values_N.numel()
        data = room(memory, self.size_bytes(elements))
        if elements:
            rows = _rows(values_N)
            places = rows.abs().topk(self._kept, dim=1, sorted=False).indices
            split = self._split(elements)
            data[:split].copy_(view_of(self._values.encode(rows.gather(1, places).flatten()), torch.uint8))
            data[split:].copy_(places.flatten())
        return memory_of(data)

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        elements = out_N.numel()
        if not elements:
            return
        split = self._split(elements)
        values = host_floats(self._count(elements))
        self._values.decode(data[:split], values)
        places = view_of(data[split:], torch.uint8).long().view(-1, self._kept)
        in_place = elements % BLOCK == 0
        rows = out_N.view(-1, BLOCK).zero_() if in_place else host_zeros(len(places), BLOCK)
        rows.scatter_(1, places, values.view(-1, self._kept))
        if not in_place:
            out_N.copy_(rows.flatten()[:elements])

    def error_bound(self, values_N: Tensor) -> Tensor:
        if not values_N.numel():
            return host_zeros(0)
        sizes = _rows(values_N).abs()
        least = sizes.topk(self._kept, dim=1).values[:, -1:]
        dropped = torch.where(sizes > least, 0.0, sizes).flatten()[: values_N.numel()]
        return dropped + self._values.error_bound(values_N)

    def _count(self, elements: int) -> int:
        """Of values that are kept."""
        return -(-elements // BLOCK) * self._kept

    def _split(self, elements: int) -> int:
        """Where the places begin, after the values."""
        return self._values.size_bytes(self._count(elements))


def _rows(values_N: Tensor) -> Tensor:
    """(blocks, BLOCK), the last one filled with zeros."""
    return pad(values_N, (0, -values_N.numel() % BLOCK)).view(-1, BLOCK)
