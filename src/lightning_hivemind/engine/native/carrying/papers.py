"""What the two peers say to one another, as frames.

Frames of :attr:`.Kind.OFFERED`, :attr:`.Kind.PARCEL` and :attr:`.Kind.RECEIPT` carry in ``round`` the number of the
parcel. A parcel has the chunks of a gradient; its sender may ask with the same offer again how far it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol.lineage import MOST_EPOCHS, MOST_SAMPLES, Head
from lightning_hivemind.engine.native.wire.encoding import read, write
from lightning_hivemind.errors import WireError

TOKEN_BYTES = 8
MOST_TEXT = 200
MOST_HEADS = 2


@dataclass(frozen=True, slots=True)
class Offered:
    """A gradient of so many samples, computed with the parameters of ``epoch``.

    Attributes:
        until: see :class:`.seam.Parcel`.
        heads: where its sender stands, and a step before: the carrier, of the same lineage, may not have heard of more.
    """

    samples: int
    epoch: int
    until: int
    heads: tuple[Head, ...]


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
    return write(offer)


def read_offer(data: bytes | memoryview) -> Offered:
    """Raises WireError for anything that :func:`write_offer` does not make."""
    offer: Offered = read(Offered, data)
    heads = len(offer.heads) <= MOST_HEADS and all(head.can_be for head in offer.heads)
    epochs = offer.epoch <= offer.until <= MOST_EPOCHS
    if not 0 < offer.samples <= MOST_SAMPLES or not epochs or not heads:
        raise WireError("an offer of a gradient that cannot be")
    return offer


def write_receipt(receipt: Receipt) -> bytes:
    """The payload of a frame."""
    return write(receipt)


def read_receipt(data: bytes | memoryview, layout: Layout) -> Receipt:
    """Raises WireError for anything that :func:`write_receipt` does not make."""
    receipt: Receipt = read(Receipt, data)
    known = all(chunk < layout.chunks for chunk in receipt.missing)
    if not known or len(receipt.token) != TOKEN_BYTES or len(receipt.refused) > MOST_TEXT:
        raise WireError("a receipt for a gradient that cannot be")
    return receipt


def longest_receipt(layout: Layout) -> int:
    """Bytes of a receipt, at most."""
    return 64 + 4 * MOST_TEXT + 9 * layout.chunks
