"""The user's optimizer, re-created where the engine must own it, and what Lightning sees in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
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


class _GroupView(dict[str, Any]):
    """One group of a host optimizer: reads as it, over other parameters, and writes through."""

    def __init__(self, hosted: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        super().__init__({**hosted, "params": parameters})
        self._hosted = hosted

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "params":
            self._hosted[key] = value

    update = MutableMapping.update  # these write one by one, as above
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> _GroupView:  # type: ignore[misc,override]
        self.update(other)
        return self


class HostedOptimizer(torch.optim.Optimizer):
    """What Lightning gets for an optimizer that the engine keeps in host memory.

    Settings (``param_groups``: learning rates and so on) and ``state`` are those of the optimizer that really steps;
    ``zero_grad`` clears the *model's* gradients, never the averaged ones that the host optimizer steps on.
    """

    def __init__(self, hosted: torch.optim.Optimizer, model_parameters: Sequence[torch.Tensor]) -> None:
        # no super().__init__: this is a view of ``hosted``, and owns no parameters
        self.hosted, self._model_parameters = hosted, list(model_parameters)
        self.defaults = hosted.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The host optimizer's groups, seen over the model's own parameters; settings written here reach the host."""
        groups: list[dict[str, Any]] = []
        start = 0
        for group in self.hosted.param_groups:
            end = start + len(group["params"])
            groups.append(_GroupView(group, self._model_parameters[start:end]))
            start = end
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.hosted.state

    def state_dict(self) -> dict[str, Any]:
        return self.hosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.hosted.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._model_parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("this optimizer steps when the swarm has target_batch_size samples; do not call step()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError("parameters cannot be added to a running swarm: all peers must train the same ones")

    def __repr__(self) -> str:
        return f"HostedOptimizer({self.hosted!r})"
