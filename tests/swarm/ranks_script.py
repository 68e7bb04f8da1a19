"""A script as a user writes it, for a peer of two ranks that Lightning starts: ``python ranks_script.py [error]``."""

from __future__ import annotations

import faulthandler
import signal
import sys
from typing import Any

import lightning as L
import torch

from lightning_hivemind import HivemindStrategy

torch.set_num_threads(1)
faulthandler.register(signal.SIGUSR1)  # the test asks for stacks with it


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == 20 and self.global_rank == 1 and sys.argv[1:] == ["error"]:
            raise ValueError("induced failure at rank 1")
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(1024, 8))
    strategy = HivemindStrategy(target_batch_size=16, host_maddrs=["/ip4/127.0.0.1/tcp/0"], verbose=True)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=-1, max_epochs=-1, logger=False)
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
