"""One peer of ``herd.py``: the example's model, smaller, and one line in a file for each global step.

    python herd_peer.py FOLDER NAME [--join ADDRESSES] [--batch-s SECONDS] [--target SAMPLES] [--codec NAME]
        [--dies MOMENT] [--address IPV4]

Writes ``FOLDER/NAME.jsonl`` (``epoch``, ``time``, ``digest`` of all parameters, ``loss``), ``NAME.events.jsonl``,
``NAME.address``, and at its end ``NAME.result``, the held-out loss. Once there is ``FOLDER/stop``, it stops with all
others; once there is ``NAME.die``, it dies at that moment of a round (``swarm.phases.MOMENTS``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("examples", "tests")]
import lightning_hivemind
from bench_peer import publish
from byte_gpt import ByteGPT, StdlibText
from herd import BATCH, TARGET
from lightning_hivemind import HivemindStrategy
from swarm.phases import MOMENTS, arm, use_chunks_of

#: of its 100,000 parameters or so: every member of a round owns some
CHUNK_ELEMENTS = 4096
CONTEXT = 64
#: what is more than a class: arguments of the strategy, by name
CODECS: dict[str, Callable[[], dict[str, Any]]] = {
    "SizeAdaptive": lambda: {
        "grad_compression": lightning_hivemind.SizeAdaptiveCompression(
            threshold=CHUNK_ELEMENTS,
            less=lightning_hivemind.Float16Compression(),
            greater_equal=lightning_hivemind.Uniform8BitQuantization(),
        )
    },
    "PowerSGD": lambda: {
        "grad_averager_factory": partial(lightning_hivemind.PowerSGDGradientAverager, averager_rank=8)
    },
}


class Slower(ByteGPT):  # type: ignore[misc]
    """Takes ``batch_s`` longer for a batch."""

    def __init__(self, batch_s: float, **sizes: int) -> None:
        super().__init__(**sizes)
        self._batch_s = batch_s

    def training_step(self, batch: torch.Tensor, batch_idx: int = 0) -> torch.Tensor:
        time.sleep(self._batch_s)
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss


class Ledger(pl.Callback):
    """See the module."""

    def __init__(self, path: Path, strategy: HivemindStrategy) -> None:
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - kept open
        self._stop, self._strategy, self._epoch = path.parent / "stop", strategy, -1

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._stop.exists():
            trainer.should_stop = True
        epoch = self._strategy.global_epoch
        if epoch == self._epoch:
            return
        self._epoch = epoch
        digest = hashlib.sha256()
        for parameter in pl_module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        line = {"epoch": epoch, "time": time.time(), "digest": digest.hexdigest()[:16], "loss": float(outputs["loss"])}
        self._file.write(json.dumps(line) + "\n")


def codec_options(name: str) -> dict[str, Any]:
    """Arguments of the strategy for a codec of gradients."""
    if name in CODECS:
        return CODECS[name]()
    return {"grad_compression": getattr(lightning_hivemind, name)()} if name else {}


def main(options: argparse.Namespace) -> None:
    folder, name = options.folder, options.name
    torch.set_num_threads(1)
    random.seed()
    use_chunks_of(CHUNK_ELEMENTS)
    if options.dies:
        arm(MOMENTS[options.dies], (folder / f"{name}.die").exists)
    os.environ["LIGHTNING_HIVEMIND_EVENTS"] = str(folder / f"{name}.events.jsonl")
    strategy = HivemindStrategy(
        target_batch_size=options.target,
        engine="native",
        run_id="herd",
        initial_peers=options.join,
        host_maddrs=[f"/ip4/{options.address}/tcp/0"],
        max_staleness=options.max_staleness,
        **codec_options(options.codec),
    )
    publish(folder / f"{name}.address", ",".join(map(str, strategy.dht.get_visible_maddrs())))
    pl.seed_everything(0)
    model = Slower(options.batch_s, width=64, layers=2, context=CONTEXT)
    data = StdlibText(batch_size=options.batch, context=CONTEXT)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=-1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[Ledger(folder / f"{name}.jsonl", strategy)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, datamodule=data)
    model.eval()
    with torch.no_grad():
        losses = [float(model.loss(crops)) for crops in data.val_dataloader()]
    publish(folder / f"{name}.result", str(sum(losses) / len(losses)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--join", default="", help="addresses with commas")
    parser.add_argument("--batch-s", type=float, default=0.0, help="that a batch takes longer than it does")
    parser.add_argument("--target", type=int, default=TARGET, help="samples of a global step")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a batch")
    parser.add_argument("--max-staleness", type=int, default=1, help="of its gradients, in steps")
    parser.add_argument("--codec", default="", help="of gradients, by its name in lightning_hivemind, or here")
    parser.add_argument("--address", default="127.0.0.1", help="at which it listens")
    parser.add_argument("--dies", default="", help="a moment of a round, by its name in swarm.phases")
    main(parser.parse_args())
