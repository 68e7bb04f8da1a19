"""What peers of several processes have in common, whatever strategy of Lightning's they are."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Any

import torch

from lightning_hivemind.peer.shards import Shards

_KEPT: list[socket.socket] = []


class SeveralProcesses:
    """Between the swarm's strategy and one of Lightning's for several processes."""

    arguments: Any
    broadcast: Any
    cluster_environment: Any
    #: whether no rank has the whole model; whether the optimizer cannot be taken into host memory by a swarm
    in_parts = offloads_itself = False

    def _configure_launcher(self) -> None:
        super()._configure_launcher()  # type: ignore[misc]
        environment = self.cluster_environment
        if not environment.creates_processes_externally and "MASTER_PORT" not in os.environ:
            # Lightning has found this one free, and rank 0 will listen there once its ranks have started, seconds later
            _keep(environment.main_port)

    def setup_environment(self) -> None:
        for name, value in (self.arguments.nccl or {}).items():
            os.environ.setdefault(f"NCCL_{name}", str(value))
        super().setup_environment()  # type: ignore[misc]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Lightning's sampler shuffles with seed 0 where nothing is seeded: all peers would see the same samples."""
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        if "PL_GLOBAL_SEED" not in os.environ:
            kwargs["seed"] = self._order_seed()
        return kwargs

    @property
    def data_place(self) -> int:
        """Whose batches this rank takes: ranks with the same place take the same ones (tensor parallel)."""
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        return int(kwargs["rank"])

    def shards(self, optimizer: torch.optim.Optimizer) -> Shards | None:
        """How this rank holds its part of the model; None: it holds all of it."""
        return None

    def finish_gradients(self) -> None:
        """After a backward pass: let ``param.grad`` be the mean over ranks."""

    def _order_seed(self) -> int:
        """One for all ranks, and another one at each peer."""
        if "_peers_seed" not in self.__dict__:
            self.__dict__["_peers_seed"] = self.broadcast(secrets.randbelow(2**31))
        seed: int = self.__dict__["_peers_seed"]
        return seed


def _keep(port: int) -> None:
    """As long as this process lives nobody who asks for any port is given that one; who names it may listen there.

    If somebody has it already, rank 0 will say so.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError):
        kept.bind(("", port))
    _KEPT.append(kept)
