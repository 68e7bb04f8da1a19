"""What every codec promises: shapes, types, error bounds, messages that stock hivemind reads, and no garbage."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hivemind.compression as stock
import numpy as np
import pytest
import torch
from hivemind.compression import CompressionInfo, deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hivemind import codecs

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES = [(), (0,), (1,), (1, 1), (3, 0, 2), (2,), (7, 1), (5, 343), (344,), (1000,), (64, 64, 3), (300_001,)]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="BlockwiseQuantization needs bitsandbytes"
)


def exact(values: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values)


def half(values: torch.Tensor) -> torch.Tensor:
    return values.abs() * 2**-11 + 3.1e-8


def scaled_half(values: torch.Tensor) -> torch.Tensor:
    if values.ndim == 0 or values.numel() == 0:
        return exact(values)
    centred = values - values.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
    return centred.abs() * 2**-10 + deviation * 6e-8 + values.abs().max() * 3e-7


def one_bucket_or_the_tail(values: torch.Tensor) -> torch.Tensor:
    if values.numel() < 2:
        return exact(values)
    sigma = values.std()
    distance = (values - values.mean()).abs()
    inside = 6 * sigma / 256 + values.abs().max() * 3e-7
    return torch.where(distance <= 2.9 * sigma, inside, distance.max())


def two_quantiles(values: torch.Tensor) -> torch.Tensor:
    """The distance between the values that are 1.5% of the ranks apart, around each value."""
    flat, order = values.reshape(-1).sort()
    ranks = torch.arange(len(flat))
    reach = max(1, int(len(flat) * 0.015))
    spread = flat[(ranks + reach).clamp(max=len(flat) - 1)] - flat[(ranks - reach).clamp(min=0)]
    bound = torch.empty_like(flat)
    bound[order] = spread + flat.abs().max() * 3e-7 if len(flat) else spread
    return bound.reshape(values.shape)


def two_percent_of_the_largest(values: torch.Tensor) -> torch.Tensor:
    return torch.full_like(values, float(values.abs().max()) * 0.02 if values.numel() else 0.0)


@dataclass(frozen=True)
class Promise:
    """A codec, and how far a decoded value may be from what was encoded (float64 of float64)."""

    codec: stock.CompressionBase
    error: Callable[[torch.Tensor], torch.Tensor]
    wire_name: str

    @property
    def name(self) -> str:
        return type(self.codec).__name__


PROMISES = [
    Promise(codecs.NoCompression(), exact, "NONE"),
    Promise(codecs.Float16Compression(), half, "FLOAT16"),
    Promise(codecs.ScaledFloat16Compression(), scaled_half, "MEANSTD_16BIT"),
    Promise(codecs.Uniform8BitQuantization(), one_bucket_or_the_tail, "UNIFORM_8BIT"),
    Promise(codecs.Quantile8BitQuantization(), two_quantiles, "QUANTILE_8BIT"),
    pytest.param(
        Promise(codecs.BlockwiseQuantization(), two_percent_of_the_largest, "BLOCKWISE_8BIT"), marks=needs_bitsandbytes
    ),
]
QUANTISERS = [one for one in PROMISES if "8BIT" in (one.values[0] if hasattr(one, "values") else one).wire_name]
every_codec = pytest.mark.parametrize("promise", PROMISES, ids=lambda one: one.name)
every_quantiser = pytest.mark.parametrize("promise", QUANTISERS, ids=lambda one: one.name)


def encode(codec: stock.CompressionBase, tensor: torch.Tensor) -> Any:
    """Through bytes, as on a socket."""
    message = codec.compress(tensor, CompressionInfo.from_tensor(tensor))
    return runtime_pb2.Tensor.FromString(message.SerializeToString())


def check_round_trip(promise: Promise, tensor: torch.Tensor) -> torch.Tensor:
    before = tensor.detach().clone()
    decoded = deserialize_torch_tensor(encode(promise.codec, tensor))
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype
    assert decoded.requires_grad == tensor.requires_grad
    assert torch.equal(tensor.detach(), before), "the codec changed its input"
    values = before.double()
    rounding = values.abs() * torch.finfo(tensor.dtype).eps if tensor.dtype != torch.float64 else values.abs() * 1e-7
    if promise.wire_name == "NONE":
        rounding = torch.zeros_like(values)
    excess = (decoded.detach().double() - values).abs() - promise.error(values) - rounding
    assert excess.numel() == 0 or float(excess.max()) <= 0, f"beyond the bound by {float(excess.max())}"
    return decoded


@every_codec
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_keeps_shape_type_and_bound(promise: Promise, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    check_round_trip(promise, torch.randn(shape, generator=generator).to(dtype).add_(3.0))


@every_codec
@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4])
def test_bound_holds_at_every_scale(promise: Promise, scale: float) -> None:
    if promise.wire_name == "FLOAT16" and scale == 1e4:
        scale = 1e3  # saturation has a test of its own
    check_round_trip(promise, torch.randn(5000, generator=torch.Generator().manual_seed(1)) * scale)


@every_codec
@pytest.mark.parametrize("value", [0.0, 0.3, -1e-20, 1e4, 1e-40])
def test_constant_tensors_survive(promise: Promise, value: float) -> None:
    decoded = check_round_trip(promise, torch.full((1000,), value))
    assert len(decoded.unique()) == 1


@every_codec
@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(-6e4, 6e4, width=32), min_size=1, max_size=30),
    repeats=st.integers(1, 60),
    rows=st.booleans(),
)
def test_bound_holds_for_any_values(promise: Promise, values: list[float], repeats: int, rows: bool) -> None:
    tensor = torch.tensor(values).repeat(repeats)
    check_round_trip(promise, tensor.reshape(repeats, -1) if rows else tensor)


@every_codec
def test_transposed_and_expanded_tensors_are_encoded_as_they_look(promise: Promise) -> None:
    check_round_trip(promise, torch.randn(60, 70).t())
    check_round_trip(promise, torch.randn(60, 1).expand(60, 70))


@every_codec
def test_gradient_flag_is_kept(promise: Promise) -> None:
    check_round_trip(promise, torch.randn(1000).requires_grad_())


@every_codec
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_are_sent_exactly(promise: Promise, dtype: torch.dtype) -> None:
    tensor = torch.arange(1000).remainder(2).to(dtype)
    assert torch.equal(deserialize_torch_tensor(encode(promise.codec, tensor)), tensor)
    assert promise.codec.estimate_compression_ratio(CompressionInfo.from_tensor(tensor)) == 1.0


@every_codec
def test_a_counter_is_sent_exactly(promise: Promise) -> None:
    steps = torch.tensor(100_001.0)  # beyond float16, as Adam's step becomes in a long run
    assert deserialize_torch_tensor(encode(promise.codec, steps)) == steps


@every_codec
@pytest.mark.parametrize("values", [10, 343, 1000, 100_000])
def test_no_message_is_larger_than_the_tensor(promise: Promise, values: int) -> None:
    assert len(encode(promise.codec, torch.randn(values)).buffer) <= 4 * values


@every_codec
def test_estimated_ratio_is_what_large_tensors_get(promise: Promise) -> None:
    tensor = torch.randn(1_000_000)
    estimate = promise.codec.estimate_compression_ratio(CompressionInfo.from_tensor(tensor))
    assert len(encode(promise.codec, tensor).buffer) / (4 * tensor.numel()) == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize("promise", PROMISES[3:5], ids=lambda one: one.name)
def test_sums_are_kept(promise: Promise) -> None:
    tensor = torch.randn(400_000).exp()
    decoded = deserialize_torch_tensor(encode(promise.codec, tensor))
    assert float(decoded.double().sum()) == pytest.approx(float(tensor.double().sum()), rel=1e-6)


@every_quantiser
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_by_8_bit_codecs(promise: Promise, wrong: float) -> None:
    tensor = torch.randn(1000)
    tensor[17] = wrong
    with pytest.raises(ValueError, match="NaN"):
        encode(promise.codec, tensor)


def test_tensors_too_small_for_buckets_keep_their_mean() -> None:
    tensor = torch.tensor([1e-44, 3e-44]).repeat(500)
    decoded = deserialize_torch_tensor(encode(codecs.Uniform8BitQuantization(), tensor))
    assert len(decoded.unique()) == 1
    assert float(decoded[0]) == pytest.approx(2e-44, abs=2e-45)


def test_half_precision_saturates_and_carries_nan() -> None:
    decoded = deserialize_torch_tensor(encode(codecs.Float16Compression(), torch.tensor([1e6, -1e6, float("nan")])))
    assert decoded[:2].tolist() == [65504.0, -65504.0]
    assert decoded[2].isnan()


def test_scaled_half_precision_carries_values_beyond_half_and_refuses_nan() -> None:
    check_round_trip(PROMISES[2], torch.randn(40, 50) * 1e8)
    with pytest.raises(ValueError, match="NaN"):
        encode(codecs.ScaledFloat16Compression(), torch.full((10,), float("nan")))


@every_codec
def test_cut_off_message_is_an_error(promise: Promise) -> None:
    message = encode(promise.codec, torch.randn(1000))
    message.buffer = message.buffer[:-1]
    with pytest.raises((ValueError, RuntimeError)):
        deserialize_torch_tensor(message)


@every_quantiser
@pytest.mark.parametrize("damage", ["table length", "negative table length", "empty", "nan in the table"])
def test_damaged_message_is_an_error_not_garbage(promise: Promise, damage: str) -> None:
    message = encode(promise.codec, torch.randn(1000))
    at = 8 if promise.wire_name == "BLOCKWISE_8BIT" else 0
    table = at + 8
    replaced = {
        "table length": (at, (255).to_bytes(8, "little")),
        "negative table length": (at, (-1).to_bytes(8, "little", signed=True)),
        "nan in the table": (table, np.float32("nan").tobytes()),
    }
    if damage == "empty":
        message.buffer = b""
    else:
        start, new = replaced[damage]
        message.buffer = message.buffer[:start] + new + message.buffer[start + len(new) :]
    with pytest.raises(ValueError, match=r"message|table|scales"):
        deserialize_torch_tensor(message)


def test_code_beyond_the_table_is_an_error() -> None:
    payload = (2).to_bytes(8, "little") + np.float32([1, 2]).tobytes() + bytes([0, 1, 2])
    message = runtime_pb2.Tensor(
        compression=runtime_pb2.UNIFORM_8BIT, buffer=payload, size=[3], dtype="float32", requires_grad=False
    )
    with pytest.raises(ValueError, match="code 2 in a message with a table of 2"):
        deserialize_torch_tensor(message)


def test_unknown_type_of_number_is_an_error() -> None:
    message = encode(codecs.Uniform8BitQuantization(), torch.randn(1000))
    message.dtype = "load"  # an attribute of torch, but no type
    with pytest.raises(ValueError, match="dtype='load'"):
        deserialize_torch_tensor(message)


# -- with peers that run stock hivemind -----------------------------------------------------------------------------


def stock_decode(message: Any) -> torch.Tensor:
    """What hivemind 1.1.12 decodes on a numpy that it works with: its rules, written independently."""
    name = runtime_pb2.CompressionType.Name(message.compression)
    if "8BIT" not in name:
        return {
            "NONE": stock.NoCompression(),
            "FLOAT16": stock.Float16Compression(),
            "MEANSTD_16BIT": stock.ScaledFloat16Compression(),
        }[name].extract(message)
    length = int(np.frombuffer(message.buffer, count=1, dtype=np.int64)[0])
    table = np.frombuffer(message.buffer, offset=8, count=length, dtype=np.float32)
    codes = np.frombuffer(message.buffer, offset=8 + table.nbytes, dtype=np.uint8)
    indices = torch.as_tensor(codes, dtype=torch.int64).reshape(tuple(message.size))
    return torch.as_tensor(table).to(getattr(torch, message.dtype))[indices]


def assert_as_stock(decoded: torch.Tensor, message: Any) -> None:
    """Bit for bit; the scaled format within the rounding of stock's arithmetic, which is done in the target type."""
    theirs = stock_decode(message)
    if message.compression == runtime_pb2.MEANSTD_16BIT:
        eps = max(torch.finfo(decoded.dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(decoded, theirs, rtol=0, atol=4 * eps * float(theirs.abs().max()))
    else:
        assert torch.equal(decoded, theirs)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # stock's decoder
@pytest.mark.parametrize("promise", PROMISES[:5], ids=lambda one: one.name)  # bitsandbytes: encoded by stock code
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stock_peers_decode_our_messages(promise: Promise, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    message = encode(promise.codec, torch.randn(shape).to(dtype))
    assert_as_stock(deserialize_torch_tensor(message), message)
    if dtype == torch.float32 and shape == (1000,):
        assert runtime_pb2.CompressionType.Name(message.compression) == promise.wire_name


@every_codec
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_we_decode_messages_of_stock_peers(promise: Promise, dtype: torch.dtype) -> None:
    theirs = getattr(stock, promise.name)()
    tensor = torch.randn((50, 40), generator=torch.Generator().manual_seed(2)).to(dtype)
    message = encode(theirs, tensor)
    decoded = deserialize_torch_tensor(message)
    values = tensor.double()
    excess = (decoded.double() - values).abs() - promise.error(values) - values.abs() * torch.finfo(dtype).eps - 1e-7
    assert float(excess.max()) <= 0
    if promise.wire_name != "BLOCKWISE_8BIT":
        assert_as_stock(decoded, message)


@every_codec
def test_isinstance_of_the_class_that_users_import(promise: Promise) -> None:
    assert isinstance(promise.codec, getattr(stock, promise.name))
    assert promise.codec.compression_type == runtime_pb2.CompressionType.Value(promise.wire_name)


@every_codec
def test_a_forked_process_decodes_and_encodes(promise: Promise) -> None:
    """Averagers are forks; an encoder that waits for a thread of its parent would hang there."""
    tensor = torch.randn(1000)
    message = encode(promise.codec, tensor)
    wire_type = runtime_pb2.CompressionType.Value(promise.wire_name)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)
            again = serialize_torch_tensor(tensor, wire_type)
            status = 0 if again.buffer == message.buffer and deserialize_torch_tensor(again).shape == (1000,) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
