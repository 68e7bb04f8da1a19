"""A training state as a description and one piece of memory, and back.

In the memory come parameters, the optimizer's state and ``shared`` tensors, which all peers at one head have bit for
bit; then ``own`` ones (masks, indices), which every peer has for itself and which the digest leaves out.

Everything is checked against what the receiving peer trains before any of it is used; nothing is executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import msgpack  # type: ignore[import-untyped]
import torch
from torch import Tensor

from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state.content import Content, Piece
from lightning_hivemind.engine.native.state.ranges import DIGEST_BYTES, digest_of_all, digest_of_shared, spans
from lightning_hivemind.engine.native.state.settings import (
    EXTRA_SETTINGS,
    LOCAL_SETTINGS,
    cannot_be_told,
    fits,
    like,
    plain,
)
from lightning_hivemind.engine.native.trail import Trail, sound_marks
from lightning_hivemind.errors import StateError

#: tensors begin at multiples of this, so that any dtype can be read where it lies
ALIGNMENT = 64
MAX_DESCRIPTION_BYTES = 64 << 20
#: ranges, or tensors, that a description may list: room for as many as it says it has is made before they are read
MOST_LISTED = 1 << 18
#: tensors that a state may have for each parameter, besides the parameter itself
MOST_PER_PARAMETER = 16

_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}
#: the most that marks of a trail take, after 10**16 steps
_MARKS_BYTES = 1 << 20
_LARGEST = max(dtype.itemsize for dtype in _DTYPES.values())


class MisfitError(StateError):
    """It will fit no better when it is asked for again."""


SAME = "All peers of a run_id must use the same optimizer."
_Tensors = Sequence[Tensor]
_Shape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a state: dtype by name, shape, and where it begins."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return _bytes((self.dtype, self.shape))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A peer's state, to be given.

    Attributes:
        head: whose state this is.
        description: msgpack of what the bytes mean; with it the bytes can be checked and used.
        spans: of its ranges, see :mod:`.ranges`.
        digest: of what is shared in ``content``; ``key``: of all of it.
    """

    head: Head
    description: bytes
    content: Content
    spans: tuple[slice, ...]
    digest: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """What :func:`read_description` found: enough to allocate, to compare donors, and to install.

    Attributes:
        marks: of the :class:`.Trail` to ``head``.
        digest: of what is shared; ``key``: of all of it.
        size: bytes of all of it.
        spans: of its ranges; ``ranges``: their digests.
        parts: parameters, the optimizer's tensors in the order of ``state``, shared tensors, own ones.
        state: of the optimizer, per parameter: names to plain numbers, or to None for the next of its tensors.
        groups: settings of the optimizer's groups.
    """

    head: Head
    marks: bytes
    digest: bytes
    key: bytes
    size: int
    spans: tuple[slice, ...]
    ranges: tuple[bytes, ...]
    parts: tuple[Part, ...]
    state: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class State:
    """A state that nobody knows how to read yet; ``own``: how many tensors at its end are not shared."""

    head: Head
    marks: bytes
    content: Content
    parts: tuple[Part, ...]
    own: int
    state: list[dict[str, Any]]
    groups: list[dict[str, Any]]

    def described(self) -> Snapshot:
        """With its digests.

        Raises:
            StateError: it cannot be described.
        """
        size = self.content.size
        shared = _shared(self.parts, self.own, size)
        places = spans(shared, size)
        ranges = self.content.describe(places)
        if ranges is None:
            raise StateError("the state changed before it was described, and no copy could be made.")
        place = [self.head.epoch, self.head.lineage, self.head.samples, self.marks]
        shapes = [[part.dtype, list(part.shape)] for part in self.parts]
        try:
            description = msgpack.packb([place, ranges, shapes, self.state, self.groups], use_bin_type=True)
        except (OverflowError, ValueError, TypeError) as error:
            raise StateError(f"the state of the optimizer cannot be described: {error}") from None
        digest = digest_of_shared(ranges, places, shared)
        return Snapshot(self.head, description, self.content, places, digest, digest_of_all(ranges))


def state_bytes(optimizer: torch.optim.Optimizer, shared: _Tensors, own: _Tensors) -> int:
    """How long a copy is; before an optimizer's first step it has no state of its own."""
    return sum(_aligned(one.numel() * one.element_size()) for one in (*_tensors(optimizer), *shared, *own))


def can_stay(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that only a step changes lies in host memory as it is given: it need not be copied before one."""
    return all(
        one.device.type == "cpu" and one.layout is torch.strided and one.is_contiguous() for one in _tensors(optimizer)
    )


@torch.no_grad()
def take_state(
    optimizer: torch.optim.Optimizer, shared: _Tensors, own: _Tensors, trail: Trail, memory: Tensor | None = None
) -> State:
    """Parameters and state of ``optimizer``, at the end of ``trail``, and the tensors, to be given.

    Parameters and state that can stay (:func:`can_stay`) are copied by :meth:`.Content.change` only. Others are at
    once, and all are if there is ``memory`` for that, uint8 CPU (:func:`state_bytes`,).

    Raises:
        StateError: the optimizer keeps something that is neither a tensor nor a number.
    """
    parameters = parameters_of(optimizer)
    kept: list[Tensor] = []
    state = []
    for parameter in parameters:
        entry: dict[str, Any] = {}
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if isinstance(value, Tensor):
                kept.append(value.to_dense())  # (what sparse gradients have left; others as they are)
            elif not isinstance(value, (bool, int, float)):
                raise cannot_be_told(optimizer, name, value)
            entry[name] = None if isinstance(value, Tensor) else value
        state.append(entry)
    sources = [*parameters, *kept, *shared, *own]
    unknown = next((tensor.dtype for tensor in sources if str(tensor.dtype) not in _DTYPES), None)
    if unknown is not None:
        raise StateError(f"a tensor of {unknown} cannot be handed to peers that join.")
    parts, size = _lay_out([(str(tensor.dtype), tuple(tensor.shape)) for tensor in sources])
    stays, only_steps = memory is None and can_stay(optimizer), len(parameters) + len(kept)
    if stays:  # but for what batches change
        sources[only_steps:] = [one.detach().to("cpu", copy=True).contiguous() for one in sources[only_steps:]]
    content = Content([Piece(one, part.offset) for part, one in zip(parts, sources, strict=True)], size)
    if not stays:
        content.copy(memory)
    groups = [
        {name: plain(optimizer, name, value) for name, value in group.items() if name not in LOCAL_SETTINGS}
        for group in optimizer.param_groups
    ]
    return State(trail.head, trail.marks, content, parts, len(own), state, groups)


def read_description(
    data: bytes | memoryview, optimizer: torch.optim.Optimizer, shared: _Tensors, own: _Tensors
) -> Description:
    """What another peer says of its state, once it is known to fit ``optimizer`` and the tensors here.

    Raises:
        StateError: it does not, or it is no such description.
    """
    most = _most_described(optimizer, shared, own)
    if len(data) > most:
        raise MisfitError(f"a peer described its state in {len(data)} bytes; of this model it takes {most} at most.")
    try:
        values = msgpack.unpackb(data, raw=False, max_ext_len=0, max_array_len=MOST_LISTED, strict_map_key=True)
        (epoch, lineage, samples, marks), ranges, parts, state, groups = values
        shapes = [_read_shape(dtype, shape) for dtype, shape in parts]
        sound = isinstance(ranges, list) and all(isinstance(one, bytes) and len(one) == DIGEST_BYTES for one in ranges)
        sound &= isinstance(lineage, bytes) and len(lineage) <= 64
        sound &= _is_count(epoch) and _is_count(samples)
        sound &= all(isinstance(one, dict) and all(isinstance(name, str) for name in one) for one in (*state, *groups))
        if not sound:
            raise ValueError("of other types")
        head = Head(epoch=epoch, lineage=lineage, samples=samples)
        if not head.can_be or not sound_marks(head, marks):
            raise ValueError("no way leads there")
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise StateError(f"a peer described its state in a way that cannot be understood: {error}") from None
    _check(shapes, state, groups, optimizer, shared, own)
    laid_out, size = _lay_out(shapes)
    common = _shared(laid_out, len(own), size)
    places = spans(common, size)
    if len(ranges) != len(places):
        raise StateError(f"a peer described its state in {len(ranges)} ranges, where there are {len(places)}.")
    digest, key = digest_of_shared(ranges, places, common), digest_of_all(ranges)
    return Description(head, marks, digest, key, size, places, tuple(ranges), laid_out, tuple(state), tuple(groups))


@torch.no_grad()
def install(
    description: Description, memory: Tensor, optimizer: torch.optim.Optimizer, shared: _Tensors, own: _Tensors
) -> None:
    """Put a state whose ranges were checked into ``optimizer`` (its parameters included) and the tensors.

    ``memory`` is not used any more afterwards. Learning rates are the donor's.
    """
    parameters = parameters_of(optimizer)
    values = [_view(memory, part) for part in description.parts]
    kept = iter(values[len(parameters) :])
    settings = [group for group in optimizer.param_groups for _ in group["params"]]
    state: dict[Tensor, dict[str, Any]] = {}
    for parameter, group, entry in zip(parameters, settings, description.state, strict=True):
        on_device = group.get("capturable") or group.get("fused")
        state[parameter] = {
            # torch keeps the count of steps in host memory, unless the optimizer itself runs on the device
            name: _as_it_lies(next(kept), parameter, "cpu" if name == "step" and not on_device else parameter.device)
            if value is None
            else value
            for name, value in entry.items()
        }
    last = values[len(values) - len(shared) - len(own) :]
    for target, value in zip([*parameters, *shared, *own], [*values[: len(parameters)], *last], strict=True):
        target.copy_(value)
    optimizer.state.clear()
    optimizer.state.update({parameter: entry for parameter, entry in state.items() if entry})
    for own_group, theirs in zip(optimizer.param_groups, description.groups, strict=True):
        for name in theirs.keys() & own_group.keys():
            own_group[name] = like(own_group[name], theirs[name])


# ---------------------------------------------------------------------- private


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, and what the optimizer keeps of them."""
    kept = [one for parameter in parameters_of(optimizer) for one in optimizer.state.get(parameter, {}).values()]
    return [*parameters_of(optimizer), *(one for one in kept if isinstance(one, Tensor))]


def _as_it_lies(value: Tensor, parameter: Tensor, device: torch.device | str) -> Tensor:
    """A copy, in memory as the parameter is: fused optimizers do not look, and the last bits of others depend on it."""
    if value.shape != parameter.shape:
        return value.to(device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, device=device).copy_(value)


def _most_described(optimizer: torch.optim.Optimizer, shared: _Tensors, own: _Tensors) -> int:
    """Bytes that the description of a state that fits can have, generously. Unpacked it may take 64 times as many."""
    parameters = parameters_of(optimizer)
    tensors = [*(one for one in parameters for _ in range(1 + MOST_PER_PARAMETER)), *shared, *own]
    parts = sum(64 + 9 * one.dim() for one in tensors) + 64 * MOST_PER_PARAMETER * len(parameters)
    ranges = 1 + len(spans(0, sum(ALIGNMENT + one.numel() * _LARGEST for one in tensors)))
    settings = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return _MARKS_BYTES + parts + ranges * (DIGEST_BYTES + 2) + sum(256 + 2 * len(str(value)) for value in settings)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _read_shape(dtype: Any, shape: Any) -> _Shape:
    if (
        not isinstance(dtype, str)
        or dtype not in _DTYPES
        or not isinstance(shape, list)
        or not all(map(_is_count, shape))
    ):
        raise ValueError("a tensor that is none")
    return dtype, tuple(shape)


def _bytes(shape: _Shape) -> int:
    return math.prod(shape[1]) * int(_DTYPES[shape[0]].itemsize)


def _lay_out(shapes: Sequence[_Shape]) -> tuple[tuple[Part, ...], int]:
    parts, offset = [], 0
    for dtype, shape in shapes:
        parts.append(part := Part(dtype, shape, offset))
        offset += _aligned(part.bytes)
    return tuple(parts), offset


def _aligned(size: int) -> int:
    """Bytes that a tensor of ``size`` takes up to where the next may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _shared(parts: Sequence[Part], own: int, size: int) -> int:
    """Where what is shared ends."""
    return parts[len(parts) - own].offset if own else size


def _view(memory: Tensor, part: Part) -> Tensor:
    return memory[part.offset : part.offset + part.bytes].view(_DTYPES[part.dtype]).view(part.shape)


def _check(
    shapes: Sequence[_Shape],
    state: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    shared: _Tensors,
    own: _Tensors,
) -> None:
    """All that :func:`install` relies on. Nothing may be larger than this peer's own model implies."""
    parameters = parameters_of(optimizer)
    wrong = f"a peer's optimizer state does not fit {type(optimizer).__name__} here"
    if len(state) != len(parameters) or len(groups) != len(optimizer.param_groups):
        raise MisfitError(
            f"{wrong}: {len(state)} parameters in {len(groups)} groups, here {len(parameters)} in"
            f" {len(optimizer.param_groups)}. {SAME}"
        )
    for own_group, theirs in zip(optimizer.param_groups, groups, strict=True):
        names = set(own_group) - LOCAL_SETTINGS
        if (set(theirs) ^ names) - EXTRA_SETTINGS:
            raise MisfitError(f"{wrong}: its groups have {sorted(theirs)}, here {sorted(names)}. {SAME}")
        for name, value in theirs.items():
            if name in own_group and not fits(own_group[name], value):
                raise MisfitError(f"{wrong}: {name}={value!r}, here {own_group[name]!r}. {SAME}")
    owners = [p for p, entry in zip(parameters, state, strict=True) for value in entry.values() if value is None]
    for entry in state:
        if len(entry) > MOST_PER_PARAMETER or not all(
            isinstance(v, (bool, int, float, NoneType)) for v in entry.values()
        ):
            raise MisfitError(f"{wrong}: it keeps what is neither a tensor nor a number.")
    targets = [*parameters, *owners, *shared, *own]
    if len(shapes) != len(targets):
        raise MisfitError(
            f"a peer's state has {len(shapes)} tensors, here it would have {len(targets)}: another model?"
        )
    of_optimizer = range(len(parameters), len(parameters) + len(owners))
    for index, (mine, shape) in enumerate(zip(targets, shapes, strict=True)):
        if index in of_optimizer:
            if math.prod(shape[1]) > max(1, mine.numel()):
                raise MisfitError(f"{wrong}: one of its tensors is larger than its parameter.")
        elif (str(mine.dtype), tuple(mine.shape)) != shape:
            raise MisfitError(
                f"tensor {index} of a peer's state is {shape[0]} {shape[1]}, here it is {mine.dtype}"
                f" {tuple(mine.shape)}. All peers of a run_id must train the same model in the same precision; give"
                " this one another run_id."
            )
