"""The tutorial's script: a small classifier on data that each peer draws for itself."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hivemind import HivemindStrategy


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    inputs = torch.randn(4096, 16)
    labels = (inputs.sum(dim=1) > 0).long()
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        max_epochs=-1,
        strategy=HivemindStrategy(target_batch_size=32768, run_id="tutorial"),
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
