"""The codec that a user gave, hivemind's or this package's, as the native engine's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hivemind.engine.native.codecs.base import ChunkCodec, Exact
from lightning_hivemind.engine.native.codecs.floating import BFloat16, ScaledFloat16
from lightning_hivemind.engine.native.codecs.integer import Blockwise4Bit, Blockwise8Bit, Uniform8Bit
from lightning_hivemind.engine.native.codecs.sparse import TopK
from lightning_hivemind.errors import ArgumentError

#: by the names that hivemind's classes and those of ``lightning_hivemind.codecs`` share
_BY_NAME: dict[str, ChunkCodec] = {
    "NoCompression": Exact(),
    "Float16Compression": ScaledFloat16(),
    "ScaledFloat16Compression": ScaledFloat16(),
    "Uniform8BitQuantization": Uniform8Bit(),
    "Quantile8BitQuantization": Blockwise8Bit(),
    "BlockwiseQuantization": Blockwise8Bit(),
    "BFloat16Compression": BFloat16(),
}
#: a buffer of no more elements goes as it is: BatchNorm's statistics and counters, which are far larger than gradients
SMALL = 4096
_PACKAGES = ("hivemind", "lightning_hivemind")
_OTHERS = (
    "Blockwise4BitQuantization",
    "TopKCompression",
    "SizeAdaptiveCompression",
    "RoleAdaptiveCompression",
    "PerTensorCompression",
)


@dataclass(frozen=True, slots=True)
class Coding:
    """Which tensor is sent how.

    Attributes:
        name: goes into the schema.
        of: the codec of a tensor, by its place among all that are averaged, and its number of elements.
    """

    name: str
    of: Callable[[int, int], ChunkCodec]

    def of_all(self, sizes: Sequence[int], gradients: int, moments: int = 0) -> list[tuple[int, ChunkCodec]]:
        """The numbers of elements, each with its codec.

        What is left out of the first ``gradients`` is sent later. The others are how far values are from where they
        should be: what is left out of that is seen again, and would count twice; so it is sent whole. Counters among
        them go as they are, with gradients all small buffers, and so do the last ``moments``, an optimizer's: beside
        large values in one block small ones would be rounded to zero, and Adam divides by second moments.
        """
        found: list[tuple[int, ChunkCodec]] = []
        for place, size in enumerate(sizes):
            if place >= len(sizes) - moments:
                found.append((size, Exact()))
                continue
            codec, besides = self.of(place, size), place >= gradients
            as_it_is = besides and (codec.leaves_out or size <= (SMALL if gradients else 1))
            found.append((size, Exact() if as_it_is and not isinstance(codec, Exact) else codec))
        return found


def map_codec(given: Any, name: str) -> Coding:
    """``given`` as ``name``; None sends values as they are. Raises ArgumentError for one that has no counterpart.

    Such is a class of the user's, too, whatever it derives from, and one with settings that its class has not.
    """
    if given is None:
        return _uniform(Exact())
    kind = type(given).__name__ if type(given).__module__.split(".")[0] in _PACKAGES else None
    if kind in _BY_NAME and not vars(given):
        return _uniform(_BY_NAME[kind])
    match kind:
        case "Blockwise4BitQuantization":
            return _uniform(Blockwise4Bit(given.block))
        case "TopKCompression":
            return _uniform(TopK(given.kept))
        case "SizeAdaptiveCompression":
            return _by_size(int(given.threshold), map_codec(given.less, name), map_codec(given.greater_equal, name))
        case "RoleAdaptiveCompression":
            played = "PARAMETER" if name == "state_averaging_compression" else "GRADIENT"
            (codec,) = (codec for role, codec in given.role_compressions.items() if role.name == played)
            return map_codec(codec, name)
        case "PerTensorCompression":
            return _by_place(given.tensor_compressions, name)
    raise ArgumentError(
        f'{name}={type(given).__name__}(...): has no counterpart in engine="native"; use one of'
        f' {", ".join([*_BY_NAME, *_OTHERS])}, or engine="hivemind".'
    )


def _uniform(codec: ChunkCodec) -> Coding:
    return Coding(codec.name, lambda place, size: codec)


def _by_size(threshold: int, less: Coding, greater_equal: Coding) -> Coding:
    return Coding(
        f"({less.name} below {threshold} elements, else {greater_equal.name})",
        lambda place, size: (greater_equal if size >= threshold else less).of(place, size),
    )


def _by_place(given: Any, name: str) -> Coding:
    """hivemind numbers the tensors in the order in which they are averaged."""
    items = given.items() if isinstance(given, Mapping) else enumerate(given)
    codings = {key: map_codec(codec, name) for key, codec in items}

    def of(place: int, size: int) -> ChunkCodec:
        if place not in codings:
            raise ArgumentError(
                f"{name}=PerTensorCompression(...): says nothing of tensor {place}, of {size} elements. Give a codec"
                " for each tensor that is averaged, by its number."
            )
        return codings[place].of(place, size)

    return Coding("(" + ", ".join(f"{key}: {one.name}" for key, one in codings.items()) + ")", of)
