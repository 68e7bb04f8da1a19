"""Two bytes per value: plain half precision, and half precision after scaling each row."""

from __future__ import annotations

import math
from typing import Any

import hivemind.compression
import numpy as np
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import runtime_pb2

from lightning_hivemind.codecs import message as wire

_HALF = torch.finfo(torch.float16)
#: in rows this short, mean and deviation take more than what two bytes per value save
_LONGEST_UNSCALED_ROW = 4


def _must_be_raw(codec: object, dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:  # stock peers could not read it: their decoder asks numpy for the type
        wire.warn_uncompressed(type(codec).__name__, dtype)
    return not dtype.is_floating_point or dtype == torch.bfloat16


class Float16Compression(hivemind.compression.Float16Compression):  # type: ignore[misc]
    """Half precision: relative error 2**-11 between 6e-5 and 65504, absolute 3e-8 below, saturating above.

    Single values go uncompressed: a tensor of one element is as often a counter as a statistic. NaN stays NaN.
    """

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        """Message of a tensor, which is not changed."""
        if _must_be_raw(self, tensor.dtype) or tensor.numel() <= 1:
            return wire.write_raw(tensor, info)
        half = tensor.detach().cpu().clamp(_HALF.min, _HALF.max).to(torch.float16)
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=half.numpy().tobytes(),
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        """Tensor of a message, in memory of its own. Raises ValueError if the message is damaged."""
        if wire.is_raw(serialized_tensor):
            return wire.read_raw(serialized_tensor)
        shape, values = wire.size_of(serialized_tensor)
        wire.expect_bytes(serialized_tensor, 2 * values)
        half = wire.numpy_view(serialized_tensor.buffer, np.float16, offset=0, count=values).copy()
        decoded = torch.from_numpy(half).to(wire.float_dtype(serialized_tensor))
        return decoded.reshape(shape).requires_grad_(serialized_tensor.requires_grad)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes after over bytes before."""
        dtype = info.descriptor.dtype
        if not dtype.is_floating_point or dtype == torch.bfloat16 or info.descriptor.numel() <= 1:
            return 1.0
        return 16 / torch.finfo(dtype).bits


class ScaledFloat16Compression(Float16Compression, hivemind.compression.ScaledFloat16Compression):  # type: ignore[misc]
    """Half precision of ``(value - mean) / deviation`` along the last axis: for values outside of half's range.

        float16 scaled values | float32 mean of each row | float32 deviation of each row

    Error: 2**-11 of the distance from the row's mean, plus 6e-8 deviations.
    """

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        """Message of a tensor, which is not changed. Raises ValueError at NaN and infinity."""
        if _must_be_raw(self, tensor.dtype) or not _scalable(tensor.shape):
            return wire.write_raw(tensor, info)
        values = tensor.detach().to(device="cpu", dtype=torch.float32)
        means = values.mean(dim=-1, keepdim=True, dtype=torch.float64).float()
        centred = values - means
        norms = torch.linalg.vector_norm(centred, dim=-1, keepdim=True, dtype=torch.float64)
        deviations = (norms / math.sqrt(tensor.shape[-1])).float()
        if not (torch.isfinite(means).all() and torch.isfinite(deviations).all()):
            raise ValueError(
                f"{type(self).__name__}: the tensor holds NaN, infinity or values near the largest float32"
            )
        deviations[deviations == 0] = 1.0
        scaled = centred.double().div_(deviations).clamp_(_HALF.min, _HALF.max).to(torch.float16)
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=b"".join(part.numpy().tobytes() for part in (scaled, means, deviations)),
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        """Tensor of a message, in memory of its own. Raises ValueError if the message is damaged."""
        if wire.is_raw(serialized_tensor):
            return wire.read_raw(serialized_tensor)
        shape, values = wire.size_of(serialized_tensor)
        rows_shape = (*shape[:-1], 1)
        rows = math.prod(rows_shape)
        wire.expect_bytes(serialized_tensor, 2 * values + 8 * rows)
        buffer = serialized_tensor.buffer
        scaled = wire.numpy_view(buffer, np.float16, offset=0, count=values).astype(np.float32)
        means = wire.numpy_view(buffer, np.float32, offset=2 * values, count=rows).copy()
        deviations = wire.numpy_view(buffer, np.float32, offset=2 * values + 4 * rows, count=rows).copy()
        decoded = torch.from_numpy(scaled).reshape(shape)
        decoded.mul_(torch.from_numpy(deviations).reshape(rows_shape))
        decoded.add_(torch.from_numpy(means).reshape(rows_shape))
        return decoded.to(wire.float_dtype(serialized_tensor)).requires_grad_(serialized_tensor.requires_grad)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes after over bytes before, without the rows' means and deviations."""
        return super().estimate_compression_ratio(info) if _scalable(tuple(info.descriptor.size)) else 1.0


def _scalable(shape: tuple[int, ...]) -> bool:
    return len(shape) > 0 and math.prod(shape) > 0 and shape[-1] > _LONGEST_UNSCALED_ROW
