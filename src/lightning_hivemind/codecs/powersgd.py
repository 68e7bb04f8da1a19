"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727) with gradients of low rank.

hivemind 1.1.12 orthogonalises in one pass and scales whatever is left of a column to length one. If a gradient has a
lower rank than ``averager_rank`` (fewer samples than the rank, say), what is left is rounding noise that points along
the columns before it: the same direction is counted twice and the averaged gradient comes out too large. Measured with
two peers, gradients of all zeros and all ones, rank 4: 1.0 where the mean is 0.5.

:func:`orthonormalise_` replaces the function in hivemind's module; its averager needs no other change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hivemind.optim import power_sgd_averager
from hivemind.optim.grad_averager import GradientAverager

from lightning_hivemind.errors import ArgumentError

#: share of a column that must be new to be more than rounding: half precision on the wire has 2**-11
_LEAST_NEW_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """What ``partial(PowerSGDGradientAverager, ...)`` asks for, with hivemind's default."""

    rank: int
    min_compression_ratio: float = 0.5


def read_factory(factory: Any) -> PowerSGD | None:
    """What a ``grad_averager_factory`` asks for that can be had without hivemind's averagers; None: a plain average.

    Raises:
        ArgumentError: something else.
    """
    arguments: dict[str, Any] = {}
    positional: tuple[Any, ...] = ()
    averager = factory
    while isinstance(averager, partial):
        arguments, positional, averager = {**averager.keywords, **arguments}, averager.args + positional, averager.func
    if averager in (None, GradientAverager) and not arguments and not positional:
        return None
    rank, ratio = arguments.pop("averager_rank", None), arguments.pop("min_compression_ratio", 0.5)
    if averager is not power_sgd_averager.PowerSGDGradientAverager or arguments or positional:
        raise ArgumentError(
            f'grad_averager_factory={factory!r}: engine="native" averages by itself, and takes PowerSGD only, as'
            " functools.partial(PowerSGDGradientAverager, averager_rank=32, min_compression_ratio=0.5); or use"
            ' engine="hivemind".'
        )
    if type(rank) is not int or rank < 1 or isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise ArgumentError(
            f"grad_averager_factory={factory!r}: PowerSGD needs averager_rank, a whole number from 1, and takes"
            " min_compression_ratio, a number; such as averager_rank=32, min_compression_ratio=0.5."
        )
    return PowerSGD(rank, float(ratio))


@torch.no_grad()
def orthonormalise_(matrix: torch.Tensor, eps: float = 1e-8) -> None:
    """Make the columns orthogonal and of length one, in place; a column that adds nothing new becomes zero.

    Args:
        matrix: float32 (rows, rank).
        eps: columns shorter than this count as zero.
    """
    for i in range(matrix.shape[1]):
        column, before = matrix[:, i], matrix[:, :i]
        length = float(column.norm())
        for _ in range(2):  # the second pass removes what rounding left of the first
            column.sub_(before @ (before.t() @ column))
        left = float(column.norm())
        if length < eps or left < _LEAST_NEW_SHARE * length:
            column.zero_()
        else:
            column.div_(left)


def install() -> None:
    """Let hivemind's PowerSGDGradientAverager use it, here and in what is forked from here."""
    module: Any = power_sgd_averager
    module.orthogonalize_ = orthonormalise_
