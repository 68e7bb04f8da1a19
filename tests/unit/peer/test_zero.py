"""DeepSpeed inside of a peer: what is refused, and how averaged gradients are laid out for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer import zero_adam
from lightning_hivemind.peer.zero import ZeroRedundancy
from lightning_hivemind.peer.zero_shards import ZeroOptimizer
from lightning_hivemind.peer.zero_stages import Place, Stage1And2


class DeepSpeedZeroOptimizer:
    """As deepspeed's, by its name."""


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """As deepspeed's: its settings."""

    adam_w_mode = True

    def __init__(self, parameters: Any, *, bias_correction: bool = True) -> None:
        made = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
        super().__init__(parameters, {**made, "bias_correction": bias_correction})


def like_stage(optimizer: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(zero=SimpleNamespace(optimizer=optimizer))


class Base:
    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        return SimpleNamespace(fp16_enabled=lambda: True), DeepSpeedZeroOptimizer()


class Peer(ZeroRedundancy, Base):
    config: ClassVar[dict[str, Any]] = {}


def test_float16_is_refused_whoever_asked_for_it() -> None:
    with pytest.raises(ArgumentError, match="DeepSpeed in float16"):
        Peer()._setup_model_and_optimizer(torch.nn.Linear(2, 2), None)


def test_deepspeeds_adam_is_torchs_to_a_swarm() -> None:
    """Settings and state: what the one has written the other one loads."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = ZeroOptimizer(SimpleNamespace(), like_stage(DeepSpeedCPUAdam([parameter])), [[parameter]])
    (group,) = optimizer.param_groups
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    local = {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
    assert set(group) - local == set(plain.param_groups[0]) - local
    group["lr"] = 0.5
    group["maximize"] = False
    assert optimizer.inner.param_groups[0]["lr"] == 0.5
    assert "maximize" not in optimizer.inner.param_groups[0]
    assert zero_adam.kind_of(optimizer.inner) == "AdamW"
    told = zero_adam.as_torchs({"step": 3, "exp_avg": torch.ones(3)})
    assert torch.equal(told["step"], torch.tensor(3.0))
    assert zero_adam.as_deepspeeds("step", told["step"]) == 3
    assert type(zero_adam.as_deepspeeds("step", told["step"])) is int


def test_of_deepspeeds_adam_what_torchs_cannot_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    inner = DeepSpeedCPUAdam([parameter], bias_correction=False)
    with pytest.raises(ArgumentError, match="bias_correction=False"):
        ZeroOptimizer(SimpleNamespace(), like_stage(inner), [[parameter]])


def test_gradients_lie_where_their_parameters_do_with_what_is_between() -> None:
    """As with parameter_alignment, and with round_robin_gradients, which changes the order."""
    flat, parameters = torch.arange(12.0), [torch.zeros(3), torch.zeros(2)]
    zero = SimpleNamespace(params_in_partition=[parameters], averaged_gradients={}, cpu_offload=False)
    places = {id(parameters[0]): Place(0, 8, 3, 0), id(parameters[1]): Place(0, 1, 2, 0)}
    Stage1And2(zero).put_gradients([flat], places)
    (parts,) = zero.averaged_gradients.values()
    assert [part.tolist() for part in parts] == [[0], [1, 2], [3, 4, 5, 6, 7], [8, 9, 10], [11]]
