"""A peer that only helps has no parameters of the swarm: its script may neither judge the run by them nor keep them."""

from __future__ import annotations

import logging
from typing import Any

from lightning_hivemind.lightning_twins import lightning_module

log = logging.getLogger("lightning_hivemind")


class Bystander:
    """Leaves a Trainer's validation, early stopping and checkpoints away until it is ended.

    Args:
        package: whose Trainer it is.
    """

    def __init__(self, trainer: Any, package: str) -> None:
        callbacks = lightning_module(package, "callbacks")
        judges = callbacks.EarlyStopping, callbacks.Checkpoint
        self._trainer, self._limit = trainer, trainer.limit_val_batches
        self._taken = [one for one in trainer.callbacks if isinstance(one, judges)]
        trainer.limit_val_batches = 0
        trainer.callbacks[:] = [one for one in trainer.callbacks if one not in self._taken]
        names = ", ".join(sorted({type(one).__name__ for one in self._taken}))
        log.info("this peer only helps: it does not validate%s", names and f", and leaves {names} to those that train")

    def end(self) -> None:
        """Give the Trainer back what it had; safe to call twice."""
        self._trainer.limit_val_batches = self._limit
        self._trainer.callbacks += self._taken
        self._taken = []
