"""Another codec for each part of a chunk: small tensors as they are, large ones in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import ChunkCodec, Exact
from lightning_hivemind.engine.native.host import host_zeros
from lightning_hivemind.engine.native.memory import Memory

#: encoded parts begin at multiples of this, so that any dtype can be read where it lies
ALIGNMENT = 8


class Mixed:
    """A codec of chunks that consist of ``runs``: so many elements each, in this order, by another codec."""

    def __init__(self, runs: Sequence[tuple[int, ChunkCodec]]) -> None:
        self._runs = list(runs)
        self._elements = sum(elements for elements, _ in runs)
        self.leaves_out = any(codec.leaves_out for _, codec in runs)
        self.name = ", ".join(f"{elements} {codec.name}" for elements, codec in runs)

    def size_bytes(self, elements: int) -> int:
        assert elements == self._elements, "this codec is for chunks of another size"
        return sum(_aligned(codec.size_bytes(count)) for count, codec in self._runs)

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        data = memoryview(bytearray(self.size_bytes(values_N.numel())))
        for elements, encoded, codec in self._parts():
            written = codec.encode(values_N[elements], memory)
            data[encoded.start : encoded.start + len(written)] = written
        return data

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        for elements, encoded, codec in self._parts():
            part = out_N[elements]
            codec.decode(data[encoded.start : encoded.start + codec.size_bytes(part.numel())], part)

    def error_bound(self, values_N: Tensor) -> Tensor:
        bounds = [codec.error_bound(values_N[elements]) for elements, _, codec in self._parts()]
        return torch.cat(bounds) if bounds else host_zeros(0)

    def _parts(self) -> Iterator[tuple[slice, slice, ChunkCodec]]:
        """Where each run lies among the elements, and among the bytes."""
        element = byte = 0
        for count, codec in self._runs:
            size = _aligned(codec.size_bytes(count))
            yield slice(element, element + count), slice(byte, byte + size), codec
            element, byte = element + count, byte + size


def per_chunk(tensors: Sequence[tuple[int, ChunkCodec]], spans: Sequence[slice]) -> list[ChunkCodec]:
    """The codec of each chunk of a flat vector.

    Args:
        tensors: of which the vector consists, in this order: their elements, and the codec of each.
        spans: of the chunks, in order, all of the vector.
    """
    found: list[ChunkCodec] = []
    left = list(reversed(tensors))
    for span in spans:
        runs: list[tuple[int, ChunkCodec]] = []
        missing = span.stop - span.start
        while missing:
            elements, codec = left.pop()
            taken = min(elements, missing)
            if elements > taken:
                left.append((elements - taken, codec))
            if runs and (runs[-1][1] is codec or (isinstance(runs[-1][1], Exact) and isinstance(codec, Exact))):
                runs[-1] = (runs[-1][0] + taken, codec)
            elif taken:
                runs.append((taken, codec))
            missing -= taken
        found.append(runs[0][1] if len(runs) == 1 else Mixed(runs))
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
