"""Checks of one argument at a time: each takes ``(name, value)`` and returns the value as it is kept.

A check accepts what a user may reasonably write (a whole number for seconds, a comma-separated text for a list), turns
it into one immutable form, and raises :class:`~lightning_hivemind.errors.ArgumentError` otherwise.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_hivemind.errors import ArgumentError, kind_of
from lightning_hivemind.network.addresses import normalise_initial_peers

Check = Callable[[str, Any], Any]

#: the run's name is part of DHT keys and of log lines
RUN_ID_MAX_CHARS = 100
#: of samples: such a number is still exact as a float
MOST_WHOLE = 2**53
#: connections of NCCL's between two ranks
MOST_NCCL_SOCKETS = 64
#: three years, of what is seconds: systems' own limits are not much above
MOST = 1e8

_show = reprlib.Repr()
_show.maxstring = _show.maxother = 80


def refusal(name: str, value: object, wrong: str, fix: str) -> ArgumentError:
    """The error of one argument, in the form ``field=value: what is wrong; fix``."""
    return ArgumentError(f"{name}={_show.repr(value)}: {wrong}; {fix}")


def optional(check: Check) -> Check:
    """The same check, but ``None`` stays ``None``."""
    return lambda name, value: None if value is None else check(name, value)


def flag(name: str, value: object) -> bool:
    """``True`` or ``False``; 0, 1 and texts are refused."""
    if not isinstance(value, bool):
        raise refusal(name, value, f"{kind_of(value)} is not a truth value", "give True or False")
    return value


def whole_number(name: str, value: object) -> int:
    """At least 1; ``True`` is not a number here."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise refusal(name, value, f"{kind_of(value)} is not a whole number", "give an int, 1 or more")
    if value < 1:
        raise refusal(name, value, "is below 1", "give an int, 1 or more")
    if int(value) > MOST_WHOLE:
        raise refusal(name, value, "is above 2**53", "give a smaller one")
    return int(value)


def positive(name: str, value: object) -> float:
    """A finite number above 0 and not above :data:`MOST`: seconds, mostly."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refusal(name, value, f"{kind_of(value)} is not a number", "give a number above 0")
    try:
        number = float(value)
    except OverflowError:
        number = 2 * MOST
    if not math.isfinite(number) or number <= 0:
        raise refusal(name, value, "is not a finite number above 0", "give a number above 0")
    if number > MOST:
        raise refusal(name, value, f"is above {MOST:.0e}", "give a smaller number")
    return number


def fraction(name: str, value: object) -> float:
    """Above 0, at most 1."""
    number = positive(name, value)
    if number > 1:
        raise refusal(name, value, "is above 1", "give a number above 0 and at most 1")
    return number


def nccl(name: str, value: object) -> dict[str, int | str]:
    """Names of NCCL's variables, with or without ``NCCL_``, and their values; those without."""
    fix = 'give a dict, as {"SOCKET_NTHREADS": 2}'
    if not isinstance(value, Mapping):
        raise refusal(name, value, f"{kind_of(value)} is not a dict", fix)
    found: dict[str, int | str] = {}
    for key, one in value.items():
        if not isinstance(key, str) or not re.fullmatch("[A-Z][A-Z0-9_]*", key):
            raise refusal(name, value, f"{key!r} is no name of a variable", fix)
        if isinstance(one, bool) or not isinstance(one, (int, str)):
            raise refusal(name, value, f"{one!r} is neither a number nor a text", fix)
        found[key.removeprefix("NCCL_")] = one
    sockets = [found.get(one, 1) for one in ("SOCKET_NTHREADS", "NSOCKS_PERTHREAD")]
    if all(str(one).isdigit() for one in sockets) and math.prod(map(int, sockets)) > MOST_NCCL_SOCKETS:
        raise refusal(
            name,
            value,
            f"SOCKET_NTHREADS times NSOCKS_PERTHREAD is above {MOST_NCCL_SOCKETS}, which NCCL does not take",
            "lower one of them",
        )
    return found


def one_of(*choices: str) -> Check:
    """One of the given texts."""

    def check(name: str, value: object) -> str:
        if value not in choices:
            raise refusal(name, value, "is unknown", f"choose one of {', '.join(map(repr, choices))}")
        return str(value)

    return check


def instance_of(kind: type) -> Check:
    """An object of that class."""

    def check(name: str, value: object) -> Any:
        if not isinstance(value, kind):
            raise refusal(name, value, f"{kind_of(value)} is no {kind.__name__}", f"give {kind.__name__}(...)")
        return value

    return check


def local_strategy(name: str, value: object) -> Any:
    """A name or an object; whether it is a strategy's is seen where the Lightning package is known."""
    if value is None or isinstance(value, (bool, int, float)):
        raise refusal(
            name, value, f"{kind_of(value)} is no strategy", 'give a name ("ddp"), a strategy object, or "auto"'
        )
    return value


def run_name(name: str, value: object) -> str:
    """A name that may be part of a DHT key."""
    fix = f"give a name of 1 to {RUN_ID_MAX_CHARS} characters without '.' and white space, such as 'my_run_1'"
    if not isinstance(value, str):
        raise refusal(name, value, f"{kind_of(value)} is not text", fix)
    if not value or len(value) > RUN_ID_MAX_CHARS:
        raise refusal(name, value, f"has {len(value)} characters", fix)
    if "." in value:
        raise refusal(name, value, "contains '.', which separates the parts of a key in the DHT", fix)
    if any("\ud800" <= one <= "\udfff" for one in value):
        raise refusal(name, value, "contains half a character (a surrogate)", fix)
    if re.search(r"\s", value):
        raise refusal(name, value, "contains white space", fix)
    return value


def file_path(name: str, value: object) -> str:
    """Path of a file that may not exist yet; ``~`` is expanded."""
    if not isinstance(value, (str, os.PathLike)):
        raise refusal(name, value, f"{kind_of(value)} is not a path", "give the path of a file")
    path = os.path.expanduser(os.fsdecode(value))
    if not path or os.path.isdir(path):
        raise refusal(name, value, "is not the path of a file", "give the path of a file, existing or new")
    return path


def texts(name: str, value: object) -> tuple[str, ...]:
    """Several texts: a sequence of ``str``, never one ``str``."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise refusal(name, value, "is not a list of texts", f"give a list, such as [{value!r}]")
    items = tuple(value)
    for item in items:
        if not isinstance(item, str):
            raise refusal(name, value, f"contains {item!r}, {kind_of(item)}", "give a list of texts")
    return items


def addresses(name: str, value: object) -> tuple[str, ...]:
    """Multiaddresses as texts: a comma-separated text, or a list of texts or of objects that print as one."""
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        fix = "give a list of multiaddresses, or one text with commas between them"
        raise refusal(name, value, f"{kind_of(value)} is not a list of addresses", fix)
    return normalise_initial_peers(value)


def tensors(name: str, value: object) -> tuple[torch.Tensor, ...]:
    """Several tensors; the tensors themselves are kept, not copied."""
    if isinstance(value, torch.Tensor) or not isinstance(value, Iterable):
        raise refusal(name, type(value).__name__, "is not a list of tensors", "give a list, such as [tensor]")
    items = tuple(value)
    for item in items:
        if not isinstance(item, torch.Tensor):
            raise refusal(name, value, f"contains {kind_of(item)}", "give tensors only")
    return items


def codec(name: str, value: object) -> Any:
    """A codec, as the one to encode with: this package's own where hivemind's was given. Imports hivemind."""
    from lightning_hivemind.codecs import map_codec

    return map_codec(value, name)


def factory(name: str, value: object) -> Callable[..., Any]:
    """Anything that can be called."""
    if not callable(value):
        fix = "give a callable, such as functools.partial(PowerSGDGradientAverager, averager_rank=32)"
        raise refusal(name, value, f"{kind_of(value)} cannot be called", fix)
    return value


def scheduler(name: str, value: object) -> LRScheduler | Callable[..., Any]:
    """A ready scheduler, or what makes one from an optimizer."""
    made = value
    while isinstance(made, partial):
        made = made.func
    if isinstance(made, ReduceLROnPlateau) or (isinstance(made, type) and issubclass(made, ReduceLROnPlateau)):
        fix = "give a scheduler that needs no metric, such as functools.partial(ExponentialLR, gamma=0.99)"
        raise refusal(name, value, "ReduceLROnPlateau has no metric here that is equal on all peers", fix)
    if not callable(value) and not isinstance(value, LRScheduler):
        fix = "give callable(optimizer) -> LRScheduler, such as functools.partial(ExponentialLR, gamma=0.99)"
        raise refusal(name, value, f"{kind_of(value)} is no scheduler and cannot make one", fix)
    return value


def options(legal: frozenset[str], owned: Mapping[str, str]) -> Check:
    """A dict of extra keywords: copied, read-only afterwards.

    Args:
        legal: the keys that may be given.
        owned: keys that exist but are set by the strategy -> the fix.

    ``None`` becomes an empty dict.
    """

    def check(name: str, value: object) -> Mapping[str, Any]:
        if value is None:
            return MappingProxyType({})
        if not isinstance(value, Mapping):
            raise refusal(name, value, f"{kind_of(value)} is not a dict", "give a dict of keywords")
        for key in value:
            if key in owned:
                raise refusal(name, dict(value), f"{key!r} is set by the strategy", owned[key])
            if key not in legal:
                fix = f"{closest(key, legal)}legal are {', '.join(sorted(legal))}"
                raise refusal(name, dict(value), f"{key!r} is unknown", fix)
        return MappingProxyType(dict(value))

    return check


def closest(word: object, legal: Iterable[str]) -> str:
    """``did you mean 'x'? `` or nothing."""
    match = difflib.get_close_matches(str(word), sorted(legal), n=1)
    return f"did you mean {match[0]!r}? " if match else ""
