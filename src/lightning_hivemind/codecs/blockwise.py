"""BlockwiseQuantization: bitsandbytes' 8-bit floats, scaled per block of 4096 values.

int64 number of blocks | int64 values in the table | float32 largest value of each block | float32 table | uint8 codes
"""

from __future__ import annotations

import importlib
from typing import Any

import hivemind.compression
import numpy as np
import torch
from hivemind.compression import CompressionInfo

from lightning_hivemind.codecs import message as wire

_BLOCK_VALUES = 4096
_HEADER_BYTES = 16
_CODES = 256
#: below this, the table alone is larger than what the codes save
_LEAST_VALUES = (_HEADER_BYTES + 4 * _CODES + 4) // 3 + 1


class BlockwiseQuantization(hivemind.compression.BlockwiseQuantization):  # type: ignore[misc]
    """One byte per value. Needs the package ``bitsandbytes`` on every peer that sends or receives it."""

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        """Message of a tensor. Raises ValueError at NaN and infinity."""
        if not tensor.is_floating_point() or tensor.numel() < _LEAST_VALUES:
            return wire.write_raw(tensor, info)
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{type(self).__name__}: the tensor holds NaN or infinity, which 8 bits cannot carry")
        return super().compress(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        """Tensor of a message. Raises ValueError if the message is damaged, ImportError without bitsandbytes."""
        if wire.is_raw(serialized_tensor):
            return wire.read_raw(serialized_tensor)
        functional = importlib.import_module("bitsandbytes.functional")
        shape, values = wire.size_of(serialized_tensor)
        buffer = serialized_tensor.buffer
        blocks, length = (int.from_bytes(buffer[at : at + 8], "little", signed=True) for at in (0, 8))
        if not 0 <= length <= _CODES or blocks != -(-values // _BLOCK_VALUES):
            raise ValueError(f"{blocks} blocks and a table of {length} values in a message of a {shape} tensor")
        wire.expect_bytes(serialized_tensor, _HEADER_BYTES + 4 * (blocks + length) + values)
        largest = wire.numpy_view(buffer, np.float32, offset=_HEADER_BYTES, count=blocks).copy()
        table = wire.numpy_view(buffer, np.float32, offset=_HEADER_BYTES + 4 * blocks, count=length).copy()
        codes = wire.numpy_view(buffer, np.uint8, offset=_HEADER_BYTES + 4 * (blocks + length), count=values).copy()
        if not (np.isfinite(largest).all() and np.isfinite(table).all()):
            raise ValueError("the scales of 8-bit codes hold NaN or infinity: the sender's tensor did")
        decoded: torch.Tensor = functional.dequantize_blockwise(
            torch.from_numpy(codes).reshape(shape),
            absmax=torch.from_numpy(largest),
            code=torch.from_numpy(table),
            blocksize=_BLOCK_VALUES,
            nested=False,
        )
        decoded = decoded.to(wire.float_dtype(serialized_tensor))
        return decoded.requires_grad_(serialized_tensor.requires_grad)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes after over bytes before."""
        dtype = info.descriptor.dtype
        if not dtype.is_floating_point or info.descriptor.numel() < _LEAST_VALUES:
            return 1.0
        return 8 / torch.finfo(dtype).bits
