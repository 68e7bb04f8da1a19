"""The user's optimizer, re-created where the engine must own it, and what Lightning sees in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer.whole import OptimizerView

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


class HostedOptimizer(OptimizerView):
    """What Lightning gets for an optimizer that the engine keeps in host memory: its groups, over the model's own.

    ``state`` is that of the optimizer that really steps; ``zero_grad`` clears the *model's* gradients, never the
    averaged ones that the host optimizer steps on.
    """

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._seen.state

    def state_dict(self) -> dict[str, Any]:
        return self._seen.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("this optimizer steps when the swarm has target_batch_size samples; do not call step()")
