"""One contender of ``wrapping.py``: a Trainer that trains in turns, and says what CPU time each turn took.

    python wrapping_peer.py FOLDER NAME LOCAL_STRATEGY DEVICES TURNS BATCHES [--swarm | --steps | --apart]

Each rank waits for ``FOLDER/NAME-<turn>.turn`` and then writes ``NAME-<turn>-<rank>.cpu``: seconds of CPU per batch.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from bench_peer import publish

FEATURES = 64


class Model(pl.LightningModule):
    """Small: what is measured is all around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, FEATURES)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        batch = torch.randn(8, FEATURES)
        while True:
            yield batch


class InTurns(pl.Callback):
    def __init__(self, folder: Path, name: str, turns: int, batches: int) -> None:
        self._folder, self._name, self._turns, self._batches = folder, name, turns, batches
        self._turn, self._left, self._began = -1, 0, 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._left:
            self._left -= 1
            return
        if self._turn >= 0:
            used = (time.process_time() - self._began) / self._batches
            publish(self._folder / f"{self._name}-{self._turn}-{trainer.global_rank}.cpu", str(used))
        self._turn += 1
        if self._turn == self._turns:
            trainer.should_stop = True
            return
        while not (self._folder / f"{self._name}-{self._turn}.turn").exists():
            time.sleep(0.005)
        self._left, self._began = self._batches - 1, time.process_time()


class Averaging(DDPStrategy):
    """Its ranks average the gradients of each batch, also when it makes no step of them."""

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    strategy: Any = options.local_strategy
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    elif strategy == "ddp" and not (options.swarm or options.apart):
        strategy = Averaging()
    if options.swarm:
        from lightning_hivemind import HivemindStrategy

        strategy = HivemindStrategy(
            target_batch_size=10**9,  # no round
            run_id="wrapping",
            initial_peers=[],
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            local_strategy=strategy,
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=options.devices,
        max_steps=-1,
        accumulate_grad_batches=1 if options.swarm or options.steps else 10**9,  # in a swarm, too, there is no step
        callbacks=[InTurns(options.folder, options.name, options.turns, options.batches)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(Batches(), batch_size=None))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("local_strategy")
    parser.add_argument("devices", type=int)
    parser.add_argument("turns", type=int)
    parser.add_argument("batches", type=int)
    parser.add_argument("--swarm", action="store_true")
    parser.add_argument("--apart", action="store_true", help="bare DDP as it is: no average of what it accumulates")
    parser.add_argument("--steps", action="store_true", help="at each batch, bare")
    main(parser.parse_args())
