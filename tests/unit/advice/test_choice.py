"""What is advised: the simplest that fits, and the best averaging that the line bears."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hivemind.advice.choice import Situation, advise
from lightning_hivemind.advice.machine import Machine
from lightning_hivemind.advice.memory import ways
from lightning_hivemind.advice.model import ModelFacts

GB = 10**9
#: a billion values with Adam, ten layers
MODEL: dict[str, Any] = {"parameters": GB, "trained": GB, "bytes": 4 * GB, "largest": GB // 10}
MODEL |= {"block": "Block", "at_once": GB // 20}
#: 4 values of 4 bytes each: parameter, gradient, two moments
WHOLE_GB = 20


def situation(
    memory_gb: float, devices: int = 1, line: float = 1e5, host_gb: float = 200, kind: str = "GPU", **model: Any
) -> Situation:
    machine = Machine(kind=kind, devices=devices, memory=int(memory_gb * GB), host_memory=int(host_gb * GB), flops=1e14)
    facts = ModelFacts(**{**MODEL, **model})
    return Situation(model=facts, machine=machine, up_mbit_s=line, peers=4, batch_samples=8, target_batch_size=1024)


@pytest.mark.parametrize(
    ("memory_gb", "devices", "name", "spread"),
    [
        (24, 1, "auto", 1),
        (30, 2, "auto", 2),
        (17, 1, "auto with offload_optimizer=True", 1),
        (15, 1, "auto with offload_optimizer=True", 1),
        (8, 1, "deepspeed_stage_3_offload", 1),
        (8, 2, "deepspeed_stage_3_offload", 2),
        (8, 8, "deepspeed_stage_2", 8),
        (4, 8, "fsdp", 8),
    ],
)
def test_it_is_the_simplest_that_fits(memory_gb: float, devices: int, name: str, spread: int) -> None:
    found = advise(situation(memory_gb, devices)).way
    assert found is not None
    assert (found.name, found.devices) == (name, spread)


def test_what_fits_in_no_way_is_said() -> None:
    found = advise(situation(0.1, host_gb=10))
    assert found.way is None
    assert "fits in no way" in found.reasons[0]


def test_ranks_on_cpus_share_one_memory() -> None:
    found = advise(situation(40, 2, host_gb=40, kind="CPU")).way
    assert found is not None
    assert (found.name, found.devices) == ("auto", 1), "two times 20 GB do not fit"


def test_memory_is_what_is_kept() -> None:
    one, offload, ddp, zero_2, fsdp, last = ways(ModelFacts(**MODEL, activation_bytes=10**6), 4, 100)
    assert one.device_bytes == WHOLE_GB * GB + 10**8
    assert offload.device_bytes == 12 * GB + 10**8
    assert ddp.device_bytes == one.device_bytes + 4 * GB
    assert zero_2.device_bytes == 4 * GB + (4 + 4 + 8 + 4 + 4) * GB / 4 + 10**8
    assert fsdp.device_bytes == (WHOLE_GB + 4) * GB / 4 + 8 * GB / 20 + 10**8
    assert fsdp.written == "FSDPStrategy(auto_wrap_policy={Block})"
    assert last.device_bytes == 8 * GB / 10 + 10**8
    assert one.host_bytes == 12 * GB
    assert fsdp.host_bytes == 20 * GB


#: Mbit/s; a step of 1024 samples of 4e11 operations at 4 peers takes 2.56 s, and 0.51 s of sending are borne
@pytest.mark.parametrize(
    ("line", "codec", "written"),
    [
        (100_000, "none", ""),
        (60_000, "fp16", "grad_compression=Float16Compression()"),
        (30_000, "int8", "grad_compression=Uniform8BitQuantization()"),
        (10_000, "int8", "delay_grad_averaging=True"),
        (2_000, "int4", "outer=DiLoCo()"),
    ],
)
def test_it_is_the_best_averaging_that_the_line_bears(line: float, codec: str, written: str) -> None:
    found = advise(situation(24, line=line, flops=4e11))
    assert found.computing_s == pytest.approx(2.56) or found.inner_steps
    assert found.codec == codec
    assert written in found.arguments or not written


def test_without_blocks_fsdp_has_all_of_the_model_at_once() -> None:
    fsdp = ways(ModelFacts(**{**MODEL, "block": "", "at_once": GB}), 4, 100)[4]
    assert (fsdp.name, fsdp.written) == ("fsdp", "")
    assert fsdp.device_bytes == (WHOLE_GB + 4) * GB / 4 + 8 * GB


def test_late_steps_take_host_memory_and_are_advised_where_there_is_enough() -> None:
    found = advise(situation(24, line=10_000, flops=4e11))
    assert "delay_optimizer_step=True" in found.arguments
    assert any("takes 24.00 GB there" in reason and "scheduler_fn" in reason for reason in found.reasons)
    assert "outer=DiLoCo()" in advise(situation(24, line=10_000, flops=4e11, host_gb=26)).arguments


def test_diloco_makes_as_many_steps_as_make_sending_a_fifth_and_no_more_than_are_of_use() -> None:
    """One inner step takes 80 ms; a round in int4 sends 0.84 GB."""
    found = advise(situation(24, line=2_000, flops=4e11))
    assert found.sending_s == pytest.approx(3.375)
    assert found.inner_steps == 211
    assert f"target_batch_size={211 * 4 * 8}" in found.arguments
    assert found.sending_s == pytest.approx(0.2 * (found.computing_s or 0), rel=0.01)
    assert advise(situation(24, line=1, flops=4e11)).inner_steps == 500


def test_where_operations_are_not_known_a_round_of_two_seconds_is_borne() -> None:
    assert advise(situation(24, line=13_000)).codec == "fp16"
    assert advise(situation(24, line=1_000)).inner_steps == 10


def test_what_does_not_go_together_is_not_advised() -> None:
    """Inner steps are made where the parameters are; DeepSpeed's steps cannot be delayed."""
    offload = advise(situation(12, line=100, flops=4e11))
    assert offload.inner_steps
    assert offload.way is not None
    assert offload.way.name == "deepspeed_stage_3_offload"
    assert any("DeepSpeedCPUAdam" in reason for reason in offload.reasons)
    deepspeed = advise(situation(8, 8, line=40_000, flops=4e12))
    assert not any("delay" in one for one in deepspeed.arguments)


def test_inner_steps_are_those_of_the_devices_that_are_advised() -> None:
    """The simplest that fits is one device with offload, which inner steps cannot use: so it is both devices."""
    found = advise(situation(18, 2, line=100, flops=4e11))
    assert found.way is not None
    assert (found.way.name, found.way.devices) == ("deepspeed_stage_2", 2)
    assert f"target_batch_size={found.inner_steps * 4 * 2 * 8}" in found.arguments
    assert any("Trainer(devices=2)" in reason for reason in found.reasons)
