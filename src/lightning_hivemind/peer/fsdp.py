"""FSDP (of version 1) inside of a peer: what its strategy does otherwise than Lightning's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap

from lightning_hivemind.peer.flat_shards import FlatShards
from lightning_hivemind.peer.in_parts import InParts
from lightning_hivemind.peer.shards import Shards


class FullySharded(InParts):
    """Between the swarm's strategy and Lightning's ``FSDPStrategy``; works on CPUs, too."""

    cpu_offload: Any
    sharding_strategy: Any
    kwargs: dict[str, Any]
    root_device: torch.device
    model: Any

    def shards(self, optimizer: torch.optim.Optimizer) -> Shards:
        return FlatShards(optimizer, self.lightning_module, self.model)

    def setup_environment(self) -> None:
        mesh = self.kwargs.get("device_mesh")
        if not isinstance(mesh, tuple) or not self._on_cpus:
            super().setup_environment()
            return
        del self.kwargs["device_mesh"]  # of which it would make one of GPUs
        super().setup_environment()
        self.kwargs["device_mesh"] = init_device_mesh("cpu", mesh)

    @property
    def mixed_precision_config(self) -> Any:
        """Buffers (BatchNorm statistics, say) stay as they are: they are averaged with those of other peers."""
        config = super().mixed_precision_config  # type: ignore[misc]
        return None if config is None else replace(config, buffer_dtype=None)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        if not self._on_cpus:
            with super().model_sharded_context():  # type: ignore[misc]
                yield
            return
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._wrapping):
            yield

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        wrapped = any(isinstance(one, FullyShardedDataParallel) for one in model.modules())
        if wrapped or not self._on_cpus:
            return super()._setup_model(model)  # type: ignore[misc,no-any-return]
        model = FullyShardedDataParallel(module=model, **self._wrapping)
        policy = self.kwargs.pop("auto_wrap_policy", None)  # of which it would say that it is not used
        try:
            return super()._setup_model(model)  # type: ignore[misc,no-any-return]
        finally:
            if policy is not None:
                self.kwargs["auto_wrap_policy"] = policy

    @property
    def _on_cpus(self) -> bool:
        return self.root_device.type == "cpu"

    @property
    def _wrapping(self) -> dict[str, Any]:
        """What Lightning gives to FSDP, and the device, which torch would look for among GPUs."""
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": self.root_device,
            **self.kwargs,
        }
