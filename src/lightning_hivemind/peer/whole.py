"""An optimizer over other parameters: whole ones for the engine, where ranks have theirs in parts; the model's own for
Lightning, where the engine has others in host memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


class GroupView(dict[str, Any]):
    """One group of an optimizer: reads as it, over other parameters, and writes through.

    ``hidden`` settings are left out, and those of ``besides`` are only here.
    """

    def __init__(
        self,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        hidden: Collection[str] = (),
        besides: Mapping[str, Any] | None = None,
    ) -> None:
        self._besides = {name: value for name, value in (besides or {}).items() if name not in group}
        shown = {name: value for name, value in group.items() if name not in hidden}
        super().__init__({**shown, **self._besides, "params": list(parameters)})
        self._group = group

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "params" and key not in self._besides:
            self._group[key] = value

    update = MutableMapping.update  # these write one by one, as above
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> GroupView:  # type: ignore[misc,override]
        self.update(other)
        return self


class OptimizerView(torch.optim.Optimizer):
    """Another optimizer's groups, seen over other ``parameters``, in the same order; settings written here reach it."""

    def __init__(self, seen: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        # no super().__init__: this is a view of ``seen``, and owns no parameters
        self._seen, self._parameters = seen, list(parameters)
        self.defaults = seen.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        groups: list[dict[str, Any]] = []
        start = 0
        for group in self._seen.param_groups:
            end = start + len(group["params"])
            groups.append(GroupView(group, self._parameters[start:end]))
            start = end
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError("parameters cannot be added to a running swarm: all peers must train the same ones")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._seen!r})"


class HostedOptimizer(OptimizerView):
    """What Lightning, and hooks, get for one that the engine keeps in host memory: its groups, over the model's own.

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


class WholeOptimizer(OptimizerView):
    """Steps with the ranks' own optimizer, whose state it has as it was last gathered (see :meth:`.PeerModel.refresh`).

    What is loaded the ranks' optimizer has once it is handed out.
    """

    def __init__(self, seen: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        super().__init__(seen, parameters)
        self.state: Any = defaultdict(dict)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return self._seen.step()

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        groups, start = [], 0
        for group in self.param_groups:
            end = start + len(group["params"])
            groups.append({**group, "params": list(range(start, end))})
            start = end
        state = {n: self.state[p] for n, p in enumerate(self._parameters) if self.state.get(p)}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; one that is empty changes nothing.

        Raises:
            ValueError: it is of other parameters.
        """
        if not state_dict:
            return
        groups, theirs = self.param_groups, state_dict["param_groups"]
        if [len(one["params"]) for one in groups] != [len(one["params"]) for one in theirs]:
            raise ValueError("loaded state dict has other parameter groups than this optimizer")
        numbers = [number for group in theirs for number in group["params"]]
        self.state = defaultdict(dict)
        for parameter, number in zip(self._parameters, numbers, strict=True):
            if entry := state_dict["state"].get(number):
                self.state[parameter] = dict(entry)
        for group, given in zip(groups, theirs, strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
