"""What a codec promises, and the one that changes nothing."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hivemind.engine.native.host import host_bytes
from lightning_hivemind.engine.native.memory import Memory

#: elements that are encoded at a time: what comes between the steps stays in the processor's cache
PIECE = 1 << 18


class ChunkCodec(Protocol):
    """Encodes chunks of float32 for the wire. Shapes: N elements. Thread-safe.

    A value that is not finite comes out as one that is not finite, or makes its whole block so: it is never hidden.
    """

    #: goes into the schema: peers with unlike codecs do not average
    name: str
    #: some values are not sent at all: each peer must add what was left out to what it gives next (error feedback)
    leaves_out: bool

    def size_bytes(self, elements: int) -> int:
        """Bytes of an encoded chunk."""

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        """The bytes of float32 CPU (N,); may be the tensor's own memory, else they are in some of ``memory``."""

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        """The values of ``size_bytes(N)`` bytes into float32 CPU (N,); nothing to do if they lie there already."""

    def error_bound(self, values_N: Tensor) -> Tensor:
        """float32 (N,): how far a decoded value is from the encoded one, at most."""


class Exact:
    """Float32 as it is: the tensor's own memory goes on the wire, and is read into."""

    name = "exact"
    leaves_out = False

    def size_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        return memory_of(values_N)

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        values = view_of(data, torch.float32)
        if len(data) and values.data_ptr() != out_N.data_ptr():
            out_N.copy_(values)

    def error_bound(self, values_N: Tensor) -> Tensor:
        return torch.zeros_like(values_N)


def room(memory: Memory | None, count: int) -> Tensor:
    """uint8 CPU (count,) with anything in it."""
    return memory.bytes(count) if memory is not None and count else host_bytes(count)


def largest(values_N: Tensor) -> float:
    """Of the absolute values; NaN if there is one."""
    if not values_N.numel():
        return 0.0
    low, high = torch.aminmax(values_N)
    return max(abs(float(low)), abs(float(high))) if bool(low <= high) else math.nan


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared."""
    array: Any = tensor.view(torch.uint8).numpy() if tensor.numel() else None
    return memoryview(b"") if array is None else memoryview(array)


def view_of(data: memoryview, dtype: torch.dtype) -> Tensor:
    """These bytes as a tensor, shared."""
    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype, device="cpu")
