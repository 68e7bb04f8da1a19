"""DeepSpeed's ZeRO inside of a peer: what its strategy does otherwise than Lightning's."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer import portable
from lightning_hivemind.peer.in_parts import InParts
from lightning_hivemind.peer.shards import Shards
from lightning_hivemind.peer.zero_shards import ZeroOptimizer, ZeroShards
from lightning_hivemind.peer.zero_stages import Stage, Stage1And2, Stage3

_STAGES: dict[str, type[Stage]] = {
    "DeepSpeedZeroOptimizer": Stage1And2,
    "DeepSpeedZeroOptimizer_Stage3": Stage3,
}


class ZeroRedundancy(InParts):
    """Between the swarm's strategy and Lightning's ``DeepSpeedStrategy``; works on CPUs, too."""

    offloads_itself, writes = True, portable.DEEPSPEED
    parallel_devices: list[torch.device] | None
    config: dict[str, Any]
    zero_stage_3: bool
    _restore_zero_state: Any

    def shards(self, optimizer: torch.optim.Optimizer) -> Shards:
        assert isinstance(optimizer, ZeroOptimizer)
        return ZeroShards(optimizer, self.lightning_module)

    def setup_environment(self) -> None:
        # torch's new names for what DeepSpeed calls, told by the hundred
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        devices = self.parallel_devices or []
        if any(one.type != "cpu" for one in devices):
            super().setup_environment()
            return
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # it would compile an all-reduce of its own, and wait for good where somebody was killed while he did
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        self.parallel_devices = [torch.device("cpu", number) for number in range(len(devices))]
        theirs: Any = next(cls for cls in type(self).__mro__ if cls.__name__ == "DeepSpeedStrategy")
        theirs.__base__.setup_environment(self)  # its own refuses what is no GPU

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # Lightning leaves it to DeepSpeed, which would clip what ranks have of the average in other last bits
        self.precision_plugin.clip_gradients = self._clip

    def _clip(self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val and optimizer.has_given:
            self._clip_by_norm(optimizer, clip_val)
            optimizer.clipped = True

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        zero = self.config.get("zero_optimization", {})
        for name in ("offload_optimizer", "offload_param"):
            settings = zero.get(name) or {}
            if float(settings.get("ratio", 1.0)) < 1.0:
                raise ArgumentError(
                    f"DeepSpeed with a ratio of {settings['ratio']} in {name}: it would step partly on the device,"
                    " which a swarm cannot follow. Leave the ratio away."
                )
            if str(settings.get("device", "")) == "nvme" and name == "offload_optimizer":
                raise ArgumentError(
                    "DeepSpeed with offload_optimizer on NVMe: where that was tried, on CPUs, deepspeed 0.19.8 trained"
                    ' wrong, without a swarm, too. Use device "cpu"; offload_param may be on NVMe.'
                )
        if str((zero.get("offload_param") or {}).get("device", "")) == "nvme":
            self._partition(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [trained] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
        engine, made = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)  # type: ignore[misc]
        stage = _STAGES.get(type(made).__name__)
        if stage is None:
            raise ArgumentError(
                f"DeepSpeed steps by {type(made).__name__} here, which is none of ZeRO's. Use ZeRO (stage 1, 2 or 3)"
                ' with Trainer(precision="32-true"). (DeepSpeedStrategy(config=...) takes the place of stage=... and'
                ' all other settings: the stage belongs into it then, as "zero_optimization": {"stage": 3}.)'
            )
        if engine.fp16_enabled():
            raise ArgumentError(
                "DeepSpeed in float16: each peer would have a loss scale of its own. Use"
                ' Trainer(precision="bf16-mixed"), or "32-true", and no fp16 in the config.'
            )
        return engine, ZeroOptimizer(engine, stage(made), groups)

    def _partition(self, model: Any) -> None:
        """As what is made in ``configure_model`` is.

        What deepspeed 0.19.8 partitions by itself it keeps on NVMe in bfloat16, wherever there is no float16 (on CPUs):
        it would train on rounded values.
        """
        zero: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
        if not all(map(zero.is_zero_param, model.parameters())):
            zero.Init(module=model, config_dict_or_path=self.config, remote_device="nvme")

    def _load_own(self, path: Any, is_directory: bool, *weights_only: Any, **more: Any) -> dict[str, Any]:
        """A file, too, which Lightning's takes for a directory, for evaluation."""
        if is_directory:
            return super()._load_own(path, is_directory, *weights_only, **more)
        checkpoint: dict[str, Any] = self._plain.load_checkpoint(self, path, *weights_only, **more)
        if self.zero_stage_3:
            self._restore_zero_state(checkpoint, strict=self.lightning_module.strict_loading)
        else:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=self.lightning_module.strict_loading)
        return checkpoint
