"""Quantile8BitQuantization: 256 buckets that hold equally many values each."""

from __future__ import annotations

import hivemind.compression
import numpy as np
import torch

from lightning_hivemind.codecs.codebook import CODES, Array, CodebookCodec, refuse_unquantizable

#: values whose quantiles are found exactly; of longer tensors the quantiles of the chunks' quantiles are taken
_CHUNK_VALUES = 2**17


class Quantile8BitQuantization(CodebookCodec, hivemind.compression.Quantile8BitQuantization):  # type: ignore[misc]
    """One byte per value; fine where values are dense, coarse in the tails. Slower to encode than the uniform codec.

    Error: a decoded value lies between the smallest and the largest value of its bucket, which holds about 1/256 of
    the tensor. hivemind's own encoder uses a pool of threads, which a forked averager does not inherit; this one does
    not.
    """

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(values).all():
            raise refuse_unquantizable(self)
        borders = _quantiles(values.numpy())
        return torch.bucketize(values, torch.from_numpy(borders[1:-1]))


def _quantiles(values: Array) -> Array:
    """float32 (257,), rising: from the smallest value to the largest."""
    at = np.linspace(0.0, 1.0, CODES + 1)
    if len(values) > _CHUNK_VALUES:
        chunks = np.array_split(values, -(-len(values) // _CHUNK_VALUES))
        values = np.concatenate([np.quantile(chunk, at) for chunk in chunks])
    borders: Array = np.quantile(values, at).astype(np.float32)
    return borders
