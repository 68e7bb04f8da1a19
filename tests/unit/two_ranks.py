"""Two processes that have a process group of gloo, as the ranks of a peer have."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from swarm.ports import free_port

Act = Callable[[int, Any], Any]


def run(rank: int, at: int, act: Act, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{at}", timeout=timedelta(seconds=30), rank=rank, world_size=2)

    def broadcast(obj: Any, src: int = 0) -> Any:
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    group = SimpleNamespace(global_rank=rank, world_size=2, broadcast=broadcast)
    torch.save(act(rank, group), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def of_both(act: Act) -> list[Any]:
    """What ``act`` returns at each rank."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "lightning_hivemind.peer.replicas"])
        at = free_port()
        processes = [context.Process(target=run, args=(rank, at, act, folder)) for rank in range(2)]
        for one in processes:
            one.start()
        for one in processes:
            one.join(60)
            assert one.exitcode == 0
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


class Told:
    """Ranks that share by torch.distributed."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.leads = rank, 2, rank == 0

    def share(self, what: str, value: Any) -> list[Any]:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, value)
        return found
