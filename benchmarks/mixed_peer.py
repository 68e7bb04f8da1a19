"""One peer of ``mixed.py``: the example's model, spread over the peer's devices in its own way.

    python mixed_peer.py FOLDER NAME KIND TARGET BATCH [--join ADDRESSES] [--outer CODE] [--delay SECONDS]

In FOLDER: ``NAME.address``, ``NAME.events.jsonl`` (the strategy's), ``NAME.losses.jsonl`` (time, loss of a batch), and
at the end of the one-device peer ``NAME.result``, the held-out loss. Once there is a file ``stop`` it asks the whole
run to stop.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import lightning_hivemind as ours
from bench_peer import publish
from outer_peer import ByteGPT, StdlibText, held_out_loss

CONTEXT, LR = 64, 2e-3
OFFLOADED = {
    "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, for which DeepSpeed compiles nothing
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


class Spread(pl.LightningModule):
    """The example's model, which FSDP2 shards block by block."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gpt = ByteGPT(width=64, layers=4, context=CONTEXT)

    def configure_model(self) -> None:
        if self.kind == "FSDP2":
            mesh = self.device_mesh["data_parallel"]
            for block in self.gpt.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.gpt, mesh=mesh)

    def training_step(self, crops: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.gpt.loss(crops)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)


class Recorder(pl.Callback):
    """Writes losses down, is as slow as it is told to be, and passes the wish to stop on."""

    def __init__(self, folder: Path, name: str, delay_s: float) -> None:
        self._stop, self._delay_s = folder / "stop", delay_s
        self._path = folder / f"{name}.losses.jsonl"

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), "loss": float(outputs["loss"])}) + "\n")
            if self._stop.exists():
                trainer.should_stop = True
        time.sleep(self._delay_s)


def local_strategy(kind: str) -> Any:
    return {
        "one device": "auto",
        "DDP": "ddp",
        "FSDP2": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        "ZeRO-3 with offload": DeepSpeedStrategy(config=OFFLOADED),
    }[kind]


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    # (with an outer step, too, peers are compared: every 64 rounds)
    arguments: dict[str, Any] = {"outer": eval(options.outer, {"ours": ours})} if options.outer else {}
    arguments |= {} if options.outer else {"average_state_every": 4}
    strategy = ours.HivemindStrategy(
        target_batch_size=options.target,
        run_id="mixed",
        initial_peers=options.join,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        local_strategy=local_strategy(options.kind),
        **arguments,
    )
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1 if options.kind == "one device" else 2,
        max_steps=-1,
        max_epochs=-1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[Recorder(options.folder, options.name, options.delay)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    if trainer.is_global_zero:
        publish(options.folder / f"{options.name}.address", ",".join(map(str, strategy.dht.get_visible_maddrs())))
    seed = int.from_bytes(os.urandom(3), "big") + rank
    data = StdlibText(batch_size=options.batch, context=CONTEXT, seed=seed, held_out_crops=512)
    model = Spread(options.kind)
    trainer.fit(model, data)
    if options.kind == "one device":
        publish(options.folder / f"{options.name}.result", str(held_out_loss(model.gpt, data)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("kind")
    parser.add_argument("target", type=int, help="samples of a round")
    parser.add_argument("batch", type=int, help="samples of each of its devices")
    parser.add_argument("--join", default="", help="addresses with commas")
    parser.add_argument("--outer", default="", help="as Python; empty: gradients are averaged")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a batch takes longer")
    main(parser.parse_args())
