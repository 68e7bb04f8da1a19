"""Codecs for which hivemind has no wire format: names of what ``engine="native"`` has (engine/native/codecs)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import hivemind.compression

from lightning_hivemind.errors import ArgumentError

#: of top-k: see engine/native/codecs/sparse.py
_BLOCK = 256


class NativeCompression(hivemind.compression.CompressionBase):  # type: ignore[misc]
    """Can be given as an argument, and not be sent to peers of hivemind."""

    def _refuse(self, *given: Any, **options: Any) -> Any:
        raise NotImplementedError(f'{type(self).__name__} has no wire format of hivemind; use engine="native"')

    compress = extract = estimate_compression_ratio = _refuse

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BFloat16Compression(NativeCompression):
    """The upper half of float32: its range, relative error 2**-8. Two bytes per value."""


class Blockwise4BitQuantization(NativeCompression):
    """Whole numbers from -7 to 7 times the largest of ``block`` neighbours, over 7. Error: 1/14 of that value at most.

    0.56 bytes per value, with blocks of 128 0.53. Meant for changes of parameters over many batches (``outer``); for
    gradients of single steps it is coarse.
    """

    def __init__(self, block: int = 64) -> None:
        if type(block) is not int or not 16 <= block <= 4096:
            raise ArgumentError(f"block={block!r}: give a whole number from 16 to 4096, such as 128")
        self.block = block

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block={self.block})"


class TopKCompression(NativeCompression):
    """The largest values in float16, the others zero: ``share`` of them, 3 bytes for each.

    What is left out is added to what this peer sends next: late, not lost, unless it falls out of the swarm.
    For gradients.
    """

    def __init__(self, share: float = 1 / 32) -> None:
        if type(share) not in (int, float) or not 1 / _BLOCK <= share <= 1:
            raise ArgumentError(f"share={share!r}: give a number from 1/{_BLOCK} to 1, such as 1/32")
        #: of each 256 neighbours
        self.kept = round(share * _BLOCK)

    def __repr__(self) -> str:
        return f"TopKCompression({self.kept}/{_BLOCK})"


def parts_of(codec: Any) -> Iterator[Any]:
    """``codec``, and those in it at any depth."""
    yield codec
    for name in ("less", "greater_equal"):
        if (part := getattr(codec, name, None)) is not None:
            yield from parts_of(part)
    for name in ("role_compressions", "tensor_compressions"):
        parts = getattr(codec, name, ())
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from parts_of(part)
