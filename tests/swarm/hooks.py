"""Communication hooks of DDP, as a user gives them; and Lightning's own strategy with them on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap


class OnCpus(DDPStrategy):
    """Lightning registers hooks on GPUs only."""

    def _register_ddp_hooks(self) -> None:
        hook: Any = self._ddp_comm_hook
        self.model.register_comm_hook(  # type: ignore[union-attr,operator]
            self._ddp_comm_state, hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(hook)
        )


class FsdpOnCpus(FSDPStrategy):
    """Lightning's own, where Lightning and torch want a GPU: what a peer of it is compared with."""

    def _setup_model(self, model: Any) -> Any:
        if not any(isinstance(one, FullyShardedDataParallel) for one in model.modules()):
            kwargs, self.kwargs = self.kwargs, {}
            model = FullyShardedDataParallel(
                model,
                sharding_strategy=self.sharding_strategy,
                mixed_precision=self.mixed_precision_config,
                device_id=torch.device("cpu"),
                **kwargs,
            )
        return super()._setup_model(model)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=torch.device("cpu"), **self.kwargs):
            yield


class ZeroOnCpus(DeepSpeedStrategy):
    """Lightning's own, which is for GPUs only."""

    def setup_environment(self) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False  # which compiles
        self.parallel_devices = [torch.device("cpu", number) for number in range(len(self.parallel_devices or []))]
        DDPStrategy.setup_environment(self)


def hooked(strategy: Any, name: str) -> Any:
    """A strategy of that class with the hook ``name``."""
    if name == "fp16":
        return strategy(ddp_comm_hook=default_hooks.fp16_compress_hook)
    if name == "post_local_sgd":
        state = post_localSGD_hook.PostLocalSGDState(None, None, 4, post_local_gradient_allreduce=False)
        return strategy(
            ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, model_averaging_period=4
        )
    rank = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=3, min_compression_rate=1)
    wrapper = default_hooks.fp16_compress_wrapper if name == "fp16_power_sgd" else None
    return strategy(ddp_comm_state=rank, ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_wrapper=wrapper)
