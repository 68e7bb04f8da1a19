"""DeepSpeed's own Adams (in host memory, or fused), whose steps are those of torch's: to a swarm they are these.

So a peer that steps with the one, and a peer that steps with the other, train one model, and each resumes what the
other has saved. In the last bits they differ: see :attr:`.PeerTraining.steps_by`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.errors import ArgumentError

#: of their settings, what torch's have not; and what these have besides
HIDDEN = frozenset({"bias_correction", "step"})
BESIDES = {"amsgrad": False, "maximize": False}
_NAMES = {"DeepSpeedCPUAdam", "FusedAdam"}


def is_deepspeeds_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of them.

    Raises:
        ArgumentError: it is, with a setting that torch's have not.
    """
    if type(optimizer).__name__ not in _NAMES:
        return False
    if any(not group.get("bias_correction", True) for group in optimizer.param_groups):
        raise ArgumentError(
            f"{type(optimizer).__name__}(bias_correction=False): no optimizer of torch's makes such steps, so peers of"
            " other kinds could not. Leave it away."
        )
    return True


def kind_of(optimizer: Any) -> str:
    """The name of torch's class."""
    return "AdamW" if optimizer.adam_w_mode else "Adam"


def as_torchs(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state: torch counts steps in a tensor."""
    return {name: _count(one) if name == "step" else one for name, one in entry.items()}


def as_deepspeeds(name: str, value: Any) -> Any:
    """The way back, of one value."""
    return int(value) if name == "step" else value


def _count(value: Any) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")
