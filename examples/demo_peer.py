"""One peer of the demo: ``byte_gpt.py`` as it is, plus a callback that writes down what ``demo.py`` shows.

    python demo_peer.py FOLDER [options of byte_gpt.py]

In FOLDER: ``training.jsonl`` (one line per observation), ``parameters.npz`` (``epochs_E``, the last ones, and
``parameters_EP``, all parameters at the end of each, float32) and ``result.json``. Once there is a file ``stop``, this
peer asks the whole run to stop. The strategy's own events go where ``LIGHTNING_HIVEMIND_EVENTS`` says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

import byte_gpt

#: Seconds between two lines about the training loss: short beside a global step, long beside a batch.
LINE_EVERY_S = 0.5
#: Epochs whose parameters are kept for the comparison between peers: more than any peer ends ahead of another.
EPOCHS_KEPT = 10


class Recorder(pl.Callback):
    """Appends losses to ``training.jsonl`` while they come, and keeps the parameters after the last step.

    A line has ``time`` (Unix, s), ``kind`` (``"start"``, ``"train"``, ``"held_out"`` or ``"end"``), ``samples`` (of
    this peer so far) and, where it is about one, ``loss`` (nats per byte; for ``"train"`` the mean since the line
    before, without batches that gave no finite loss: the strategy drops these and says so).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples = 0
        self.epoch = 0
        self._parameters: dict[int, np.ndarray[Any, Any]] = {}
        self._asked_to_stop = False
        self._losses: list[float] = []
        self._written_at = 0.0
        self._file = open(folder / "training.jsonl", "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - kept open

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write("start")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: torch.Tensor, batch_idx: int
    ) -> None:
        self.samples += len(batch)
        if torch.isfinite(outputs["loss"]):
            self._losses.append(float(outputs["loss"]))
        if self._losses and time.monotonic() - self._written_at >= LINE_EVERY_S:
            self._written_at = time.monotonic()
            self.write("train", sum(self._losses) / len(self._losses))
            self._losses.clear()
        self._keep_parameters(trainer, pl_module)
        if not self._asked_to_stop and (self.folder / "stop").exists():
            self._asked_to_stop = True
            trainer.should_stop = True  # in a swarm: every peer ends after the same global step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write("held_out", float(trainer.callback_metrics["held_out_loss"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._keep_parameters(trainer, pl_module)
        epochs, parameters = zip(*self._parameters.items(), strict=True)
        np.savez(self.folder / "parameters.npz", epochs_E=np.array(epochs), parameters_EP=np.stack(parameters))
        self.write("end")

    def write(self, kind: str, loss: float | None = None) -> None:
        line = {"time": time.time(), "kind": kind, "samples": self.samples, "loss": loss}
        self._file.write(json.dumps(line) + "\n")

    def _keep_parameters(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy them as they are in this epoch; peers are compared at an epoch that all of them have copied."""
        self.epoch = getattr(trainer.strategy, "global_epoch", trainer.global_step)
        flat = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        self._parameters[self.epoch] = flat.cpu().float().numpy()
        if len(self._parameters) > EPOCHS_KEPT:
            del self._parameters[min(self._parameters)]


def held_out_loss(model: byte_gpt.ByteGPT) -> float:
    """Nats per byte over the fixed held-out crops."""
    data = byte_gpt.StdlibText()
    data.setup()
    model.eval()
    with torch.no_grad():
        batches = [(float(model.loss(crops)), len(crops)) for crops in data.val_dataloader()]
    return sum(loss * crops for loss, crops in batches) / sum(crops for _, crops in batches)


def end_with(parent: int) -> None:
    """Stop this process as ``kill`` would once ``parent`` is gone: a killed demo must leave no peers behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    folder = Path(sys.argv[1])
    end_with(os.getppid())
    torch.set_num_threads(1)  # the peers share the cores
    recorder = Recorder(folder)
    model = byte_gpt.train(byte_gpt.parse(sys.argv[2:]), [recorder])
    held_out = held_out_loss(model)
    recorder.write("held_out", held_out)
    result = {
        "epoch": recorder.epoch,
        "samples": recorder.samples,
        "held_out_loss": held_out,
        "text": model.generate("def ", 400, temperature=0.6),
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
