"""Models in parts on GPUs: what no CPU can show. One GPU runs some of it, two run all."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from swarm.harness import Peer, Swarm
from swarm.kinds import end_after, mesh, recorded
from swarm.replay import distance
from swarm.spec import ENDLESS

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


#: of which everything is tried that goes from rank 0 to others, and back
MAIN = ["ddp", "fsdp", "fsdp2", "zero 3", "zero 3, one GPU"]


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
    if name == "tensor":
        model["optimizer"] = "adamw, one by one"
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


def mixed(swarm: Swarm, name: str, steps: int, model: dict[str, Any], **code: str) -> list[Peer]:
    """Such a peer, and one of one GPU, which end after as many steps."""
    peer, trainer = made(name, steps)
    trainer |= {"gradient_clip_val": 0.5} if "scale_loss" in model else {}
    first = {**peer, "strategy_code": {"local_strategy": CELLS[name]["code"], **code}}
    first["model"] = {**first["model"], **model}
    second = {"model": {**ADAMW, **model}, "delay_s": 0.01, "strategy_code": code}
    free = {"barrier_batch": 0} if code else {}
    peers = swarm.start(2, peers=[first, second], strategy={"target_batch_size": 64}, trainer=trainer, free=free)
    swarm.finish(timeout_s=300)
    return peers


@pytest.mark.parametrize("name", MAIN)
def test_the_norm_that_is_clipped_is_that_of_all(swarm: Swarm, name: str) -> None:
    peers = mixed(swarm, name, 10, {"scale_loss": 10.0})
    assert distance(peers[0].parameters(-1), peers[1].parameters(-1)) < 1e-4


@pytest.mark.parametrize("outer", ["DiLoCo()", "StreamingDiLoCo(fragments=3)"])
@pytest.mark.parametrize("name", MAIN)
def test_all_have_the_same_after_outer_steps(swarm: Swarm, name: str, outer: str) -> None:
    peers = mixed(swarm, name, 6, {}, outer=outer)
    for step in (1, 6):
        common = [peer.parameters(f"common_{step}") for peer in peers]
        assert (common[0] == common[1]).all()
    assert distance(common[0], peers[0].parameters(0)) > 1e-3


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("joins", [True, False])
def test_who_joins_has_the_whole_state(swarm: Swarm, name: str, joins: bool) -> None:
    """Of one GPU, or in parts; with moments, buffers and the place of a scheduler."""
    model = {**ADAMW, "scheduler": "exponential", "norm": True}
    peer, _ = made(name, -1)
    trainer = {**ENDLESS, "accelerator": "gpu"}
    common: dict[str, Any] = {"trainer": trainer, "together": False, "delay_s": 0.05}
    parts = {**peer, "strategy_code": {"local_strategy": CELLS[name]["code"]}, "model": {**peer["model"], **model}}
    (first,) = swarm.start(1, **common, **({"model": model} if joins else parts))
    first.wait_epoch(5, timeout_s=120)
    (second,) = swarm.start(1, order_seed=1, **common, **(parts if joins else {"model": model}))
    end_after([first, second], 10)
    assert second.said("StateLoaded")
    both = [step for step in recorded([first, second]) if step > 5]
    assert len(both) > 5
    for step in both:
        assert first.commits[step].lr == second.commits[step].lr
        assert distance(first.parameters(step), second.parameters(step)) < 1e-4


@pytest.mark.parametrize("name", MAIN)
def test_what_it_saves_a_peer_of_one_gpu_resumes(swarm: Swarm, name: str) -> None:
    saved, model = str(swarm.folder / "half.ckpt"), {**ADAMW, "scheduler": "exponential"}
    peer, trainer = made(name, 4)
    (half,) = swarm.start(
        1,
        together=False,
        trainer=trainer,
        strategy={"target_batch_size": 16},
        strategy_code={"local_strategy": CELLS[name]["code"]},
        free={"save_to": saved},
        **{**peer, "model": {**peer["model"], **model}},
    )
    swarm.finish(half, timeout_s=300)
    (rest,) = swarm.start(
        1,
        together=False,
        trainer={**trainer, "max_steps": 8},
        strategy={"target_batch_size": 16},
        ckpt_path=saved,
        model=model,
    )
    swarm.finish(rest, timeout_s=300)
    assert sorted(rest.commits) == [4, 5, 6, 7, 8]
    assert distance(rest.parameters(4), half.parameters(4)) < 1e-6
    assert distance(rest.parameters(8), rest.parameters(4)) > 1e-3


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPUs", "offload"])
def test_a_hook_before_a_step_sees_gradients_where_all_ranks_have_them(swarm: Swarm, offload: bool) -> None:
    """``self.log(..., sync_dist=True)`` of their norm, by NCCL."""
    peer, trainer = made("ddp", 6)
    (one,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16, "offload_optimizer": offload},
        strategy_code={"local_strategy": CELLS["ddp"]["code"]},
        trainer=trainer,
        **{**peer, "model": {**peer["model"], "log_gradient_norm": True}},
    )
    swarm.finish(timeout_s=120)
    norms = [of.said("finished")[0]["metrics"]["gradient_norm"] for of in (one, one.of_rank(1))]
    assert norms[0] == norms[1] > 0
