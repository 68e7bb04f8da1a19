"""The checksum of chunks: what it must notice, whatever the length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.engine.native.wire.checksum import ROW_WORDS, checksum

ROW = 8 * ROW_WORDS


@given(st.integers(0, 3 * ROW + 9), st.data())
def test_a_flipped_bit_is_noticed_wherever_it_is(length: int, data: st.DataObject) -> None:
    content = bytearray(index * 7 % 256 for index in range(length))
    before = checksum(memoryview(bytes(content)))
    assert before == checksum(memoryview(content)) < 2**32
    if content:
        place = data.draw(st.integers(0, length - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(memoryview(content)) != before


@pytest.mark.parametrize("rows", [2, 5])
def test_rows_that_have_changed_places_are_noticed(rows: int) -> None:
    parts = [bytes([number + 1]) * ROW for number in range(rows)]
    assert checksum(memoryview(b"".join(parts))) != checksum(memoryview(b"".join(reversed(parts))))


def test_what_is_missing_at_the_end_or_became_zeros_is_noticed() -> None:
    content = memoryview(bytes(range(256)) * 64)
    others = [content[:-1], content[:-ROW], memoryview(bytes(len(content)))]
    assert checksum(content) not in map(checksum, others)
