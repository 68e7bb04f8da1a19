"""DDP inside of a peer: what its strategy does otherwise than Lightning's."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_hivemind.peer.portable import ReadsFiles
from lightning_hivemind.peer.several import SeveralProcesses


class Replicated(ReadsFiles, SeveralProcesses):
    """Between the swarm's strategy and Lightning's ``DDPStrategy``."""

    _ddp_comm_state: Any
    _ddp_comm_hook: Any
    _ddp_comm_wrapper: Any
    model: Any
    root_device: torch.device
    world_size: int

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Post-local SGD leaves it to each, to let ranks step apart for a while. In a swarm all step together."""
        if not isinstance(self._ddp_comm_state, PostLocalSGDState):
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        works = [dist.all_reduce(one, async_op=True) for one in gradients]
        for work, one in zip(works, gradients, strict=True):
            work.wait()
            one.div_(self.world_size)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's advice is for who has given DDP to the Trainer: followed as it is, the swarm would be gone."""
        super().on_exception(exception)  # type: ignore[misc]
        said = r"\bstrategy=(?='ddp_find|DDPStrategy\()"
        exception.args = tuple(
            re.sub(said, "local_strategy=", one) if isinstance(one, str) else one for one in exception.args
        )

    def _register_ddp_hooks(self) -> None:
        """Also on a CPU, where Lightning leaves them away without a word."""
        assert isinstance(self.model, DistributedDataParallel)
        hook, state, wrapper = self._ddp_comm_hook, self._ddp_comm_state, self._ddp_comm_wrapper
        if isinstance(state, PostLocalSGDState) and state.subgroup is None and self.root_device.type == "cpu":
            state.subgroup = dist.group.WORLD  # torch would count GPUs to find the ranks of this machine
        if hook is not None:
            self.model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))

    def _enable_model_averaging(self) -> None:
        """Parameters are averaged with every step already."""
