"""Before any other callback or hook may put something else into the model (averaged weights), the engine is told."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lightning_hivemind.lightning_twins import lightning_module
from lightning_hivemind.peer.ranks import Ranks

log = logging.getLogger("lightning_hivemind")


class FirstToKnow:
    """First among a Trainer's callbacks until it is removed; Lightning calls the strategy's hooks after all of them.

    Args:
        strategy: of that Trainer.
        tell: called before each validation; and with ``last=True`` when training has ended.
        ranks: hear what ends the fit before callbacks save a checkpoint for which they wait; and that of a model in
            parts is saved only if all of them come.
    """

    def __init__(self, trainer: Any, strategy: Any, tell: Callable[..., None], ranks: Ranks) -> None:
        def told(self: Any, trainer: Any, module: Any) -> None:
            tell()

        def ended(self: Any, trainer: Any, module: Any) -> None:
            tell(last=True)

        def failed(self: Any, trainer: Any, module: Any, error: BaseException) -> None:
            ranks.fail(error)
            if strategy.in_parts:
                trainer.save_checkpoint = functools.partial(_saved_together, ranks, trainer.save_checkpoint)

        base = lightning_module(strategy.package, "callbacks").Callback
        self._trainer = trainer
        hooks = {"on_validation_start": told, "on_train_end": ended, "on_exception": failed}
        self._callback = type("SwarmFirstToKnow", (base,), hooks)()
        trainer.callbacks.insert(0, self._callback)

    def remove(self) -> None:
        """Safe to call twice."""
        self._trainer.__dict__.pop("save_checkpoint", None)
        self._trainer.callbacks[:] = [one for one in self._trainer.callbacks if one is not self._callback]


def _saved_together(ranks: Ranks, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of a Trainer's ``save_checkpoint``, for callbacks that save what a failure leaves."""
    if ranks.meet():
        save(filepath, *args, **kwargs)
    else:
        log.warning("%s is not written: this rank has a part of the model, and others do not come to save", filepath)


def hooks_before_steps(trainer: Any, package: str) -> bool:
    """Whether anything of the user's runs just before a step, of the optimizer or of clipping."""
    is_overridden = lightning_module(package, "utilities.model_helpers").is_overridden
    base, module = lightning_module(package, "callbacks").Callback, trainer.lightning_module
    return any(
        is_overridden(name, module) for name in ("on_before_optimizer_step", "configure_gradient_clipping")
    ) or any(is_overridden("on_before_optimizer_step", callback, base) for callback in trainer.callbacks)
