"""Headers of frames, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, Header, Kind
from lightning_hivemind.errors import WireError

U32 = st.integers(0, 2**32 - 1)


HEADERS = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    round=st.binary(min_size=16, max_size=16),
    chunk=U32,
    version=U32,
    length=U32,
    checksum=U32,
)


@given(HEADERS)
def test_a_header_comes_back_as_it_was(header: Header) -> None:
    assert len(header.pack()) == HEADER_BYTES
    assert Header.unpack(header.pack()) == header


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_no_header(data: bytes) -> None:
    with pytest.raises(WireError):
        Header.unpack(data)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(0, 0x47, "no frame of lightning-hivemind"), (4, 1, "same release on all peers"), (5, 77, "unknown kind")],
)
def test_what_is_wrong_with_a_header_is_said(at: int, value: int, reason: str) -> None:
    data = bytearray(Header(kind=Kind.PING).pack())
    data[at] = value
    with pytest.raises(WireError, match=reason):
        Header.unpack(data)
