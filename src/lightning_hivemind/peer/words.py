"""What the ranks of one peer say to one another: small, in order, no tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args


@dataclass(frozen=True, slots=True)
class Item:
    """To rank 0: this rank's part of ``what`` all of them share."""

    what: str
    value: Any


@dataclass(frozen=True, slots=True)
class Shared:
    """From rank 0: everybody's part, by rank."""

    what: str
    values: list[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """From rank 0: make the step from ``epoch`` now, as it does.

    ``reached``: for each parameter whether there is an averaged gradient, which comes next; None if the gradient of the
    batch that has just ended is meant, which each rank has. ``hooks_only``: rank 0 alone steps, in host memory, where
    the gradient comes from.
    """

    epoch: int
    reached: list[bool] | None
    hooks_only: bool = False


@dataclass(frozen=True, slots=True)
class Values:
    """From rank 0: values of ``epoch`` come next; which, says ``changed`` (:class:`.engine.base.Changed`)."""

    epoch: int
    changed: int


@dataclass(frozen=True, slots=True)
class Gather:
    """From rank 0: it wants what the ranks have (of :class:`.engine.base.Changed`)."""

    what: int


@dataclass(frozen=True, slots=True)
class Add:
    """From rank 0: add so many times the gradient of this batch to the sum; the ``first`` begins another one."""

    factor: float
    first: bool


@dataclass(frozen=True, slots=True)
class GatherSum:
    """From rank 0: it wants that sum."""


@dataclass(frozen=True, slots=True)
class Done:
    """From rank 0: the call ``what`` of its engine has come back, and what the others' engines say now."""

    what: str
    epoch: int
    committed: bool
    num_peers: int
    local_samples: int
    swarm_samples: int
    stop_epoch: int | None
    #: of a call that answers with a number
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """To rank 0: this rank waits in the call ``what`` of its engine, and has heard so many words."""

    what: str
    heard: int


@dataclass(frozen=True, slots=True)
class Failed:
    """From rank 0: it ends, for this reason."""

    reason: str


Word = Item | Shared | Step | Values | Gather | Add | GatherSum | Done | Waiting | Failed
_WORDS = {one.__name__: one for one in get_args(Word)}


def encode(word: Word) -> bytes:
    """As JSON."""
    fields = {name: getattr(word, name) for name in word.__slots__}  # asdict() copies all that is in them
    return json.dumps([type(word).__name__, fields]).encode()


def decode(data: bytes) -> Word:
    """What :func:`encode` made."""
    name, fields = json.loads(data)
    word: Word = _WORDS[name](**fields)
    return word
