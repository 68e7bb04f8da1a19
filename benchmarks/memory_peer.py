"""One contender of ``memory.py``: a Trainer, each rank of which says how much memory it took at most.

    python memory_peer.py FOLDER NAME KIND DEVICES STEPS [--swarm]

Written are ``NAME-<rank>.peak``, bytes above what the process had before it made the model; in a swarm rank 0 first
writes its addresses to ``addresses``, or reads those of another one there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from bench_peer import publish
from lightning_hivemind import HivemindStrategy

#: 25 million values
WIDTH, LAYERS, BATCH = 1024, 24, 8
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)


class Model(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def configure_model(self) -> None:
        if self.kind == "FSDP2":
            for one in self.layers:
                fully_shard(one, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Partners(pl.Callback):
    """Not before everybody is there."""

    def __init__(self, strategy: Any, peers: int) -> None:
        self._strategy, self._peers = strategy, peers

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        deadline = time.monotonic() + 120
        while trainer.is_global_zero and self._strategy.num_peers < self._peers:
            if time.monotonic() > deadline:
                raise TimeoutError("the other peer did not come")
            time.sleep(0.05)


def local_strategy(kind: str, *, bare: bool) -> Any:
    """As it is given to the swarm's strategy; Lightning's own, where there is one on CPUs."""
    if kind == "one device":
        return "auto"
    if kind == "DDP":
        return DDPStrategy(gradient_as_bucket_view=True)
    if kind == "FSDP2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if bare:  # Lightning's own refuse CPUs; the tests have them with that taken away
        from swarm.hooks import FsdpOnCpus, ZeroOnCpus

        return FsdpOnCpus(auto_wrap_policy={torch.nn.Linear}) if kind == "FSDP" else ZeroOnCpus(stage=int(kind[-1]))
    return (
        FSDPStrategy(auto_wrap_policy={torch.nn.Linear}) if kind == "FSDP" else DeepSpeedStrategy(stage=int(kind[-1]))
    )


def memory(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    strategy: Any = local_strategy(options.kind, bare=not options.swarm)
    addresses, callbacks = options.folder / "addresses", list[pl.Callback]()
    if options.swarm:
        first = not addresses.exists()
        strategy = HivemindStrategy(
            target_batch_size=4 * BATCH,
            run_id="memory",
            initial_peers=[] if first else addresses.read_text(encoding="utf-8"),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            local_strategy=strategy,
        )
        callbacks.append(Partners(strategy, 2))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=options.devices,
        max_steps=options.steps,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    if options.swarm and trainer.is_global_zero and not addresses.exists():
        publish(addresses, ",".join(map(str, strategy.dht.get_visible_maddrs())))
    data: Any = torch.randn(1024, WIDTH)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the most it has had is what it has now
    trainer.fit(Model(options.kind), torch.utils.data.DataLoader(data, batch_size=BATCH))
    publish(options.folder / f"{options.name}-{trainer.global_rank}.peak", str(memory("VmHWM") - before))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("kind")
    parser.add_argument("devices", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--swarm", action="store_true")
    main(parser.parse_args())
