"""One contract for all codecs of the native engine."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hivemind.engine.native.codecs import (
    BFloat16,
    Blockwise4Bit,
    Blockwise8Bit,
    ChunkCodec,
    Exact,
    ScaledFloat16,
    TopK,
    Uniform8Bit,
)
from lightning_hivemind.engine.native.codecs.mixed import per_chunk
from lightning_hivemind.engine.native.memory import Memory
from unit.default_dtype import default_dtype


class MixedOfAnySize:
    """One chunk of several tensors, equal parts of it, each by another codec: a mixture of its own for each size."""

    def __init__(self, *codecs: ChunkCodec) -> None:
        self._codecs = codecs
        self.name = f"mixed: {', '.join(codec.name for codec in codecs)}"
        self.leaves_out = any(codec.leaves_out for codec in codecs)

    def tensors(self, elements: int) -> list[tuple[int, ChunkCodec]]:
        ends = pairwise(elements * number // len(self._codecs) for number in range(len(self._codecs) + 1))
        return [(end - begin, codec) for (begin, end), codec in zip(ends, self._codecs, strict=True)]

    def _of(self, elements: int) -> ChunkCodec:
        (found,) = per_chunk(self.tensors(elements), [slice(0, elements)])
        return found

    def size_bytes(self, elements: int) -> int:
        return self._of(elements).size_bytes(elements)

    def encode(self, values_N: Tensor, memory: Memory | None = None) -> memoryview:
        return self._of(values_N.numel()).encode(values_N, memory)

    def decode(self, data: memoryview, out_N: Tensor) -> None:
        self._of(out_N.numel()).decode(data, out_N)

    def error_bound(self, values_N: Tensor) -> Tensor:
        return self._of(values_N.numel()).error_bound(values_N)


CODECS: list[ChunkCodec] = [
    Exact(),
    ScaledFloat16(),
    BFloat16(),
    Uniform8Bit(),
    Blockwise8Bit(),
    Blockwise8Bit(block=5),
    Blockwise4Bit(),
    Blockwise4Bit(block=3),
    TopK(8),
    TopK(1),
    MixedOfAnySize(Exact(), Uniform8Bit(), ScaledFloat16()),
    MixedOfAnySize(TopK(8), Blockwise8Bit(), BFloat16(), Blockwise4Bit(block=3)),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
VALUES = st.one_of(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**100, min_value=-(2.0**100)),
        max_size=70,
    ),
    st.builds(
        lambda seed, size, scale: (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).tolist(),
        st.integers(0, 999),
        st.integers(0, 3000),
        st.sampled_from([1e-30, 1e-9, 1.0, 1e20]),
    ),
)


def there_and_back(codec: ChunkCodec, values: torch.Tensor) -> torch.Tensor:
    data = codec.encode(values.clone())
    assert len(data) == codec.size_bytes(values.numel())
    out = torch.full_like(values, math.nan)
    codec.decode(memoryview(bytearray(data)), out)
    return out


def tensors_of(codec: ChunkCodec, elements: int) -> list[tuple[int, ChunkCodec]]:
    return codec.tensors(elements) if isinstance(codec, MixedOfAnySize) else [(elements, codec)]


@every_codec
@given(numbers=VALUES)
def test_what_comes_back_is_within_the_stated_bound(codec: ChunkCodec, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    error = (there_and_back(codec, values) - values).abs()
    assert bool((error <= codec.error_bound(values)).all())


@every_codec
def test_the_bound_is_no_excuse(codec: ChunkCodec) -> None:
    """It is of the size that the number of bits promises, not merely large enough."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    known = {"exact": 0.0, "float16": 2.1e-3, "bfloat16": 2e-2, "top 8 of 256": 2.5, "top 1 of 256": 4.2}
    tensors = tensors_of(codec, values.numel())
    for found, (_, one) in zip(codec.error_bound(values).split([size for size, _ in tensors]), tensors, strict=True):
        assert float(found.max()) <= known.get(one.name, 0.02 if "8" in one.name else 0.35)


@every_codec
@given(numbers=VALUES)
def test_the_same_values_give_the_same_bytes_and_are_left_alone(codec: ChunkCodec, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    before = values.clone()
    assert bytes(codec.encode(values)) == bytes(codec.encode(values))
    assert torch.equal(values, before)


@every_codec
@pytest.mark.parametrize("elements", [0, 1, 130, 4096, 5000])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_what_a_script_makes_the_default_dtype_changes_nothing(
    codec: ChunkCodec, elements: int, default: torch.dtype
) -> None:
    """As Lightning does while a batch is computed in half precision, for the rounds' thread, too."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    data, back, bound = bytes(codec.encode(values)), there_and_back(codec, values), codec.error_bound(values)
    with default_dtype(default):
        assert bytes(codec.encode(values)) == data
        assert torch.equal(there_and_back(codec, values), back)
        assert torch.equal(codec.error_bound(values), bound)


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 66, 129])
def test_a_value_that_is_not_finite_is_never_hidden(codec: ChunkCodec, bad: float, at: int) -> None:
    values = torch.ones(130)
    values[at] = bad
    assert not bool(torch.isfinite(there_and_back(codec, values)).all())


@every_codec
def test_zeros_stay_zeros(codec: ChunkCodec) -> None:
    assert torch.equal(there_and_back(codec, torch.zeros(130)), torch.zeros(130))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_scaled_float16_keeps_what_plain_float16_loses(scale: float) -> None:
    values = torch.linspace(-1, 1, 1001) * scale
    assert float((there_and_back(ScaledFloat16(), values) - values).abs().max()) <= 1e-3 * scale


def test_an_outlier_costs_precision_in_its_own_block_only() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    values[0] = 1e6
    blocks, whole = (there_and_back(codec, values) - values for codec in (Blockwise8Bit(), Uniform8Bit()))
    assert float(blocks[1024:].abs().max()) < 0.02
    assert float(whole[1024:].abs().max()) > 0.5


BITS = {"exact": 32, "float16": 16, "bfloat16": 16, "uniform 8 bit": 8, "blockwise 8 bit, 1024": 8.05}


@every_codec
def test_bits_per_value(codec: ChunkCodec) -> None:
    names = [one.name for _, one in tensors_of(codec, 1 << 20)]
    bits = fmean(BITS.get(name, 4.5 if name == "blockwise 4 bit, 64" else 16) for name in names)
    assert 8 * codec.size_bytes(1 << 20) / (1 << 20) <= bits + 1e-3


@every_codec
@pytest.mark.parametrize("largest", [1e-45, 3.2e-44, 1e-38, 1e-36])
def test_values_too_small_for_a_scale_are_nearly_zero_and_finite(codec: ChunkCodec, largest: float) -> None:
    found = there_and_back(codec, torch.tensor([largest, -largest / 2, 0.0]))
    assert bool((found.abs() <= 1.1 * largest).all())
