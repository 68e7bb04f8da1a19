"""hivemind's objects become ours: in its table of wire types, and where a user passed them."""

from __future__ import annotations

import functools
from typing import Any

import hivemind
import hivemind.compression as stock
import pytest
import torch
from hivemind.compression import CompressionInfo, TensorRole, serialization
from hivemind.optim.grad_averager import GradientAverager

from lightning_hivemind import codecs
from lightning_hivemind.codecs.mapping import install, map_codec
from lightning_hivemind.errors import ArgumentError

NAMES = ["Float16Compression", "ScaledFloat16Compression", "Uniform8BitQuantization", "Quantile8BitQuantization"]


def test_every_lossy_wire_type_is_decoded_by_our_code() -> None:
    table = serialization._BASE_COMPRESSION_TYPES
    modules = {name: type(codec).__module__ for name, codec in table.items() if name != "NONE"}
    assert all(module.startswith("lightning_hivemind.codecs.") for module in modules.values()), modules
    assert len(modules) == 5


def test_installing_twice_changes_nothing_and_keeps_what_others_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(stock.Uniform8BitQuantization):
        pass

    foreign = Foreign()
    monkeypatch.setitem(serialization._BASE_COMPRESSION_TYPES, "UNIFORM_8BIT", foreign)
    before = dict(serialization._BASE_COMPRESSION_TYPES)
    install()
    assert before == serialization._BASE_COMPRESSION_TYPES


@pytest.mark.parametrize("name", NAMES)
def test_stock_codec_becomes_ours(name: str) -> None:
    assert type(map_codec(getattr(stock, name)())) is getattr(codecs, name)


@pytest.mark.parametrize("name", NAMES)
def test_our_codec_stays(name: str) -> None:
    codec = getattr(codecs, name)()
    assert map_codec(codec) is codec


def test_none_means_uncompressed() -> None:
    assert isinstance(map_codec(None), stock.NoCompression)


def test_codec_of_the_user_stays() -> None:
    class Mine(stock.Uniform8BitQuantization):
        pass

    mine = Mine()
    assert map_codec(mine) is mine


def test_settings_of_a_stock_object_are_kept() -> None:
    wide = stock.Uniform8BitQuantization()
    wide.RANGE_IN_SIGMAS = 20
    assert map_codec(wide).RANGE_IN_SIGMAS == 20


def info_of(values: int, role: TensorRole = TensorRole.UNSPECIFIED, key: Any = None) -> CompressionInfo:
    return CompressionInfo.from_tensor(torch.zeros(values), key=key, role=role)


def test_nested_objects_are_mapped_and_choose_as_before() -> None:
    by_size = hivemind.compression.SizeAdaptiveCompression(
        threshold=2**16 + 1, less=stock.Float16Compression(), greater_equal=stock.Uniform8BitQuantization()
    )
    by_role = stock.RoleAdaptiveCompression(gradient=by_size, default=stock.Quantile8BitQuantization())
    mapped = map_codec(stock.PerTensorCompression({"w": by_role, "b": stock.NoCompression()}))
    assert isinstance(mapped, stock.PerTensorCompression)
    choose = mapped.choose_compression(info_of(1, key="w"))
    assert type(choose.choose_compression(info_of(1, TensorRole.PARAMETER))) is codecs.Quantile8BitQuantization
    sized = choose.choose_compression(info_of(1, TensorRole.GRADIENT))
    assert type(sized.choose_compression(info_of(2**16))) is codecs.Float16Compression
    assert type(sized.choose_compression(info_of(2**16 + 1))) is codecs.Uniform8BitQuantization
    assert type(mapped.choose_compression(info_of(1, key="b"))) is codecs.NoCompression


def test_list_per_tensor_is_mapped() -> None:
    mapped = map_codec(stock.PerTensorCompression([stock.Float16Compression(), stock.NoCompression()]))
    assert type(mapped.choose_compression(info_of(1, key=0))) is codecs.Float16Compression


def test_mapping_leaves_the_given_object_alone() -> None:
    given = stock.SizeAdaptiveCompression(threshold=1, less=stock.Float16Compression(), greater_equal=None)
    map_codec(given)
    assert type(given.less) is stock.Float16Compression
    assert given.greater_equal is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (stock.Float16Compression, r"grad_compression=Float16Compression: is a class, not a codec; add \(\)"),
        ("fp16", r"grad_compression='fp16': a str is not a codec; give one, such as"),
        (
            stock.SizeAdaptiveCompression(threshold=1, less=stock.NoCompression(), greater_equal=stock.NoCompression),
            r"grad_compression.greater_equal=NoCompression: is a class, not a codec; add \(\): NoCompression\(\)",
        ),
        (stock.RoleAdaptiveCompression(gradient=8), r"grad_compression.gradient=8: an int is not a codec"),
        (stock.PerTensorCompression({"w": 8}), r"grad_compression\['w'\]=8: an int is not a codec"),
        (stock.PerTensorCompression([8]), r"grad_compression\[0\]=8: an int is not a codec"),
    ],
)
def test_what_is_no_codec_is_refused_with_the_place(wrong: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        map_codec(wrong, "grad_compression")


def test_powersgd_is_the_class_of_hivemind() -> None:
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    assert codecs.PowerSGDGradientAverager is PowerSGDGradientAverager
    made = functools.partial(codecs.PowerSGDGradientAverager, averager_rank=32, min_compression_ratio=0.5)
    assert issubclass(made.func, GradientAverager)
