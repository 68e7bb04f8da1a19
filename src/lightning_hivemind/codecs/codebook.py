"""Messages of 8-bit codes: a table of up to 256 values, and one byte per value that points into it.

int64 number of values in the table | float32 table | uint8 code of each value
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import runtime_pb2

from lightning_hivemind.codecs import message as wire

CODES = 256
_HEADER_BYTES = 8
#: below this, the table alone is larger than what the codes save (4 bytes per value)
LEAST_VALUES = (_HEADER_BYTES + 4 * CODES) // 3 + 1

Array = np.ndarray[Any, Any]


class CodebookCodec:
    """Encoding and decoding for codecs that differ in how they choose the codes. Thread-safe: no state."""

    compression_type: Any

    @abstractmethod
    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """One code per value.

        Args:
            values: float32 CPU (N,), N >= 1; not changed.

        Returns:
            uint8 or int64 CPU (N,), 0 to 255.

        Raises:
            ValueError: NaN, infinity, or values so large that their differences are infinite.
        """

    def quantize(self, tensor: torch.Tensor, allow_inplace: bool = False) -> tuple[Array, Array]:
        """Codes, in the shape of the tensor, and the table: for each code the mean of the values that have it."""
        values = tensor.detach().to(device="cpu", dtype=torch.float32).reshape(-1)
        codes = self.codes(values).numpy()
        # float64 sums: in float32 the mean of 1e5 values is off by more than what 8 bits lose
        sums = np.bincount(codes, weights=values.numpy(), minlength=CODES)
        counts = np.bincount(codes, minlength=CODES)
        table = (sums / np.maximum(counts, 1)).astype(np.float32)
        return codes.astype(np.uint8, copy=False).reshape(tensor.shape), table

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        """Message of a tensor; ``tensor`` is not changed, whatever ``allow_inplace`` says.

        Raises:
            ValueError: NaN or infinity in the tensor. Nothing was sent.
        """
        if not tensor.is_floating_point() or tensor.numel() < LEAST_VALUES:
            return wire.write_raw(tensor, info)
        codes, table = self.quantize(tensor)
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=b"".join((np.int64(len(table)).tobytes(), table.tobytes(), codes.tobytes())),
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        """Tensor of a message, in memory of its own.

        Raises:
            ValueError: the message is damaged, or holds NaN or infinity.
        """
        if wire.is_raw(serialized_tensor):
            return wire.read_raw(serialized_tensor)
        shape, values = wire.size_of(serialized_tensor)
        buffer = serialized_tensor.buffer
        if len(buffer) < _HEADER_BYTES:
            wire.expect_bytes(serialized_tensor, _HEADER_BYTES + values)
        length = int.from_bytes(buffer[:_HEADER_BYTES], "little", signed=True)
        if not 0 <= length <= CODES:
            raise ValueError(f"a table of {length} values: 8-bit codes have at most {CODES}")
        wire.expect_bytes(serialized_tensor, _HEADER_BYTES + 4 * length + values)
        table = wire.numpy_view(buffer, np.float32, offset=_HEADER_BYTES, count=length)
        codes = wire.numpy_view(buffer, np.uint8, offset=_HEADER_BYTES + 4 * length, count=values)
        if values and int(codes.max()) >= length:
            raise ValueError(f"code {int(codes.max())} in a message with a table of {length} values")
        if not np.isfinite(table).all():
            raise ValueError("the table of 8-bit codes holds NaN or infinity: the sender's tensor did")
        decoded = torch.from_numpy(np.take(table, codes)).to(wire.float_dtype(serialized_tensor))
        return decoded.reshape(shape).requires_grad_(serialized_tensor.requires_grad)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes after over bytes before."""
        dtype = info.descriptor.dtype
        if not dtype.is_floating_point or info.descriptor.numel() < LEAST_VALUES:
            return 1.0
        return 8 / torch.finfo(dtype).bits


def refuse_unquantizable(codec: object) -> ValueError:
    """The error of a tensor that no table of codes can stand for."""
    return ValueError(
        f"{type(codec).__name__}: the tensor holds NaN, infinity or values near the largest float32, which 8 bits "
        "cannot carry; nothing was sent. If these are gradients: lower the learning rate or clip them"
    )
