"""What the codecs share: uncompressed messages, and looking twice at a message that a stranger wrote."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import numpy as np
import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2

log = logging.getLogger("lightning_hivemind")
_raw = NoCompression()
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def write_raw(tensor: torch.Tensor, info: CompressionInfo) -> Any:
    """The tensor as it is; bfloat16 takes four bytes per value unless hivemind is told otherwise."""
    return _raw.compress(tensor.cpu(), info)


def is_raw(message: Any) -> bool:
    """Whether a message holds a tensor as it is."""
    return bool(message.compression == runtime_pb2.CompressionType.NONE)


def read_raw(message: Any) -> torch.Tensor:
    """The tensor of such a message."""
    tensor: torch.Tensor = _raw.extract(message)
    return tensor.requires_grad_(message.requires_grad)


@functools.cache
def warn_uncompressed(codec: str, dtype: torch.dtype) -> None:
    """Once per process: a codec that was asked for does not take this type of number."""
    log.warning("%s has no room for %s: such tensors are sent uncompressed", codec, dtype)


def float_dtype(message: Any) -> torch.dtype:
    """The type of the numbers in a message of compressed floats."""
    if message.dtype not in _FLOATS:
        raise ValueError(f"dtype={message.dtype!r}: a compressed tensor has one of {', '.join(_FLOATS)}")
    dtype: torch.dtype = getattr(torch, message.dtype)
    return dtype


def size_of(message: Any) -> tuple[tuple[int, ...], int]:
    """Shape and number of values."""
    shape = tuple(message.size)
    if any(length < 0 for length in shape):
        raise ValueError(f"size={shape}: a message of a tensor has a negative length")
    return shape, math.prod(shape)


def expect_bytes(message: Any, expected: int) -> None:
    """Raises ValueError if the payload has another length than its header says."""
    if len(message.buffer) != expected:
        raise ValueError(f"a message of a {tuple(message.size)} tensor has {len(message.buffer)} bytes, not {expected}")


def numpy_view(buffer: bytes, dtype: type[np.generic], *, offset: int, count: int) -> np.ndarray[Any, Any]:
    """Part of a message as a read-only array."""
    return np.frombuffer(buffer, dtype=dtype, offset=offset, count=count)
