"""A training state as a description and one piece of memory, and back.

Everything is checked against what the receiving peer trains before any of it is used; nothing is executed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.errors import StateError

#: tensors begin at multiples of this, so that any dtype can be read where it lies
ALIGNMENT = 64
MAX_DESCRIPTION_BYTES = 64 << 20
#: tensors that a state may have for each parameter, besides the parameter itself
MOST_PER_PARAMETER = 16

_DTYPES = {str(one): one for one in (torch.float64, torch.float32, torch.float16, torch.bfloat16)} | {
    str(one): one for one in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}
_Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a state: dtype by name, shape, and where it begins."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a peer's state in host memory.

    Attributes:
        head: whose state this is.
        description: msgpack of what the bytes mean; with it the bytes can be checked and used.
        memory: uint8 CPU (bytes,).
        digest: SHA-256 of ``memory``.
    """

    head: Head
    description: bytes
    memory: Tensor
    digest: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """What :func:`read_description` found: enough to allocate, to compare donors, and to install."""

    head: Head
    digest: bytes
    size: int
    parts: tuple[Part, ...]
    #: of the optimizer, per parameter in order: names to indices into ``parts``, or to plain numbers
    state: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]


@torch.no_grad()
def take(optimizer: torch.optim.Optimizer, tensors: _Tensors, head: Head) -> Snapshot:
    """Copy parameters and state of ``optimizer``, and ``tensors``, to host memory.

    Raises:
        StateError: the optimizer keeps something that is neither a tensor nor a number.
    """
    parameters = _parameters(optimizer)
    sources: list[Tensor] = [*parameters, *tensors]
    state = []
    for parameter in parameters:
        entry: dict[str, Any] = {}
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                entry[name] = [len(sources)]
                sources.append(value)
            elif value is None or isinstance(value, (bool, int, float)):
                entry[name] = value
            else:
                raise StateError(
                    f"{type(optimizer).__name__} keeps {name}, a {type(value).__name__}, which cannot be handed to"
                    " peers that join: use an optimizer whose state is tensors and numbers."
                )
        state.append(entry)
    parts, size = _lay_out(sources)
    memory = torch.zeros(size, dtype=torch.uint8)
    for part, source in zip(parts, sources, strict=True):
        _view(memory, part).copy_(source)
    groups = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    digest = hashlib.sha256(memory_of(memory)).digest()
    described = [
        [head.epoch, head.lineage, head.samples],
        digest,
        [[part.dtype, list(part.shape)] for part in parts],
        state,
        groups,
    ]
    return Snapshot(head, msgpack.packb(described, use_bin_type=True), memory, digest)


def read_description(data: bytes | memoryview, optimizer: torch.optim.Optimizer, tensors: _Tensors) -> Description:
    """What another peer says of its state, once it is known to fit ``optimizer`` and ``tensors`` here.

    Raises:
        StateError: it does not, or it is no such description.
    """
    try:
        head, digest, parts, state, groups = msgpack.unpackb(data, raw=False, max_ext_len=0, strict_map_key=True)
        epoch, lineage, samples = head
        shapes = [(str(dtype), tuple(int(n) for n in shape)) for dtype, shape in parts]
        sound = isinstance(digest, bytes) and isinstance(lineage, bytes) and min(epoch, samples) >= 0
        sound &= all(dtype in _DTYPES and min(shape, default=0) >= 0 for dtype, shape in shapes)
        sound &= all(isinstance(one, dict) for one in [*state, *groups])
        if not sound:
            raise ValueError("of other types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise StateError(f"a peer described its state in a way that cannot be understood: {error}") from None
    _check_tensors(shapes, [*_parameters(optimizer), *tensors])
    _check_optimizer(shapes, state, groups, optimizer, len(tensors))
    laid_out, size = _offsets(shapes)
    return Description(Head(epoch=epoch, lineage=lineage, samples=samples), digest, size, laid_out, state, groups)


@torch.no_grad()
def install(description: Description, memory: Tensor, optimizer: torch.optim.Optimizer, tensors: _Tensors) -> None:
    """Put a state whose digest was checked into ``optimizer`` (its parameters included) and ``tensors``.

    ``memory`` is not used any more afterwards. Learning rates are the donor's.
    """
    targets = [*_parameters(optimizer), *tensors]
    values = [_view(memory, part) for part in description.parts]
    for target, value in zip(targets, values, strict=False):
        target.copy_(value)
    state = {
        index: {k: values[v[0]].clone() if isinstance(v, list) else v for k, v in entry.items()}
        for index, entry in enumerate(description.state)
        if entry
    }
    groups, first = [], 0
    for own, theirs in zip(optimizer.param_groups, description.groups, strict=True):
        count = len(own["params"])
        group = {name: _like(own.get(name), value) for name, value in theirs.items()}
        groups.append({**group, "params": list(range(first, first + count))})
        first += count
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def verify(description: Description, memory: Tensor) -> bool:
    """Whether these are the bytes that were described."""
    return hashlib.sha256(memory_of(memory)).digest() == description.digest


# ---------------------------------------------------------------------- private


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _lay_out(tensors: _Tensors) -> tuple[tuple[Part, ...], int]:
    for tensor in tensors:
        if str(tensor.dtype) not in _DTYPES:
            raise StateError(f"a tensor of {tensor.dtype} cannot be handed to peers that join.")
    return _offsets([(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors])


def _offsets(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[Part, ...], int]:
    parts, offset = [], 0
    for dtype, shape in shapes:
        parts.append(part := Part(dtype, shape, offset))
        offset += -(-part.bytes // ALIGNMENT) * ALIGNMENT
    return tuple(parts), offset


def _view(memory: Tensor, part: Part) -> Tensor:
    return memory[part.offset : part.offset + part.bytes].view(_DTYPES[part.dtype]).view(part.shape)


def _check_tensors(shapes: Sequence[tuple[str, tuple[int, ...]]], targets: Sequence[Tensor]) -> None:
    if len(shapes) < len(targets):
        raise StateError(f"a peer has {len(shapes)} tensors, this model needs {len(targets)}: another model?")
    for index, (mine, theirs) in enumerate(zip(targets, shapes, strict=False)):
        if (str(mine.dtype), tuple(mine.shape)) != theirs:
            raise StateError(
                f"tensor {index} of a peer's state is {theirs[0]} {theirs[1]}, here it is {mine.dtype}"
                f" {tuple(mine.shape)}. All peers of a run_id must train the same model in the same precision; give"
                " this one another run_id."
            )


def _check_optimizer(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    state: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    others: int,
) -> None:
    """Every tensor of the optimizer's state belongs to one parameter, and is no larger than it (or a number)."""
    parameters = _parameters(optimizer)
    wrong = f"a peer's optimizer state does not fit {type(optimizer).__name__} here"
    if len(state) != len(parameters) or len(groups) != len(optimizer.param_groups):
        raise StateError(
            f"{wrong}: {len(state)} parameters in {len(groups)} groups, here {len(parameters)} in"
            f" {len(optimizer.param_groups)}. All peers of a run_id must use the same optimizer."
        )
    for own, theirs in zip(optimizer.param_groups, groups, strict=True):
        if set(theirs) != set(own) - {"params"}:
            raise StateError(f"{wrong}: its groups have {sorted(theirs)}, here {sorted(set(own) - {'params'})}.")
    expected = len(parameters) + others
    for parameter, entry in zip(parameters, state, strict=True):
        if len(entry) > MOST_PER_PARAMETER:
            raise StateError(f"{wrong}: {len(entry)} entries for one parameter.")
        for name, value in entry.items():
            if not isinstance(value, list):
                continue
            if value != [expected] or expected >= len(shapes):
                raise StateError(f"{wrong}: its tensors are not in order.")
            if math.prod(shapes[expected][1]) > max(1, parameter.numel()):
                raise StateError(f"{wrong}: {name} is larger than its parameter.")
            expected += 1
    if expected != len(shapes):
        raise StateError(f"{wrong}: {len(shapes) - expected} tensors belong to nothing.")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # a learning rate may be one
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def _like(own: Any, value: Any) -> Any:
    """As msgpack gave it, in the type that this peer's optimizer has it in."""
    if isinstance(own, Tensor):
        return torch.full_like(own, float(value))
    return tuple(value) if isinstance(own, tuple) and isinstance(value, list) else value
