"""What peers run besides plain training: see ``PeerSpec.scenario``."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from swarm.peer_main import Recorder, wait
from swarm.spec import PeerSpec


def leak(spec: PeerSpec) -> None:
    """End, and leave a detached process behind."""
    subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)


def listen(spec: PeerSpec) -> None:
    """Hold a port until the test says go."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        Recorder(spec).write("listening", port=server.getsockname()[1])
        wait((Path(spec.folder) / "go").exists, "go")


def sleep(spec: PeerSpec) -> None:
    """Do nothing for long."""
    time.sleep(600)


def batch_without_size(spec: PeerSpec) -> None:
    """Train on batches of a type that says nothing about its size."""
    import torch
    from swarm.peer_main import make_strategy, packages

    pl = packages(spec)

    class Opaque:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

    class Model(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Opaque, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch.values).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(
        [torch.ones(2) for _ in range(8)], batch_size=4, collate_fn=lambda rows: Opaque(torch.stack(rows))
    )
    trainer = pl.Trainer(
        strategy=make_strategy(spec, pl), accelerator="cpu", devices=1, logger=False, max_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), loader)
