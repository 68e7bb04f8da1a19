"""The unit of every connection: a header of fixed size, then a message, a chunk, or a piece of one."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from lightning_hivemind.errors import WireError

PROTOCOL = 11
_MAGIC = b"LHMD"
#: magic, protocol, kind, round, chunk, plan version, length of what follows, its checksum
_LAYOUT = struct.Struct("!4sBB16sIIII")
HEADER_BYTES = _LAYOUT.size
NO_ROUND = bytes(16)
#: what follows a header at most; a longer frame comes in pieces behind it, so that messages need not wait for all of it
PIECE_BYTES = 256 << 10
_IN_PIECES = 0x80  # of the byte that says the kind


class OtherProtocol(WireError):
    """The other end is of another release, and each frame of it is no use here."""


class Kind(IntEnum):
    """What follows a header."""

    HELLO = 1  #: the first frame of a connection: the token that was given over libp2p
    PING = 2  #: nothing; says that the sender lives
    MESSAGE = 3  #: a message of the protocol, see ``encoding``
    INPUT = 4  #: a member's contribution to a chunk, encoded
    RESULT = 5  #: a reduced chunk, encoded
    REQUEST = 6  #: a question of ``state``
    STATE = 7  #: a part of an answer to it
    MORE = 9  #: a piece of the last frame that is longer than one
    OFFERED = 10  #: a gradient that is to be handed over, see ``carrying``
    PARCEL = 11  #: a chunk of it, encoded
    RECEIPT = 12  #: which of its chunks are not there yet
    REVERSED = 8  #: as HELLO, of a peer that cannot be dialled: it is the other end that sends on this connection


#: what a round averages, encoded
VALUES = frozenset({Kind.INPUT, Kind.RESULT, Kind.PARCEL})


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What is known of a frame before its bytes are there.

    Attributes:
        round: id of the round, 16 bytes; zeros where there is none.
        chunk, version: of the chunk and of the plan.
        length: bytes that follow.
        in_pieces: they do so in pieces (:data:`Kind.MORE`), of which each has a header of its own.
        checksum: of them, in results, of whose digest it is a part. In the clear of all that is :data:`VALUES`, and
            verified: of what comes in pieces it may be in the last one's header instead. 0: none, or it is 0.
    """

    kind: Kind
    round: bytes = NO_ROUND
    chunk: int = 0
    version: int = 0
    length: int = 0
    checksum: int = 0
    in_pieces: bool = False

    def pack(self) -> bytes:
        kind = self.kind | _IN_PIECES * self.in_pieces
        return _LAYOUT.pack(_MAGIC, PROTOCOL, kind, self.round, self.chunk, self.version, self.length, self.checksum)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Read :data:`HEADER_BYTES` bytes.

        Raises:
            WireError: these are no header of this protocol: the stream cannot be read on.
            OtherProtocol: they are one of another release.
        """
        return _read(bytes(data))


@lru_cache(maxsize=64)  # almost all are of pieces, and alike
def _read(data: bytes) -> Header:
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes instead of {HEADER_BYTES}")
    magic, protocol, kind, round_id, chunk, version, length, checksum = _LAYOUT.unpack(data)
    if magic != _MAGIC:
        raise WireError(f"no frame of lightning-hivemind: it begins with {magic!r}")
    if protocol != PROTOCOL:
        raise OtherProtocol(f"protocol {protocol}, this peer speaks {PROTOCOL}: use the same release on all peers")
    try:
        known = Kind(kind & ~_IN_PIECES)
    except ValueError:
        raise WireError(f"unknown kind of frame {kind}") from None
    return Header(
        kind=known,
        round=round_id,
        chunk=chunk,
        version=version,
        length=length,
        checksum=checksum,
        in_pieces=bool(kind & _IN_PIECES),
    )


@lru_cache(maxsize=64)
def more(length: int, check: int = 0) -> Header:
    """Of a piece; the last one may have the checksum of all of them."""
    return Header(kind=Kind.MORE, length=length, checksum=check)
