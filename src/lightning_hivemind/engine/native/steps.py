"""What the rounds' thread leaves for the training thread: steps to make, and news of gradients that were handed on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_hivemind.engine.native.protocol.lineage import Commit, PeerId
from lightning_hivemind.engine.native.seam import Outcome


@dataclass(frozen=True, slots=True)
class Step:
    """A global step to be applied.

    Attributes:
        average: None while it is still coming.
        mine: of this peer's samples, how many are in it.
        counted: see :meth:`.Gradients.counted`.
    """

    commit: Commit
    average: Tensor | None
    mine: int
    counted: Tensor | None
    began: float


@dataclass(frozen=True, slots=True)
class Handed:
    """What became of a gradient that was handed to another peer."""

    to: PeerId
    samples: int
    outcome: Outcome
    duration_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """Another peer's gradient, which this one gives to rounds now."""

    of: PeerId
    samples: int
