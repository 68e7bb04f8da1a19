"""How much memory each way to hold a model takes: of a device, and of the host.

By what is kept: parameters, a gradient, the optimizer's state and, of one batch, what a backward pass needs. What
libraries take besides is not in it; :data:`ROOM` of a device is left for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hivemind.advice.model import ModelFacts

#: of a device's memory, for what is used
ROOM = 0.9
#: bytes of a gradient, and of what averaging needs in host memory for each trained value: the sum of gradients (which a
#: GPU has beside them), what a round has of it, and its average
_GRADIENT, _AVERAGING = 4, 12
#: of a model in parts, at rank 0 besides: whole parameters, and as much in chunks that arrive
_WHOLE = 8
#: of the sum of gradients, where the gradients are
_SUM = 4


@dataclass(frozen=True, kw_only=True)
class Way:
    """To hold a model.

    Attributes:
        name: what is between quotation marks in ``local_strategy``, and more arguments.
        written: what to write for ``local_strategy``, if not the name.
        devices: how many it is spread over.
        device_bytes, host_bytes: of each device; of the host of rank 0.
        says: what is special about it.
    """

    name: str
    devices: int
    device_bytes: float
    host_bytes: float
    says: str
    written: str = ""

    def fits(self, memory: float, host_memory: float, *, is_cpu: bool) -> bool:
        """On such devices; on a CPU all ranks have one memory."""
        if is_cpu:
            return self.devices * self.device_bytes + self.host_bytes <= ROOM * host_memory
        return self.device_bytes <= ROOM * memory and self.host_bytes <= ROOM * host_memory


def ways(model: ModelFacts, devices: int, batch_samples: int) -> list[Way]:
    """From the simplest to the one that needs least of a device."""
    gradient, state, sums = _GRADIENT * model.trained, model.state_bytes * model.trained, _SUM * model.trained
    activations = (model.activation_bytes or 0.0) * batch_samples
    averaging = _AVERAGING * model.trained
    # whole on the device while it computes, and its gradient: the largest layer; with FSDP, what it gathers at once
    each = 2 * model.bytes / max(1, model.parameters)
    layer, unit = each * model.largest, each * model.at_once
    in_parts = averaging + _WHOLE * model.trained
    # of which each device has a part: sums, and the averaged gradient beside its own
    parts = gradient + state + sums + gradient
    whole = model.bytes + gradient + sums + state + activations
    found = [
        Way(name="auto", devices=1, device_bytes=whole, host_bytes=averaging, says="one device"),
        Way(
            name="auto with offload_optimizer=True",
            devices=1,
            device_bytes=model.bytes + gradient + sums + activations,
            host_bytes=averaging + 4 * model.trained + state,
            says="one device; the optimizer steps in host memory",
        ),
    ]
    if devices > 1:
        found += [
            Way(
                name="auto",
                devices=devices,
                device_bytes=whole + gradient,  # its buckets
                host_bytes=averaging,
                says="DDP: each device has all of it",
            ),
            Way(
                name="deepspeed_stage_2",
                devices=devices,
                device_bytes=model.bytes + (parts + 4 * model.trained) / devices + activations,
                host_bytes=in_parts,
                says="each device has all parameters, and a part of gradients and state",
            ),
            Way(
                name="fsdp",
                devices=devices,
                device_bytes=(model.bytes + parts) / devices + unit + activations,
                host_bytes=in_parts,
                says="each device has a part of everything"
                + (f", and one {model.block} whole at a time" if model.block else ", and all of it while it computes"),
                written=f"FSDPStrategy(auto_wrap_policy={{{model.block}}})" if model.block else "",
            ),
        ]  # fmt: skip
    found.append(
        Way(
            name="deepspeed_stage_3_offload",
            devices=devices,
            device_bytes=layer + activations,
            host_bytes=in_parts + model.bytes + parts,
            says="parameters, gradients and state in host memory; slower",
        )
    )
    return found
