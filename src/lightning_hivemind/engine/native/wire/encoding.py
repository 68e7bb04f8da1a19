"""Protocol messages as bytes and back: msgpack of plain values, every one checked against the message's own types.

What is not exactly such a message is refused; nothing in it is ever executed, and little more is allocated than was
sent.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import msgpack  # type: ignore[import-untyped]

from lightning_hivemind.engine.native.protocol import messages
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.errors import WireError

#: a plan of a thousand peers and ten thousand chunks fits
MAX_MESSAGE_BYTES = 4 << 20
MAX_TEXT = 256
MAX_BYTES = 64
MAX_INT = 2**63 - 1
#: of a list: room for as many as it says it has is made before they are read
MAX_LIST = 1 << 14

_KINDS: tuple[type, ...] = typing.get_args(messages.Message)
_TAGS = {kind: tag for tag, kind in enumerate(_KINDS)}

Reader = Callable[[Any], Any]


def encode(message: messages.Message) -> bytes:
    """A tag and the fields in order, nested messages likewise."""
    return _pack([_TAGS[type(message)], *_plain(message)])


def decode(data: bytes | memoryview) -> messages.Message:
    """The message that :func:`encode` made.

    Raises:
        WireError: these bytes are no such message.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    message: messages.Message = _unpack(data, _read_message, "message")
    return message


def _read_message(values: Any) -> Any:
    if not isinstance(values, list) or not values or type(values[0]) is not int:
        raise ValueError("no tag")
    if not 0 <= values[0] < len(_KINDS):
        raise ValueError(f"unknown tag {values[0]}")
    return _reader(_KINDS[values[0]])(values[1:])


def write(value: Any) -> bytes:
    """A dataclass of plain values that is no message of the protocol: its fields in order."""
    return _pack(_plain(value))


def read(kind: Any, data: bytes | memoryview) -> Any:
    """The ``kind`` of which :func:`write` made these bytes. Raises WireError for any others."""
    return _unpack(data, _reader(kind), kind.__name__)


def _unpack(data: bytes | memoryview, reader: Reader, what: str) -> Any:
    try:
        limits = {"max_array_len": MAX_LIST, "max_map_len": 0, "max_ext_len": 0}
        return reader(msgpack.unpackb(data, use_list=True, raw=False, strict_map_key=True, **limits))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{len(data)} bytes that are no {what}: {error}") from error


def _pack(values: Any) -> bytes:
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    return packed


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value[:MAX_TEXT] if isinstance(value, str) else value  # an error's text may be of any length


@cache
def _reader(kind: Any) -> Reader:
    """What checks a plain value and makes a ``kind`` of it; raises ValueError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_dataclass(kind)
    if origin is tuple:
        return _read_tuple(arguments)
    if origin in (typing.Union, types.UnionType):
        return _read_optional(arguments)
    if kind is bool:
        return _read_bool
    return {int: _read_int, float: _read_float, str: _read_text, bytes: _read_bytes}[kind]


def _read_dataclass(kind: type) -> Reader:
    hints = typing.get_type_hints(kind)
    readers = [(field.name, _reader(hints[field.name])) for field in fields(kind)]

    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(readers):
            raise ValueError(f"{kind.__name__} has {len(readers)} fields")
        found = kind(**{name: reader(one) for (name, reader), one in zip(readers, value, strict=True)})
        if isinstance(found, Head) and not found.can_be:
            raise ValueError("a head that no run can have")
        return found

    return read


def _read_tuple(arguments: tuple[Any, ...]) -> Reader:
    if arguments[-1] is Ellipsis:
        each = _reader(arguments[0])
        return lambda value: tuple(each(one) for one in _a_list(value))
    readers = [_reader(one) for one in arguments]

    def read(value: Any) -> Any:
        if len(_a_list(value)) != len(readers):
            raise ValueError(f"expected {len(readers)} values")
        return tuple(reader(one) for reader, one in zip(readers, value, strict=True))

    return read


def _read_optional(arguments: tuple[Any, ...]) -> Reader:
    (inner,) = (_reader(one) for one in arguments if one is not type(None))
    return lambda value: None if value is None else inner(value)


def _a_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {type(value).__name__}")
    return value


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected a flag, got {type(value).__name__}")
    return value


def _read_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ValueError("expected a whole number that is not negative")
    return value


def _read_float(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError("expected a number that is finite and not negative")
    return float(value)


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"expected a text of at most {MAX_TEXT} characters")
    return value


def _read_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes")
    return value
