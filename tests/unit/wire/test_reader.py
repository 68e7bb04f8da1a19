"""Frames as they are cut, written and read; what cannot be one closes the connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hivemind.engine.native.wire.checksum import ROW_BYTES, checksum
from lightning_hivemind.engine.native.wire.connection import pieces, write
from lightning_hivemind.engine.native.wire.frames import PIECE_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.reader import Reader
from lightning_hivemind.errors import WireError


class Sink:
    def __init__(self) -> None:
        self.arrivals: list[tuple[Header, bytes | None]] = []

    def room(self, peer: str, header: Header) -> memoryview | None:
        return None if header.chunk == 99 else memoryview(bytearray(header.length))

    def moved(self, peer: str, header: Header) -> None:
        pass

    def arrived(self, peer: str, header: Header, payload: memoryview | None) -> None:
        self.arrivals.append((header, None if payload is None else bytes(payload)))

    def lost(self, peer: str, reason: str, *, connects: bool = False) -> None:
        raise AssertionError


@contextlib.contextmanager
def connected(*, verifies: bool) -> Iterator[tuple[socket.socket, Reader, Sink]]:
    one, other = socket.socketpair()
    sink = Sink()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        yield one, Reader(other, "peer", sink, verifies=verifies), sink


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Reader, Sink]]:
    with connected(verifies=False) as found:
        yield found


SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(SIZES), max_size=4), st.sampled_from([16 << 10, 100_000, PIECE_BYTES]))
def test_the_pieces_of_a_frame_are_the_frame(sizes: list[int], most: int) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    header = Header(kind=Kind.INPUT, length=sum(sizes))
    cut = list(pieces(header, parts, most))
    assert cut[0][0] == replace(header, in_pieces=len(cut) > 1)
    assert all(one == Header(kind=Kind.MORE, length=sum(map(len, piece))) for one, piece in cut[1:])
    assert all(sum(map(len, piece)) == most for _, piece in cut[1:-1])
    assert (len(cut) > 1) == (sum(sizes) > most)
    assert b"".join(view for _, piece in cut for view in piece) == b"".join(parts)


@pytest.mark.parametrize("chunk", [0, 99], ids=["wanted", "unwanted"])
def test_a_message_between_two_pieces_arrives_before_the_frame(
    pair: tuple[socket.socket, Reader, Sink], chunk: int
) -> None:
    sock, reader, sink = pair
    data = bytes(range(256)) * (PIECE_BYTES // 256) + b"end"
    header = Header(kind=Kind.INPUT, chunk=chunk, length=len(data))
    begins, first, second = pieces(header, [data])
    for piece in (begins, first, (Header(kind=Kind.MESSAGE, length=2), [b"hi"]), second):
        write(sock, *piece)
        reader.read()
    assert sink.arrivals[0] == (Header(kind=Kind.MESSAGE, length=2), b"hi")
    assert sink.arrivals[1:] == [(header, None if chunk else data)]


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ([(Kind.MORE, 5)], "not begun"),
        ([(Kind.INPUT, PIECE_BYTES + 5), (Kind.MORE, PIECE_BYTES), (Kind.MORE, 6)], "not begun, or is whole"),
        ([(Kind.INPUT, PIECE_BYTES + 1), *2 * [(Kind.MORE, PIECE_BYTES // 2)], *2 * [(Kind.MORE, 1)]], "is whole"),
        ([(Kind.INPUT, PIECE_BYTES + 5), (Kind.MORE, 0)], "not begun, or is whole"),
        ([(Kind.INPUT, 4 * PIECE_BYTES), (Kind.MORE, PIECE_BYTES + 1)], "not begun, or is whole"),
        ([(Kind.INPUT, PIECE_BYTES + 5), (Kind.RESULT, PIECE_BYTES + 5)], "within another one"),
        ([(Kind.RECEIPT, PIECE_BYTES + 5)], "not in pieces"),
    ],
)
def test_pieces_that_do_not_belong_together_are_refused(
    pair: tuple[socket.socket, Reader, Sink], lengths: list[tuple[Kind, int]], reason: str
) -> None:
    sock, reader, _ = pair
    for number, (kind, length) in enumerate(lengths):
        in_pieces = length > PIECE_BYTES and kind in (Kind.INPUT, Kind.RESULT)
        sock.sendall(Header(kind=kind, length=length, in_pieces=in_pieces).pack())
        if number < len(lengths) - 1:
            sock.sendall(bytes(length if length <= PIECE_BYTES else 0))
            reader.read()
    with pytest.raises(WireError, match=reason):
        reader.read()


@pytest.mark.parametrize("size", [0, 5, 64 << 10])
def test_a_short_frame_may_come_in_pieces_too(pair: tuple[socket.socket, Reader, Sink], size: int) -> None:
    """Over a slow line, where a message would wait long for all of it."""
    sock, reader, sink = pair
    header = Header(kind=Kind.INPUT, length=size)
    sock.sendall(replace(header, in_pieces=True).pack())
    reader.read()
    for start in range(0, size, 16 << 10):
        write(sock, Header(kind=Kind.MORE, length=min(size, 16 << 10)), [bytes(min(size, 16 << 10))])
        reader.read()
        assert bool(sink.arrivals) == (start + (16 << 10) >= size)
    assert sink.arrivals == [(header, bytes(size))]


def test_a_connection_that_ends_in_a_piece_is_gone(pair: tuple[socket.socket, Reader, Sink]) -> None:
    sock, reader, sink = pair
    sock.sendall(Header(kind=Kind.INPUT, length=10).pack() + b"half")
    sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        reader.read()
    assert sink.arrivals == []


@pytest.mark.parametrize("verifies", [True, False])
@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("size", [5, PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 4096 + 5])
@pytest.mark.parametrize("most", [4 * ROW_BYTES, 100_000, PIECE_BYTES])
@pytest.mark.parametrize("damaged", [None, 0, -1])
def test_what_was_damaged_on_the_way_is_not_handed_over(
    size: int, damaged: int | None, most: int, *, sums: bool, verifies: bool
) -> None:
    data = bytearray(index * 7 % 251 for index in range(size))
    check = 0 if sums else checksum(memoryview(data))
    asked = Header(kind=Kind.INPUT, chunk=3, length=size, checksum=check)
    cut = list(pieces(asked, [data], most, sums=sums))
    if damaged is not None:
        data[damaged] ^= 1
    with connected(verifies=verifies) as (sock, reader, sink):
        for piece in cut:
            write(sock, *piece)
            reader.read()
    ((header, arrived),) = sink.arrivals
    assert arrived == (None if verifies and damaged is not None else bytes(data))
    assert replace(header, checksum=check) == asked


def test_the_checksum_of_the_frame_is_the_one_that_counts() -> None:
    """A result's digest is made of it: what is handed over must be what it says."""
    data = bytes(PIECE_BYTES + 1)
    header = Header(kind=Kind.RESULT, length=len(data), checksum=1 ^ checksum(memoryview(data)))
    begins, first, (last, rest) = pieces(header, [data])
    with connected(verifies=True) as (sock, reader, sink):
        for piece in (begins, first, (replace(last, checksum=checksum(memoryview(data))), rest)):
            write(sock, *piece)
            reader.read()
    assert sink.arrivals == [(header, None)]


@pytest.mark.parametrize("kind", [Kind.INPUT, Kind.RESULT, Kind.PARCEL, Kind.STATE])
@pytest.mark.parametrize("size", [5, PIECE_BYTES + 5])
def test_values_without_a_checksum_are_not_handed_over_where_nothing_else_protects_them(kind: Kind, size: int) -> None:
    with connected(verifies=True) as (sock, reader, sink):
        for piece in pieces(Header(kind=kind, length=size), [bytes(size)]):
            write(sock, *piece)
            reader.read()
    ((_, arrived),) = sink.arrivals
    assert arrived == (bytes(size) if kind is Kind.STATE else None)
