"""What is asked of a donor, as bytes: these questions, and nothing else."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hivemind.engine.native.state.questions import (
    MAX_QUESTION_BYTES,
    Done,
    Question,
    WantsDescription,
    WantsRange,
    read,
    write,
)
from lightning_hivemind.errors import WireError


@given(st.binary(max_size=64), st.integers(0, 2**64 - 1))
def test_a_question_comes_back_as_it_was(digest: bytes, number: int) -> None:
    for question in (WantsDescription(), WantsRange(digest, number), Done()):
        data = write(question)
        assert len(data) <= MAX_QUESTION_BYTES
        assert read(memoryview(data)) == question


@given(st.binary(max_size=MAX_QUESTION_BYTES))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff" * 50)
@example(b"\x91" * 250)
@example(b"\x92\xd6\xff\x00\x00\x00\x00\x01")
@settings(max_examples=300)
def test_garbage_is_refused_and_does_nothing_else(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(read(data), Question)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [None, None],
        [[]],
        1,
        {},
        {"a": 1, "b": 2},
        [b"d"],
        [b"d", 1, 2],
        ["d", 1],
        [b"d", True],
        [b"d", 1.0],
        [b"d", -1],
        [bytes(65), 1],
    ],
    ids=repr,
)
def test_a_question_with_something_wrong_is_refused(values: object) -> None:
    with pytest.raises(WireError, match="cannot be understood"):
        read(msgpack.packb(values))
