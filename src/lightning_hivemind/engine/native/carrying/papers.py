"""What the two peers say to one another, as frames.

Frames of :attr:`.Kind.OFFERED`, :attr:`.Kind.PARCEL` and :attr:`.Kind.RECEIPT` carry in ``round`` the number of the
parcel. A parcel has the chunks of a gradient; its sender may ask with the same offer again how far it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol.lineage import MOST_EPOCHS, MOST_SAMPLES
from lightning_hivemind.errors import WireError

TOKEN_BYTES = 8
MOST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Offered:
    """A gradient of so many samples, computed with the parameters of ``epoch``."""

    samples: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Of a carrier.

    Attributes:
        token: new whenever the carrier starts.
        missing: chunks that it still lacks; none: the gradient is the carrier's now.
        refused: why it does not take it (if it does not).
        too_old: no other peer would take it either.
    """

    token: bytes
    missing: tuple[int, ...] = ()
    refused: str = ""
    too_old: bool = False


def write_offer(offer: Offered) -> bytes:
    """The payload of a frame."""
    return _pack([offer.samples, offer.epoch])


def read_offer(data: bytes | memoryview) -> Offered:
    """Raises WireError for anything that :func:`write_offer` does not make."""
    samples, epoch = _unpack(data, 2)
    if not _is_number(samples, MOST_SAMPLES) or not samples or not _is_number(epoch, MOST_EPOCHS):
        raise WireError("an offer of a gradient that cannot be understood")
    return Offered(samples, epoch)


def write_receipt(receipt: Receipt) -> bytes:
    """The payload of a frame."""
    return _pack([receipt.token, list(receipt.missing), receipt.refused, receipt.too_old])


def read_receipt(data: bytes | memoryview, layout: Layout) -> Receipt:
    """Raises WireError for anything that :func:`write_receipt` does not make."""
    token, missing, refused, too_old = _unpack(data, 4)
    sound = isinstance(token, bytes) and len(token) == TOKEN_BYTES and isinstance(too_old, bool)
    sound = sound and isinstance(missing, list) and all(_is_number(one, layout.chunks - 1) for one in missing)
    if not sound or not isinstance(refused, str) or len(refused) > MOST_TEXT:
        raise WireError("a receipt for a gradient that cannot be understood")
    return Receipt(token, tuple(missing), refused, too_old)


def longest_receipt(layout: Layout) -> int:
    """Bytes of a receipt, at most."""
    return 64 + 4 * MOST_TEXT + 9 * layout.chunks


def _is_number(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _pack(values: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    return packed


def _unpack(data: bytes | memoryview, count: int) -> list[Any]:
    try:
        values = msgpack.unpackb(data, raw=False, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"{len(data)} bytes about a gradient that is handed over: {error}") from None
    if not isinstance(values, list) or len(values) != count:
        raise WireError(f"{len(data)} bytes about a gradient that is handed over, and not {count} values")
    return values
