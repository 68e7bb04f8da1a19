"""The user's optimizer, re-created where the engine must own it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_hivemind.errors import ArgumentError

PLAIN = bool, int, float, str, type(None)
HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def rebuilder(optimizer: torch.optim.Optimizer) -> Callable[[Sequence[Mapping[str, Any]]], torch.optim.Optimizer]:
    """``callable(param_groups)`` that makes an optimizer of the same kind with the same settings.

    The groups carry all their settings; what a constructor demands besides is taken from ``optimizer.defaults``, and
    arguments that it keeps as attributes from ``optimizer``, as are the hooks of its steps.
    """
    kind, defaults = type(optimizer), dict(optimizer.defaults)

    def rebuild(groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        accepted = inspect.signature(kind.__init__).parameters
        settings = {key: value for key, value in defaults.items() if key in accepted}
        try:
            new = kind([dict(group) for group in groups], **settings)
        except TypeError as error:
            raise ArgumentError(
                f"{kind.__name__} cannot be re-created on host memory ({error}), which offload_optimizer and the"
                " delay_* arguments need. Its constructor must take (params, **settings found in its param groups);"
                " or use offload_optimizer=False without delays."
            ) from error
        for name, value in vars(optimizer).items():
            if name in accepted and isinstance(value, PLAIN):
                setattr(new, name, value)
        for hooks in HOOKS:
            if not getattr(new, hooks):  # (else its constructor has made its own)
                getattr(new, hooks).update(getattr(optimizer, hooks))
        return new

    return rebuild
