"""A state's bytes in ranges: each is fetched from anybody who has the very same one, and checked by itself.

BLAKE3, since it is quick without instructions for it, too: with those for SHA-256 it takes half as long as that, and
without them a fifth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

#: bytes of a state that are asked for at once
RANGE_BYTES = 4 << 20
DIGEST_BYTES = 32


def spans(shared: int, size: int) -> tuple[slice, ...]:
    """Where ranges lie in a state of ``size`` bytes, of which all peers have the first ``shared``; none is of both."""
    return tuple(
        slice(begin, min(begin + RANGE_BYTES, end))
        for first, end in ((0, shared), (shared, size))
        for begin in range(first, end, RANGE_BYTES)
    )


def digest_of(data: bytes | memoryview) -> bytes:
    """Of a range."""
    return blake3(data).digest()


def digest_of_shared(ranges: Sequence[bytes], places: Sequence[slice], shared: int) -> bytes:
    """Of what all peers have, given the digests of all ranges."""
    return digest_of_all([one for one, place in zip(ranges, places, strict=True) if place.stop <= shared])


def digest_of_all(ranges: Iterable[bytes]) -> bytes:
    """Of these, given their digests."""
    return blake3(b"".join(ranges)).digest()


@dataclass(slots=True)
class RangePace:
    """How long a range takes to come, in the mean and now."""

    began: float
    came_at: float = 0.0
    here: int = 0

    def range_s(self, here: int, now: float) -> float:
        """``here``: how many have come."""
        if here > self.here:
            self.here, self.came_at = here, now
        return max((now - self.began) / max(1, here), now - max(self.began, self.came_at))
