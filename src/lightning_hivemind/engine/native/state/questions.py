"""What a peer that needs a state asks of a donor, as frames.

Frames of :attr:`.Kind.REQUEST` and :attr:`.Kind.STATE` carry in ``round`` the number of the download. In an answer
``chunk`` is 0 for a description (no bytes: this peer has no state to give), else the number of the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]

from lightning_hivemind.errors import WireError

MAX_QUESTION_BYTES = 256


@dataclass(frozen=True, slots=True)
class WantsDescription:
    """Copy your state, and describe the copy."""


@dataclass(frozen=True, slots=True)
class WantsRange:
    """Range ``number`` of the copy with this digest."""

    digest: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """This download has ended: nothing more is asked of the copy."""


Question = WantsDescription | WantsRange | Done


def write(question: Question) -> bytes:
    """The payload of a frame."""
    match question:
        case WantsDescription():
            plain: list[object] = []
        case WantsRange(digest, number):
            plain = [digest, number]
        case Done():
            plain = [None]
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def read(data: bytes | memoryview) -> Question:
    """Raises WireError for anything that :func:`write` does not make."""
    try:
        values = msgpack.unpackb(data, raw=False, max_ext_len=0)
        if values == []:
            return WantsDescription()
        if values == [None]:
            return Done()
        digest, number = values
        if not isinstance(digest, bytes) or len(digest) > 64 or type(number) is not int or number < 0:
            raise ValueError("of other types")
        return WantsRange(digest, number)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"a question about the state that cannot be understood: {error}") from None
