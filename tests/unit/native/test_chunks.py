"""Chunks of a round that this peer is in before it has joined: as its line is slow, nobody has waited for that."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.engine.native.chunks import Chunks
from lightning_hivemind.engine.native.codecs import Exact
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.errors import WireError

LAYOUT = Layout(2 * 512, chunk_elements=512)
ROUND, OTHER = b"r" * 16, b"o" * 16


def result(round_id: bytes, chunk: int = 0) -> Header:
    return Header(kind=Kind.RESULT, round=round_id, chunk=chunk, length=4 * 512)


class NoLinks(Links):
    """Nothing is sent."""

    def __init__(self) -> None:
        pass

    def forget(self, number: bytes, kind: Kind | None = None) -> None:
        pass

    def sends(self, number: bytes, kind: Kind | None = None, to: str | None = None) -> bool:
        return False


@pytest.fixture
def chunks() -> Chunks:
    return Chunks(LAYOUT, [Exact(), Exact()], "me", Memory(), NoLinks())


def come(chunks: Chunks, header: Header) -> bool:
    """Whether there is room for it; then it is there."""
    room = chunks.room("owner", header)
    if room is not None:
        assert not chunks.take("owner", header, room)
    return room is not None


def test_what_has_come_of_a_round_is_there_once_it_is_joined(chunks: Chunks) -> None:
    assert come(chunks, result(ROUND, 0))
    assert come(chunks, result(OTHER, 1))
    ((peer, header, payload),) = chunks.open(ROUND, torch.zeros(LAYOUT.elements))
    assert (peer, header) == ("owner", result(ROUND, 0))
    assert chunks.take(peer, header, payload)
    assert chunks.open(OTHER, None) == [], "what was of no use then is gone"


def test_it_takes_no_more_memory_than_one_gradient(chunks: Chunks) -> None:
    assert [come(chunks, result(OTHER, number % 2)) for number in range(5)] == [True] * 2 + [False] * 3
    assert chunks.open(ROUND, None) == []
    assert come(chunks, result(OTHER)), "the next round has as much"


def test_what_is_of_no_use_makes_room_once_that_is_known(chunks: Chunks) -> None:
    assert [come(chunks, result(OTHER, number)) for number in (0, 1)] == [True, True]
    assert not come(chunks, result(ROUND))
    chunks.drop(OTHER)
    assert come(chunks, result(ROUND))
    assert len(chunks.open(ROUND, None)) == 1


def test_of_a_round_that_is_over_nothing_is_kept(chunks: Chunks) -> None:
    chunks.open(ROUND, None)
    chunks.drop(ROUND)
    assert not come(chunks, result(ROUND))


def test_what_can_be_no_chunk_is_refused_before_there_is_memory_for_it(chunks: Chunks) -> None:
    with pytest.raises(WireError, match="another model or codec"):
        chunks.room("owner", Header(kind=Kind.RESULT, round=ROUND, chunk=0, length=4))
