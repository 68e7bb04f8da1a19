"""A peer of one process on one device: what Lightning asks of such a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_hivemind.peer.portable import ReadsFiles


class SingleProcess(ReadsFiles):
    """Between the strategy and Lightning's ``Strategy``; see :func:`lightning_hivemind.lightning_twins.twin_of`.

    If a Trainer gives it several devices, it calls ``spread`` before it takes them: what it then is takes them.
    """

    #: set by Lightning, as it does with its own strategies for several processes
    cluster_environment: Any = None
    global_rank = local_rank = node_rank = 0
    world_size = 1
    #: set by Lightning to what the Trainer was given
    num_nodes = 1
    model: torch.nn.Module | None
    spread: Callable[[], None]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """What the Trainer was given."""
        found: list[torch.device] | None = self.__dict__.get("_devices")
        return found

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            self.spread()
            self.parallel_devices = devices  # of what it is now
        else:
            self.__dict__["_devices"] = devices

    @property
    def root_device(self) -> torch.device:
        """The one device of this peer."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 *of this peer*: every peer writes its own logs and checkpoints."""
        return True

    #: see :class:`.several.SeveralProcesses`
    data_place, in_parts, offloads_itself = 0, False, False

    def shards(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def finish_gradients(self) -> None:
        """They are what the backward pass has left."""

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Over the ranks of this peer, of which there is one; over peers: ``swarm_mean``."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Peers never wait for one another outside of rounds."""
