"""``reuse_grad_buffers``: gradients stay in ``param.grad`` between batches, so nothing may clear them."""

from __future__ import annotations

import warnings
from typing import Any


class DisabledZeroGrad:
    """Takes the module's ``optimizer_zero_grad`` and ``zero_grad`` out of service, and puts them back."""

    NAMES = ("optimizer_zero_grad", "zero_grad")

    def __init__(self, module: Any) -> None:
        self._module = module
        self._kept: dict[str, Any] = {}

    def disable(self) -> None:
        overridden = [name for name in self.NAMES if _is_users_own(self._module, name)]
        if overridden:
            warnings.warn(
                f"reuse_grad_buffers=True: {type(self._module).__name__}.{overridden[0]} is not called while training,"
                " because gradients accumulate in param.grad. Move what else it does to another hook.",
                stacklevel=2,
            )
        self._kept = {name: self._module.__dict__[name] for name in self.NAMES if name in self._module.__dict__}
        for name in self.NAMES:
            object.__setattr__(self._module, name, _do_nothing)

    def restore(self) -> None:
        for name in self.NAMES:
            if self._module.__dict__.get(name) is _do_nothing:
                object.__delattr__(self._module, name)
        for name, method in self._kept.items():
            object.__setattr__(self._module, name, method)
        self._kept = {}


def _is_users_own(module: Any, name: str) -> bool:
    method = module.__dict__.get(name) or getattr(type(module), name)
    home = getattr(method, "__module__", "") or ""
    return not home.startswith(("lightning.", "pytorch_lightning.", "torch."))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None
