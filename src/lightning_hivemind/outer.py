"""Outer optimization: what is done with the mean of how the peers' own steps have moved the parameters."""

from __future__ import annotations

import numbers
import sys
from dataclasses import dataclass
from typing import Any

from lightning_hivemind.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """Peers make steps of their own; each round averages how far these led, and an outer SGD goes on from there.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023. A round is made
    whenever the swarm has ``target_batch_size`` samples: of ``n`` alike peers with ``H`` inner steps of ``b`` samples
    each between two rounds, that is ``n * H * b``.

    Args:
        lr: of the outer step. 1.0 without momentum is plain averaging of parameters. Lower it if the loss rises after
            rounds.
        momentum: of the outer step, 0.0 or more and below 1.0. It needs some rounds to take effect: 0.9 was worse than
            none in runs of twenty rounds, and is what the paper found best over thousands.
        nesterov: look ahead by the momentum, as the paper does.

    Raises:
        ArgumentError: an impossible value.
    """

    lr: float = 0.7
    momentum: float = 0.6
    nesterov: bool = True

    def __post_init__(self) -> None:
        for name, value, right, wanted in (
            ("lr", self.lr, _is_number(self.lr) and 0.0 < self.lr <= sys.float_info.max, "a number above 0"),
            ("momentum", self.momentum, _is_number(self.momentum) and 0.0 <= self.momentum < 1.0, "0.0 to below 1.0"),
            ("nesterov", self.nesterov, isinstance(self.nesterov, bool), "True or False"),
        ):
            _refuse_unless(right, self, name, value, wanted)
        object.__setattr__(self, "lr", float(self.lr))
        object.__setattr__(self, "momentum", float(self.momentum))


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo(DiLoCo):
    """:class:`DiLoCo` in fragments: each round is of one of them, in rotation, and overlapped with training.

    Douillard et al., "Streaming DiLoCo with overlapping communication", 2025. The parameters, laid one after the other,
    are cut into ``fragments`` of one length. A round, made whenever the swarm has ``target_batch_size`` samples, sends
    one of them: a line carries the bytes of :class:`DiLoCo` evenly, and never the whole model at once, if
    ``target_batch_size`` is that of :class:`DiLoCo` divided by ``fragments``. Peers train on meanwhile, and what they
    have moved a fragment since they gave it is kept on top of what the round brings. Sets ``delay_state_averaging``.

    Args:
        fragments: 2 or more, up to as many as there are values. Each has a round, and an outer step, after as many
            rounds.

    Raises:
        ArgumentError: an impossible value.
    """

    fragments: int = 4

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        given: Any = self.fragments
        right = _is_number(given) and isinstance(given, numbers.Integral) and int(given) >= 2
        _refuse_unless(right, self, "fragments", given, "a whole number of 2 or more")
        object.__setattr__(self, "fragments", int(given))


def _refuse_unless(right: bool, settings: DiLoCo, name: str, value: object, wanted: str) -> None:
    if not right:
        raise ArgumentError(f"{type(settings).__name__}({name}={value!r}): give {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
