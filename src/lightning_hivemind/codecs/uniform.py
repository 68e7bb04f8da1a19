"""Uniform8BitQuantization: 256 buckets of equal width over six standard deviations around the mean."""

from __future__ import annotations

import math

import hivemind.compression
import torch

from lightning_hivemind.codecs.codebook import CODES, CodebookCodec, refuse_unquantizable

#: bucket width below which float32 division loses digits (subnormal numbers): such a tensor counts as constant
_LEAST_WIDTH = torch.finfo(torch.float32).tiny


class Uniform8BitQuantization(CodebookCodec, hivemind.compression.Uniform8BitQuantization):  # type: ignore[misc]
    """One byte per value. What is decoded is the mean of all values in the same bucket, so sums are kept.

    Error: at most one bucket, 6/256 of the standard deviation, for values within 2.9 standard deviations of the mean;
    values further out share the outermost buckets. A constant tensor is exact, and one
    whose deviation is below 1e-36 counts as constant.
    """

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        middle = CODES // 2
        centred = values - float(values.mean(dtype=torch.float64))
        norm = float(torch.linalg.vector_norm(centred, dtype=torch.float64))
        if not math.isfinite(norm):
            raise refuse_unquantizable(self)
        width = self.RANGE_IN_SIGMAS * norm / math.sqrt(max(values.numel() - 1, 1)) / CODES
        if width < _LEAST_WIDTH:
            return torch.full_like(values, middle, dtype=torch.uint8)
        return centred.div_(width).round_().add_(middle).clamp_(0, CODES - 1).to(torch.uint8)
