"""Messages as bytes: all of them, and nothing else."""

from __future__ import annotations

import contextlib
import tracemalloc
import typing

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hivemind.engine.native.protocol import messages
from lightning_hivemind.engine.native.protocol.lineage import MOST_EPOCHS, MOST_TOTAL, Head
from lightning_hivemind.engine.native.wire.encoding import MAX_INT, MAX_MESSAGE_BYTES, decode, encode
from lightning_hivemind.errors import WireError

KINDS = typing.get_args(messages.Message)
st.register_type_strategy(int, st.integers(0, MAX_INT))
st.register_type_strategy(
    Head,
    st.builds(
        Head, epoch=st.integers(0, MOST_EPOCHS), lineage=st.binary(max_size=64), samples=st.integers(0, MOST_TOTAL)
    ),
)
st.register_type_strategy(float, st.floats(0, allow_infinity=False, allow_nan=False))
st.register_type_strategy(str, st.text(max_size=60))
st.register_type_strategy(bytes, st.binary(max_size=32))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type) -> None:
    @given(st.from_type(kind))
    @settings(max_examples=40, deadline=None)
    def check(message: typing.Any) -> None:
        assert decode(encode(message)) == message

    check()


@given(st.binary(max_size=300))
@example(b"")
@example(msgpack.packb([]))
@example(msgpack.packb([True, b"", 0]))
@example(msgpack.packb(None))
@settings(deadline=None)
def test_garbage_is_refused_and_does_nothing_else(data: bytes) -> None:
    try:
        message = decode(data)
    except WireError:
        return
    assert isinstance(message, KINDS)


@given(st.from_type(messages.Begin), st.data())
@settings(deadline=None, max_examples=60)
def test_a_message_with_a_wrong_byte_is_another_message_or_refused(message: typing.Any, data: st.DataObject) -> None:
    packed = bytearray(encode(message))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        assert isinstance(decode(bytes(packed)), KINDS)


HEAD = [3, b"x" * 16, 100]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([99, b"r"], "unknown tag 99"),
        ([0, HEAD, 1, 2], "Progress has 4 fields"),
        ([0, HEAD, 1, 2, 3, 4], "Progress has 4 fields"),
        ([0, [-3, b"x", 1], 1, 2, 0], "not negative"),
        ([0, [True, b"x", 1], 1, 2, 0], "not negative"),
        ([0, [2**63, b"x", 1], 1, 2, 0], "not negative"),
        ([0, [1, b"x" * 65, 1], 1, 2, 0], "at most 64 bytes"),
        ([0, [1, "text", 1], 1, 2, 0], "at most 64 bytes"),
        ([1, b"r", {}, 0], "Head has 3 fields"),
        ([2, b"r", [None, True, float("nan"), [], [], False, False, False]], "finite"),
        ([2, b"r", [None, 1, 1.0, [], [], False, False, False]], "expected a flag"),
        ([3, b"r", "p" * 300, None], "at most 256 characters"),
    ],
)
def test_a_field_that_cannot_be_is_named(values: list[typing.Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(msgpack.packb(values))


def test_a_message_that_is_too_long_is_not_even_read() -> None:
    with pytest.raises(WireError, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_deep_nesting_is_refused() -> None:
    nested: typing.Any = []
    for _ in range(400):
        nested = [nested]
    with pytest.raises(WireError):
        decode(msgpack.packb([0, nested, 1, 2]))


def test_a_progress_message_is_small() -> None:
    head = Head(epoch=10_000, lineage=bytes(16), samples=10**9)
    assert len(encode(messages.Progress(head=head, samples=64, swarm_samples=8192))) < 50


def test_a_reason_of_any_length_can_be_read() -> None:
    """The text of an error, say of a GPU that is full."""
    ended = messages.Ended(round=b"r" * 16, reason="out of memory " * 100, aborted=True)
    read = decode(encode(ended))
    assert isinstance(read, messages.Ended)
    assert read.reason == ended.reason[:256]


def test_no_memory_is_got_for_what_a_message_only_announces() -> None:
    """Lists within lists, each of which says that it has four million entries."""
    liar = b"\xdd\x00\x3f\xff\xff" * 1000
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(liar + bytes(MAX_MESSAGE_BYTES - len(liar)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * MAX_MESSAGE_BYTES
