"""hivemind's codec objects to ours: those that a user passed, and those in hivemind's table of wire types."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import hivemind.compression as stock
from hivemind.compression import serialization

from lightning_hivemind.codecs.blockwise import BlockwiseQuantization
from lightning_hivemind.codecs.floating import Float16Compression, ScaledFloat16Compression
from lightning_hivemind.codecs.quantile import Quantile8BitQuantization
from lightning_hivemind.codecs.uniform import Uniform8BitQuantization
from lightning_hivemind.errors import ArgumentError, kind_of

_OURS: dict[type, type] = {
    stock.Float16Compression: Float16Compression,
    stock.ScaledFloat16Compression: ScaledFloat16Compression,
    stock.Uniform8BitQuantization: Uniform8BitQuantization,
    stock.Quantile8BitQuantization: Quantile8BitQuantization,
    stock.BlockwiseQuantization: BlockwiseQuantization,
}


def install() -> None:
    """Decode every message in this process, and in what it forks, with our codecs. Safe to call again."""
    table = serialization._BASE_COMPRESSION_TYPES  # no public way; hivemind looks each message up in it
    for name, present in table.items():
        if type(present) in _OURS:
            table[name] = _OURS[type(present)]()


def map_codec(obj: Any, name: str = "compression") -> stock.CompressionBase:
    """The codec to encode with: ours where hivemind's own was given, at any depth; anything else as it is.

    Args:
        obj: a codec of hivemind, of this package or of the user; ``None`` means uncompressed. Not changed.
        name: the argument that it was given as, for messages.

    Raises:
        ArgumentError: not a codec.
    """
    if obj is None:
        return stock.NoCompression()
    if isinstance(obj, type):
        raise ArgumentError(f"{name}={obj.__name__}: is a class, not a codec; add (): {obj.__name__}()")
    if not isinstance(obj, stock.CompressionBase):
        raise ArgumentError(
            f"{name}={obj!r}: {kind_of(obj)} is not a codec; give one, such as "
            "lightning_hivemind.codecs.Float16Compression()"
        )
    if isinstance(obj, stock.SizeAdaptiveCompression):
        return _with(
            obj,
            less=map_codec(obj.less, f"{name}.less"),
            greater_equal=map_codec(obj.greater_equal, f"{name}.greater_equal"),
        )
    if isinstance(obj, stock.RoleAdaptiveCompression):
        roles = {role: map_codec(one, f"{name}.{role.name.lower()}") for role, one in obj.role_compressions.items()}
        return _with(obj, role_compressions=roles)
    if isinstance(obj, stock.PerTensorCompression):
        given = obj.tensor_compressions
        if isinstance(given, Mapping):
            return _with(
                obj, tensor_compressions={key: map_codec(one, f"{name}[{key!r}]") for key, one in given.items()}
            )
        return _with(obj, tensor_compressions=[map_codec(one, f"{name}[{i}]") for i, one in enumerate(given)])
    ours = _OURS.get(type(obj))
    return obj if ours is None else _with(ours(), **vars(obj))


def _with(obj: Any, **attributes: Any) -> Any:
    changed = copy.copy(obj)
    vars(changed).update(attributes)
    return changed
