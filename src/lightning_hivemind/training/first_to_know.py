"""Before any other callback or hook may put something else into the model (averaged weights), the engine is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hivemind.lightning_twins import lightning_module


class FirstToKnow:
    """First among a Trainer's callbacks until it is removed; Lightning calls the strategy's hooks after all of them.

    Args:
        package: whose Trainer it is.
        tell: called before each validation, and when training has ended.
    """

    def __init__(self, trainer: Any, package: str, tell: Callable[[], None]) -> None:
        def told(self: Any, trainer: Any, module: Any) -> None:
            tell()

        base = lightning_module(package, "callbacks").Callback
        self._trainer = trainer
        self._callback = type("SwarmFirstToKnow", (base,), {"on_validation_start": told, "on_train_end": told})()
        trainer.callbacks.insert(0, self._callback)

    def remove(self) -> None:
        """Safe to call twice."""
        self._trainer.callbacks[:] = [one for one in self._trainer.callbacks if one is not self._callback]
