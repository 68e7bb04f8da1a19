"""One peer of ``outer.py``: the example's model at 0.22 million parameters, for so many rounds.

    python outer_peer.py FOLDER NUMBER ROUNDS TARGET [--join ADDRESSES] [--outer LR,MOMENTUM] [--codec CODE]
        [--fragments COUNT] [--batches COUNT] [--warm CHECKPOINT] [--lr RATE]

Writes ``FOLDER/NUMBER.address``, ``NUMBER.ready`` once all four are there, and at its end ``NUMBER.rounds`` and
``NUMBER.result``, the held-out loss. With ``--alone`` it is a plain Trainer, that writes a checkpoint of its weights
instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import lightning_hivemind as ours
from bench_peer import publish
from byte_gpt import ByteGPT, StdlibText

PEERS, BATCH, CONTEXT = 4, 4, 64
#: rounds until the learning rate is reached, of so many inner steps as 30 rounds of one
WARMUP_STEPS = 30
HELD_OUT = 1024
PATIENCE_S = 60.0


class Together(pl.Callback):
    """Nobody trains before all are there, and the parent has looked at its counters."""

    def __init__(self, folder: Path, number: int, strategy: ours.HivemindStrategy) -> None:
        self._folder, self._number, self._strategy, self._begun = folder, number, strategy, False

    def on_train_batch_start(self, *args: object) -> None:
        if self._begun:
            return
        self._begun = True
        deadline = time.monotonic() + PATIENCE_S
        while self._strategy.num_peers < PEERS and time.monotonic() < deadline:
            time.sleep(0.05)
        publish(self._folder / f"{self._number}.ready", str(self._strategy.num_peers))
        while not (self._folder / "go").exists():
            time.sleep(0.02)


class EndAfter(pl.Callback):
    """So many batches, whatever rounds there were: where training goes on during a round these have more samples."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self._left -= 1
        if self._left <= 0:
            trainer.should_stop = True


def held_out_loss(model: ByteGPT, data: StdlibText) -> float:
    model.eval()
    with torch.no_grad():
        losses = [float(model.loss(crops)) * len(crops) for crops in data.val_dataloader()]
    return sum(losses) / data.held_out_crops


def main(options: argparse.Namespace) -> None:
    folder, number = options.folder, options.number
    torch.set_num_threads(1)
    common = {
        "accelerator": "cpu",
        "max_steps": options.rounds,
        "gradient_clip_val": 1.0,
        "limit_val_batches": 0,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "logger": False,
    }
    warmup = max(1, WARMUP_STEPS * PEERS * BATCH // options.target)
    pl.seed_everything(0, verbose=False)
    model = ByteGPT(width=64, layers=4, context=CONTEXT, lr=options.lr, warmup=warmup)
    if options.warm:
        model.load_state_dict(torch.load(options.warm))
    data = StdlibText(
        batch_size=BATCH * (PEERS if options.alone else 1),
        context=CONTEXT,
        seed=1000 * options.seed + number,
        held_out_crops=HELD_OUT,
    )
    if options.alone:
        pl.Trainer(**common).fit(model, datamodule=data)
        torch.save(model.state_dict(), folder / "warm.pt")
    else:
        arguments = {}
        if options.outer:
            lr, momentum = map(float, options.outer.split(","))
            settings = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
            if options.fragments > 1:
                arguments["outer"] = ours.StreamingDiLoCo(**settings, fragments=options.fragments)
            else:
                arguments["outer"] = ours.DiLoCo(**settings)
            if options.codec:
                arguments["state_averaging_compression"] = eval(options.codec, vars(ours).copy() | {"ours": ours})
        strategy = ours.HivemindStrategy(
            target_batch_size=options.target,
            run_id="outer",
            initial_peers=options.join,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            **arguments,
        )
        publish(folder / f"{number}.address", ",".join(map(str, strategy.dht.get_visible_maddrs())))
        callbacks: list[pl.Callback] = [Together(folder, number, strategy)]
        callbacks += [EndAfter(options.batches)] if options.batches else []
        trainer = pl.Trainer(strategy=strategy, devices=1, callbacks=callbacks, **common)
        trainer.fit(model, datamodule=data)
        publish(folder / f"{number}.rounds", str(trainer.global_step))
    publish(folder / f"{number}.result", str(held_out_loss(model, data)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("target", type=int, help="samples of a round")
    parser.add_argument("--join", default="", help="addresses with commas")
    parser.add_argument("--outer", default="", help="lr,momentum of the outer step; empty: gradients are averaged")
    parser.add_argument("--fragments", type=int, default=1, help="of the outer step")
    parser.add_argument("--batches", type=int, default=0, help="end after so many, and not after ROUNDS")
    parser.add_argument("--codec", default="", help="of what is averaged, as Python")
    parser.add_argument("--warm", default="", help="weights to begin with")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1, help="of the data")
    parser.add_argument("--alone", action="store_true")
    os.environ.pop("INITIAL_PEERS", None)
    main(parser.parse_args())
