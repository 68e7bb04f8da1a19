"""Learning-rate schedulers in a swarm: a function of the global step, whatever a peer's own batches are.

Lightning would advance them by this peer's batches or passes over its data, which differ from peer to peer. Here every
scheduler advances once per ``frequency`` global steps, right after the optimizer's step, in the thread that stepped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_hivemind.errors import ArgumentError

log = logging.getLogger("lightning_hivemind")

#: Lightning advances a scheduler every ``frequency`` batches: never, with this
NEVER = sys.maxsize


class SwarmSchedulers:
    """Takes Lightning's scheduler configurations over, and advances the schedulers by epochs of the swarm."""

    def __init__(self, step_hook: Callable[[Any], None]) -> None:
        self._step_hook = step_hook
        self._taken: list[tuple[Any, int]] = []
        self._epoch = 0

    def take_over(self, configs: Sequence[Any]) -> None:
        """Stop Lightning from advancing ``configs`` (their ``frequency`` is kept here); monitors still see them."""
        self._taken = []
        for config in configs:
            if config.interval == "epoch":
                log.info(
                    "%s has interval='epoch', but passes over the data differ from peer to peer: it advances once per"
                    " %d global step(s) of the swarm. Set interval='step' to silence this.",
                    type(config.scheduler).__name__,
                    config.frequency,
                )
            self._taken.append((config.scheduler, config.frequency))
            config.interval, config.frequency = "step", NEVER

    def advance(self, epoch: int) -> None:
        """Bring every scheduler to ``epoch`` (never back)."""
        for scheduler, frequency in self._taken:
            for _ in range(epoch // frequency - self._epoch // frequency):
                self._step_hook(scheduler)
        self._epoch = max(self._epoch, epoch)

    def mark(self, epoch: int) -> None:
        """The schedulers' own state was (or will be) loaded for ``epoch``: do not advance them to it."""
        self._epoch = epoch


def refuse_plateau(config: Any) -> None:
    """Raises ArgumentError for a ``ReduceLROnPlateau``: no peer knows the swarm's metric at the time of a step."""
    if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau):
        raise ArgumentError(
            "lr_scheduler=ReduceLROnPlateau: refused, because each peer would lower its own learning rate at another"
            " step. Use a schedule that depends on the number of steps only, such as CosineAnnealingLR or LambdaLR."
        )


def scheduler_from(scheduler_fn: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Make the user's ``scheduler_fn`` (a callable, or a ready scheduler) a scheduler of ``optimizer``.

    Raises:
        ArgumentError: it is a ready scheduler of another optimizer, or the callable returned no scheduler.
    """
    scheduler = scheduler_fn if isinstance(scheduler_fn, LRScheduler) else scheduler_fn(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise ArgumentError(
            f"scheduler_fn={scheduler_fn!r} gave a {type(scheduler).__name__}; expected a torch LRScheduler that"
            " depends on the number of steps only, for example"
            " functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.999)."
        )
    if scheduler.optimizer is not optimizer:
        raise ArgumentError(
            "scheduler_fn is a scheduler of another optimizer than the one that steps. Pass a callable instead:"
            " scheduler_fn=lambda optimizer: SomeLR(optimizer, ...)."
        )
    return scheduler
