"""Models in parts inside of a peer: what its strategy does otherwise than Lightning's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_hivemind.peer.several import SeveralProcesses
from lightning_hivemind.peer.shards import DistributedTensors, Shards


class InParts(SeveralProcesses):
    """Lightning's strategies for such models load their checkpoints by themselves."""

    in_parts = True
    resume: Callable[[Mapping[str, Any], Mapping[str, Any]], None]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self.resume(checkpoint, {})
        return checkpoint


class ModelParallel(InParts):
    """Between the swarm's strategy and Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallel)."""

    model: torch.nn.Module

    def shards(self, optimizer: torch.optim.Optimizer) -> Shards:
        return DistributedTensors(optimizer, self.model)
