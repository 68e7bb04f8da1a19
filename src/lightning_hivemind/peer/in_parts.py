"""Models in parts inside of a peer: what its strategy does otherwise than Lightning's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.lightning_twins import lightning_module as module_of
from lightning_hivemind.peer import portable
from lightning_hivemind.peer.several import SeveralProcesses
from lightning_hivemind.peer.sharded import Sharded
from lightning_hivemind.peer.shards import DistributedTensors, Shards

log = logging.getLogger("lightning_hivemind")

#: of a checkpoint: what is large
_LARGE = {"state_dict", "optimizer_states"}


class InParts(SeveralProcesses):
    """Checkpoints are whole, as any peer can resume them; or as Lightning's own strategy has them, which loads these by
    itself (``portable_checkpoints=False``).
    """

    in_parts = True
    #: who writes what it has for a checkpoint of its own
    writes = portable.FSDP
    lightning_module: Any
    package: str
    #: of the fit, or of the last one
    peer_model: Sharded | None
    precision_plugin: Any
    #: whether it is a fit
    _session_wanted: Callable[[], bool]
    resume: Callable[[Mapping[str, Any], Mapping[str, Any]], None]

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()  # type: ignore[misc]
        # where Lightning has one, it is of parts, in other last bits than that of a whole model; where not, it refuses
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self.peer_model is not None
        self.peer_model.clip_by_norm(float(clip_val))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if (model := self._portable()) is not None:
            return portable.state_dict(model)
        own: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return own

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if (model := self._portable()) is None:
            own: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
            return own
        if self.arguments.recreates_optimizer:  # rank 0 has it
            return dict(optimizer.state_dict()) if model.leads else {}
        return portable.optimizer_state(model)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._portable() is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        else:
            self._plain.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *weights_only: Any, **more: Any) -> dict[str, Any]:
        path, is_own = self.broadcast((checkpoint_path, Path(checkpoint_path).is_dir()))
        if is_own or not self._session_wanted() or self.peer_model is None:
            return self._load_own(path, is_own, *weights_only, **more)
        model = self.peer_model

        def read() -> dict[str, Any]:
            with portable.reading(path):
                found: dict[str, Any] = self._plain.load_checkpoint(self, path, *weights_only, **more)
            if "state_dict" not in found:
                raise ArgumentError(f"ckpt_path={str(path)!r} is no checkpoint of Lightning's: it has no state_dict.")
            return found

        given = model.at_rank_0(read)
        rest: dict[str, Any] = model.say(None if given is None else {k: v for k, v in given.items() if k not in _LARGE})
        states = model.say(None if given is None else len(given.get("optimizer_states", ())))
        if states != 1:
            raise ArgumentError(
                f"ckpt_path={str(path)!r}: it has {states} optimizer states, and to resume takes one. To begin with its"
                " weights only, load them into the module before the fit."
            )
        strict = bool(self.lightning_module.strict_loading)
        portable.load_state_dict(model, None if given is None else given["state_dict"], strict=strict)
        optimizer_state = {} if given is None else given["optimizer_states"][0]
        if self.arguments.recreates_optimizer:
            self.resume(rest, optimizer_state)
        else:
            portable.load_optimizer_state(model, optimizer_state if model.leads else None)
            self.resume(rest, {})
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """It was loaded with the rest."""

    def _load_own(self, path: Any, is_directory: bool, *weights_only: Any, **more: Any) -> dict[str, Any]:
        """As Lightning's strategy does."""
        if is_directory:
            portable.refuse_directory(path, self.writes)
        if self._session_wanted() and self.arguments.recreates_optimizer:
            raise ArgumentError(
                f"ckpt_path={str(path)!r} is a directory, in which each rank has its part of the optimizer's state, and"
                " with offload_optimizer (or a delay, which offloads) rank 0 has it whole. Resume it once without them,"
                " with portable_checkpoints=True, and save: that file is resumed with them."
            )
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *weights_only, **more)  # type: ignore[misc]
        self.resume(checkpoint, {})
        return checkpoint

    def _portable(self) -> Sharded | None:
        """What writes whole checkpoints, if any are wanted, and there was a fit."""
        return self.peer_model if self.arguments.portable_checkpoints else None

    @property
    def _plain(self) -> Any:
        """Lightning's strategy for one process."""
        return module_of(self.package, "strategies").Strategy


class ModelParallel(InParts):
    """Between the swarm's strategy and Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallel)."""

    model: torch.nn.Module
    is_global_zero: bool
    world_size: int

    def setup(self, trainer: Any) -> None:
        if not module_of(self.package, "utilities.model_helpers").is_overridden(
            "configure_model", self.lightning_module
        ):
            raise ArgumentError(
                f"local_strategy={self.arguments.local_strategy!r}: the module puts itself into parts, in"
                " configure_model(), which it does not have. Write it (there fully_shard() is called on its layers), or"
                ' use local_strategy="fsdp", which needs none.'
            )
        super().setup(trainer)  # type: ignore[misc]

    def shards(self, optimizer: torch.optim.Optimizer) -> Shards:
        parameters = self.model.parameters()
        if not any(isinstance(one, DTensor) and one.device_mesh.size() > 1 for one in parameters) and (
            self.is_global_zero and self.world_size > 1
        ):
            log.warning(
                "configure_model() has put nothing into parts: each of the %d ranks has all of the model, and ranks of"
                " one tensor_parallel group compute the same batches. ModelParallelStrategy(data_parallel_size=%d,"
                ' tensor_parallel_size=1) and fully_shard(layer, mesh=self.device_mesh["data_parallel"]) do.',
                self.world_size,
                self.world_size,
            )
        return DistributedTensors(optimizer, self.lightning_module, self.model)
