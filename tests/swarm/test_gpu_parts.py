"""Models in parts on GPUs: what no CPU can show. One GPU runs some of it, two run all."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from swarm.harness import Swarm
from swarm.kinds import mesh
from swarm.replay import distance

pytestmark = [pytest.mark.swarm, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ADAMW = {"optimizer": "adamw", "lr": 0.01}
WRAP = "auto_wrap_policy={torch.nn.Linear}"


@pytest.fixture
def engine() -> str:
    return "native"


def cell(code: str, gpus: int = 2, parts: str = "", precision: str = "32-true") -> dict[str, Any]:
    return {"code": code, "gpus": gpus, "parts": parts, "precision": precision}


#: what is so on CPUs, on two GPUs by NCCL; and what needs a GPU at all
CELLS = {
    "ddp": cell("'ddp'"),
    "fsdp": cell(f"pl.strategies.FSDPStrategy({WRAP})"),
    "fsdp bf16": cell(f"pl.strategies.FSDPStrategy({WRAP})", precision="bf16-mixed"),
    "fsdp offload": cell(f"pl.strategies.FSDPStrategy({WRAP}, cpu_offload=True)"),
    "fsdp offload, one GPU": cell(f"pl.strategies.FSDPStrategy({WRAP}, cpu_offload=True)", gpus=1),
    "fsdp2": cell(mesh(2, 1), parts="fsdp2"),
    "fsdp2, one GPU": cell(mesh(1, 1), gpus=1, parts="fsdp2"),
    "fsdp2 bf16": cell(mesh(2, 1), parts="fsdp2", precision="bf16-mixed"),
    "tensor": cell(mesh(1, 2), parts="tensor"),
    "zero 1": cell("'deepspeed_stage_1'"),
    "zero 2": cell("'deepspeed_stage_2'"),
    "zero 3": cell("'deepspeed_stage_3'"),
    "zero 3, one GPU": cell("'deepspeed_stage_3'", gpus=1),
    "zero 3 bf16": cell("'deepspeed_stage_3'", precision="bf16-mixed"),
    "zero 2 offload": cell("'deepspeed_stage_2_offload'"),  # with DeepSpeed's own Adam, which it compiles
    "zero 3 offload": cell("'deepspeed_stage_3_offload'"),
    "zero 3 offload, one GPU": cell("'deepspeed_stage_3_offload'", gpus=1),
}


def made(name: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What makes such a peer; and its Trainer."""
    one = CELLS[name]
    if torch.cuda.device_count() < one["gpus"]:
        pytest.skip(f"needs {one['gpus']} GPUs, and here are {torch.cuda.device_count()}")
    if "zero" in name and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    model = {**ADAMW, **({"parts": one["parts"]} if one["parts"] else {})}
    if "zero" in name and "offload" in name:
        model["optimizer"] = "deepspeed adam"
    trainer = {"accelerator": "gpu", "precision": one["precision"], "max_steps": steps}
    return {"ranks": one["gpus"], "model": model, "env": {"PL_GLOBAL_SEED": "7"}}, trainer


@pytest.mark.parametrize("name", CELLS)
def test_alone_in_a_swarm_it_is_lightnings_own_strategy(swarm: Swarm, name: str) -> None:
    peer, trainer = made(name, 20)
    data = 1 if "tensor" in name else CELLS[name]["gpus"]
    code = {"local_strategy": CELLS[name]["code"]}
    common = {**peer, "trainer": trainer}
    (ours,) = swarm.start(1, together=False, strategy={"target_batch_size": 8 * data}, strategy_code=code, **common)
    plain = swarm.plain(trainer_code={"strategy": CELLS[name]["code"]}, **common)
    swarm.finish(timeout_s=300)
    assert distance(ours.parameters(-1), plain.parameters(-1)) < 1e-5
    assert distance(ours.parameters(-1), ours.parameters(0)) > 1e-2


@pytest.mark.parametrize("name", CELLS)
def test_with_a_peer_of_one_gpu_it_makes_the_same_steps(swarm: Swarm, name: str) -> None:
    peer, trainer = made(name, 20)
    first = {**peer, "strategy_code": {"local_strategy": CELLS[name]["code"]}}
    second = {"model": ADAMW, "delay_s": 0.01}
    peers = swarm.start(2, peers=[first, second], trainer=trainer)
    swarm.finish(timeout_s=300)
    within = 1e-2 if "bf16" in name else 1e-4
    assert distance(peers[0].parameters(-1), peers[1].parameters(-1)) < within
    assert not peers[0].said("ParametersDiffered")
