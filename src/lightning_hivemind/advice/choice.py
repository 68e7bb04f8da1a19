"""What to do: how to hold the model, how to collaborate, and in which codec; and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_hivemind.advice.machine import USUAL_SHARE, Machine
from lightning_hivemind.advice.memory import Way, ways
from lightning_hivemind.advice.model import ModelFacts
from lightning_hivemind.simulation.scenario import CODECS

#: of the time between two rounds, that sending may take while everybody waits
WAITED = 0.2
#: rounds that are this quick nobody minds, where the time between them is not known
QUICK_S = 2.0
#: inner steps of DiLoCo: measured up to there with little loss of quality; and a limit
FEW_STEPS, MOST_STEPS = 10, 500
#: what to write for each codec, from the one that keeps most
_WRITTEN = {
    "none": "",
    "fp16": "grad_compression=Float16Compression()",
    "int8": "grad_compression=Uniform8BitQuantization()",
    "int4": "state_averaging_compression=Blockwise4BitQuantization()",
}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What there is: ``up_mbit_s`` is the slowest line's, ``batch_samples`` are one device's in one batch."""

    model: ModelFacts
    machine: Machine
    up_mbit_s: float
    peers: int
    batch_samples: int
    target_batch_size: int

    def sent_bytes(self, codec: str) -> float:
        """By each peer in a round of all: of its own vector to others, and of its part of the average."""
        return 2 * (self.peers - 1) / self.peers * CODECS[codec](self.model.trained)

    def sending_s(self, codec: str) -> float:
        """Seconds for that."""
        return 8e-6 * self.sent_bytes(codec) / self.up_mbit_s

    def computing_s(self, devices: int) -> float | None:
        """Between two rounds, of peers that are as this one."""
        if self.model.flops is None:
            return None
        return self.target_batch_size / self.peers * self.model.flops / (USUAL_SHARE * devices * self.machine.flops)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``arguments``: of the strategy, as a script has them; ``codec``: a name in the simulator."""

    ways: list[Way]
    way: Way | None
    arguments: list[str]
    codec: str
    inner_steps: int
    sent_bytes: float
    sending_s: float
    computing_s: float | None
    reasons: list[str] = field(default_factory=list)


def advise(here: Situation) -> Advice:
    """For one peer of such a swarm."""
    model, machine = here.model, here.machine
    found = ways(model, machine.devices, here.batch_samples)
    fitting = [one for one in found if one.fits(machine.memory, machine.host_memory, is_cpu=machine.is_cpu)]
    # all devices, if the model can be on all of them without being in parts
    simple = [one for one in fitting if one.name == "auto"]
    way = max(simple, key=lambda one: one.devices) if simple else next(iter(fitting), None)
    how = _collaboration(here, way.devices if way is not None else machine.devices, late_bytes=_late_bytes(here, way))
    if how["inner_steps"] and way is not None and "offload_optimizer" in way.name:  # inner steps are made on the device
        way = next((one for one in fitting if "offload_optimizer" not in one.name), None)
        if way is not None:  # perhaps of other devices
            how = _outer(here, here.computing_s(way.devices), way.devices)
    arguments, reasons = [f"target_batch_size={how.pop('target')}"], []
    if way is None:
        reasons.append(
            "It fits in no way: take more or larger devices, a smaller batch, bf16 parameters, or train fewer of them."
        )
    else:
        name, _, more = way.name.partition(" with ")
        written = way.written or f'"{name}"'
        arguments += [f"local_strategy={written}"] * (name != "auto") + [more] * bool(more)
        reasons.append(f"{way.says}: the simplest that fits.")
        if way.devices > 1:
            reasons.append(f"It is one peer of all devices of this machine: Trainer(devices={way.devices}).")
        if name.endswith("offload"):
            reasons.append(
                "DeepSpeed steps in host memory by its own Adam: return deepspeed.ops.adam.DeepSpeedCPUAdam in"
                " configure_optimizers (on first use it compiles for minutes)."
            )
    arguments += how.pop("arguments")
    reasons += how.pop("reasons")
    return Advice(ways=found, way=way, arguments=arguments, reasons=reasons, **how)


def _late_bytes(here: Situation, way: Way | None) -> float | None:
    """Of host memory, with steps that are late, which are made there; None: it is too much, or DeepSpeed steps."""
    if way is None or way.name.startswith("deepspeed"):
        return None
    more = 0.0 if "offload_optimizer" in way.name else (4 + here.model.state_bytes) * here.model.trained
    late, machine = replace(way, host_bytes=way.host_bytes + more), here.machine
    return late.host_bytes if late.fits(machine.memory, machine.host_memory, is_cpu=machine.is_cpu) else None


def _collaboration(here: Situation, devices: int, *, late_bytes: float | None) -> dict[str, Any]:
    """Gradients in the best codec for which the line is quick enough; else overlapped; else DiLoCo."""
    computing_s = here.computing_s(devices)
    limit_s = QUICK_S if computing_s is None else max(WAITED * computing_s, 0.1)
    known = "" if computing_s is None else f", for {_s(computing_s)} of computing"
    for codec in ("none", "fp16", "int8"):
        if (sending_s := here.sending_s(codec)) <= limit_s:
            return _way_of(here, codec, computing_s, [_WRITTEN[codec]], [
                f"Gradients are averaged, as in one large batch: a round sends for {_s(sending_s)}{known}."
            ])  # fmt: skip
    sending_s = here.sending_s("int8")
    if computing_s is not None and sending_s <= computing_s and late_bytes is not None:
        delays = ["delay_state_averaging=True", "delay_grad_averaging=True", "delay_optimizer_step=True"]
        return _way_of(here, "int8", computing_s, [_WRITTEN["int8"], *delays], [
            "Gradients are averaged while the next ones are computed, one step late: a round sends for"
            f" {_s(sending_s)}{known}.",
            f"Such steps are made in host memory, which takes {late_bytes / 1e9:.2f} GB there. A scheduler goes into"
            " scheduler_fn=, not into configure_optimizers.",
        ])  # fmt: skip
    return _outer(here, computing_s, devices)


def _outer(here: Situation, computing_s: float | None, devices: int) -> dict[str, Any]:
    sending_s = here.sending_s("int4")
    steps, reasons = FEW_STEPS, []
    if computing_s is not None:
        # one inner step is a batch of each peer; as many as make sending a small part
        inner_s = computing_s * here.peers * devices * here.batch_samples / here.target_batch_size
        steps = min(MOST_STEPS, max(FEW_STEPS, math.ceil(sending_s / (WAITED * max(inner_s, 1e-9)))))
        computing_s = steps * inner_s
    reasons.append(
        f"The line is too slow for gradients of every step, so peers step by themselves and average how far that led"
        f" (DiLoCo): {steps} steps each between two rounds, which send for {_s(sending_s)}."
    )
    if steps > FEW_STEPS:
        reasons.append(
            f"So many steps cost quality when a model is trained from scratch; after a warm start, or with"
            f" {FEW_STEPS} of them, little."
        )
    target = steps * here.peers * devices * here.batch_samples
    arguments = ["outer=DiLoCo()", _WRITTEN["int4"]]
    return _way_of(here, "int4", computing_s, arguments, reasons, inner_steps=steps, target=target)


def _way_of(
    here: Situation, codec: str, computing_s: float | None, arguments: list[str], reasons: list[str], *,
    inner_steps: int = 0, target: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "codec": codec,
        "target": target or here.target_batch_size,
        "arguments": [one for one in arguments if one],
        "inner_steps": inner_steps,
        "sent_bytes": here.sent_bytes(codec),
        "sending_s": here.sending_s(codec),
        "computing_s": computing_s,
        "reasons": reasons,
    }


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
