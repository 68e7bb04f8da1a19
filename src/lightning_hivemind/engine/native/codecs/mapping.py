"""The codec that a user gave, hivemind's or this package's, as the native engine's own."""

from __future__ import annotations

from typing import Any

from lightning_hivemind.engine.native.codecs.base import ChunkCodec, Exact
from lightning_hivemind.engine.native.codecs.floating import ScaledFloat16
from lightning_hivemind.engine.native.codecs.integer import Blockwise8Bit, Uniform8Bit
from lightning_hivemind.errors import ArgumentError

#: by the names that hivemind's classes and those of ``lightning_hivemind.codecs`` share
_BY_NAME: dict[str, type[ChunkCodec]] = {
    "NoCompression": Exact,
    "Float16Compression": ScaledFloat16,
    "ScaledFloat16Compression": ScaledFloat16,
    "Uniform8BitQuantization": Uniform8Bit,
    "Quantile8BitQuantization": Blockwise8Bit,
    "BlockwiseQuantization": Blockwise8Bit,
}


def map_codec(given: Any, name: str) -> ChunkCodec:
    """``given`` as ``name``; None sends values as they are. Raises ArgumentError for one that has no counterpart."""
    if given is None:
        return Exact()
    found = next((_BY_NAME[base.__name__] for base in type(given).__mro__ if base.__name__ in _BY_NAME), None)
    if found is None:
        raise ArgumentError(
            f'{name}={type(given).__name__}(...): has no counterpart in engine="native" yet; use one of'
            f' {", ".join(_BY_NAME)}, or engine="hivemind".'
        )
    return found()
