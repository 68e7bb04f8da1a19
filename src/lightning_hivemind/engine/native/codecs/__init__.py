"""The native engine's codecs: one chunk of float32 as bytes and back, with a stated bound of the error.

All of them write a fixed number of bytes for a given number of elements, so that a receiver knows what must come.
Chunks are encoded one by one, in memory that the processor's caches hold.
"""

from lightning_hivemind.engine.native.codecs.base import ChunkCodec, Exact
from lightning_hivemind.engine.native.codecs.floating import BFloat16, ScaledFloat16
from lightning_hivemind.engine.native.codecs.integer import Blockwise4Bit, Blockwise8Bit, Uniform8Bit
from lightning_hivemind.engine.native.codecs.sparse import TopK

__all__ = ["BFloat16", "Blockwise4Bit", "Blockwise8Bit", "ChunkCodec", "Exact", "ScaledFloat16", "TopK", "Uniform8Bit"]
