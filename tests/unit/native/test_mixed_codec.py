"""Chunks in which every tensor has its own codec, and how the user's choice becomes one."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.engine.native.codecs import (
    BFloat16,
    Blockwise4Bit,
    Blockwise8Bit,
    Exact,
    ScaledFloat16,
    TopK,
    Uniform8Bit,
)
from lightning_hivemind.engine.native.codecs.mapping import SMALL, map_codec
from lightning_hivemind.engine.native.codecs.mixed import Mixed, per_chunk
from lightning_hivemind.errors import ArgumentError

theirs = pytest.importorskip("hivemind.compression")
TopKCompression = pytest.importorskip("lightning_hivemind.codecs").TopKCompression

#: all that there are: each can be mixed with any other
CODECS = [
    Exact(),
    ScaledFloat16(),
    BFloat16(),
    Uniform8Bit(),
    Blockwise8Bit(block=5),
    Blockwise4Bit(block=3),
    TopK(8),
]
TENSORS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(CODECS)), min_size=1, max_size=12)


def spans(elements: int, size: int) -> list[slice]:
    starts = [*range(0, elements, size), elements]
    return [slice(start, stop) for start, stop in pairwise(starts)]


@given(tensors=TENSORS, size=st.integers(1, 50), seed=st.integers(0, 99))
def test_every_value_goes_through_the_codec_of_its_tensor(tensors: list, size: int, seed: int) -> None:  # type: ignore[type-arg]
    values = torch.randn(sum(elements for elements, _ in tensors), generator=torch.Generator().manual_seed(seed))
    cut = spans(values.numel(), size)
    found, bounds = torch.full_like(values, math.nan), torch.full_like(values, math.nan)
    leaves_out = [codec.leaves_out for elements, codec in tensors for _ in range(elements)]
    for span, codec in zip(cut, per_chunk(tensors, cut), strict=True):
        part = values[span]
        data = codec.encode(part)
        assert len(data) == codec.size_bytes(part.numel())
        codec.decode(memoryview(bytearray(data)), found[span])
        bounds[span] = codec.error_bound(part)
        assert codec.leaves_out == any(leaves_out[span])
    assert bool(((found - values).abs() <= bounds).all())
    start = 0
    for elements, codec in tensors:
        own = slice(start, start + elements)
        if isinstance(codec, Exact):
            assert torch.equal(found[own], values[own])
        elif isinstance(codec, BFloat16):
            assert torch.equal(found[own], values[own].bfloat16().float())
        elif isinstance(codec, ScaledFloat16) and elements:
            assert float(bounds[own].max()) < 0.01, "the bound of a neighbour's codec"
        start += elements


def test_chunks_within_one_tensor_and_of_equal_neighbours_need_no_mixture() -> None:
    exact, small = Exact(), Uniform8Bit()
    found = per_chunk([(100, small), (3, exact), (47, exact), (50, small)], spans(200, 50))
    assert [found[0], found[1], found[2], found[3]] == [small, small, exact, small]


def test_a_value_that_is_not_finite_is_never_hidden() -> None:
    codec = Mixed([(10, one) for one in CODECS])
    for at in range(3, 10 * len(CODECS), 10):
        values, out = torch.ones(10 * len(CODECS)), torch.zeros(10 * len(CODECS))
        values[at] = math.nan
        codec.decode(memoryview(bytearray(codec.encode(values))), out)
        assert not bool(torch.isfinite(out).all())


def test_hivemind_s_adaptive_codecs_choose_as_they_do_there() -> None:
    by_size = theirs.SizeAdaptiveCompression(10, theirs.NoCompression(), theirs.Uniform8BitQuantization())
    assert [codec.name for _, codec in map_codec(by_size, "x").of_all([9, 10, 11], 3)] == [
        "exact",
        *["uniform 8 bit"] * 2,
    ]
    by_role = theirs.RoleAdaptiveCompression(gradient=theirs.Float16Compression(), default=theirs.NoCompression())
    assert map_codec(by_role, "grad_compression").name == "float16"
    assert map_codec(by_role, "state_averaging_compression").name == "exact"
    for given_ in ([theirs.NoCompression(), by_size], {0: theirs.NoCompression(), 1: by_size}):
        by_place = map_codec(theirs.PerTensorCompression(given_), "x")
        assert [codec.name for _, codec in by_place.of_all([99, 10], 2)] == ["exact", "uniform 8 bit"]
    with pytest.raises(ArgumentError, match="says nothing of tensor 2"):
        by_place.of_all([1, 2, 3], 3)


def test_a_codec_of_the_users_has_no_counterpart_whatever_it_derives_from() -> None:
    """Its own encoding would be ignored in silence."""

    class Mine(theirs.Float16Compression):  # type: ignore[misc]
        pass

    wide = theirs.Uniform8BitQuantization()
    wide.RANGE_IN_SIGMAS = 20
    for given_ in (Mine(), wide):
        with pytest.raises(ArgumentError, match=r"grad_compression=\w+\(.*has no counterpart"):
            map_codec(given_, "grad_compression")
        with pytest.raises(ArgumentError, match="has no counterpart"):
            map_codec(theirs.SizeAdaptiveCompression(9, None, given_), "grad_compression")


def test_small_buffers_beside_gradients_go_as_they_are() -> None:
    """BatchNorm's counters are a thousand times larger than gradients.

    With local updates all are changes of parameters and buffers: there counters alone.
    """
    coding = map_codec(theirs.Uniform8BitQuantization(), "x")
    names = [codec.name for _, codec in coding.of_all([5, SMALL, SMALL + 1, 1], gradients=1)]
    assert names == ["uniform 8 bit", "exact", "uniform 8 bit", "exact"]
    names = [codec.name for _, codec in coding.of_all([5, SMALL, 1], gradients=0)]
    assert names == ["uniform 8 bit", "uniform 8 bit", "exact"]


def test_unlike_choices_have_unlike_names() -> None:
    """The name is what peers compare before they average."""
    less, more = theirs.NoCompression(), theirs.Uniform8BitQuantization()
    names = {map_codec(theirs.SizeAdaptiveCompression(size, less, more), "x").name for size in (10, 11)}
    names.add(map_codec(theirs.SizeAdaptiveCompression(10, more, less), "x").name)
    assert len(names) == 3


def test_top_k_is_mapped_with_its_share_also_as_a_part() -> None:
    assert map_codec(TopKCompression(share=1 / 32), "grad_compression").name == "top 8 of 256"
    coding = map_codec(theirs.SizeAdaptiveCompression(9, None, TopKCompression()), "grad_compression")
    codecs = per_chunk(coding.of_all([4, 4, 20], 3), [slice(0, 8), slice(8, 28), slice(0, 0)])
    assert [codec.leaves_out for codec in codecs[:2]] == [False, True]


def test_what_is_no_gradient_is_sent_whole_where_a_codec_would_leave_something_out() -> None:
    coding = map_codec(theirs.SizeAdaptiveCompression(9, theirs.Float16Compression(), TopKCompression()), "x")
    assert [codec.name for _, codec in coding.of_all([4, 20, 4, 20], 2)] == [
        "float16",
        "top 8 of 256",
        "exact",
        "exact",
    ]


@pytest.mark.parametrize("share", [0.0, 1e-3, 1.5, True, "1/32"])
def test_a_share_that_top_k_cannot_keep_is_refused(share: object) -> None:
    with pytest.raises(ArgumentError, match=r"give a number from 1/256 to 1, such as 1/32"):
        TopKCompression(share=share)  # type: ignore[arg-type]
