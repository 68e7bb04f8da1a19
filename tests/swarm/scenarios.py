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


def tells_fresh_memory(spec: PeerSpec) -> None:
    """Train, and record each piece of memory that the engine does not have yet."""
    from types import SimpleNamespace

    import numpy as np

    from lightning_hivemind.engine.native import memory
    from swarm.peer_main import train

    recorder = Recorder(spec)

    def empty(count: int, dtype: type) -> object:
        recorder.write("fresh", bytes=count)
        return np.empty(count, dtype)

    memory.np = SimpleNamespace(empty=empty, uint8=np.uint8)  # type: ignore[assignment]
    train(spec)


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
    Recorder(spec).write("trained")


def sparse_gradients(spec: PeerSpec) -> None:
    """The same embedding trained with sparse gradients and with dense ones."""
    import torch

    from swarm.peer_main import make_strategy, packages

    pl = packages(spec)

    class Model(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 1, sparse=sparse)
            self.table.weight.data = torch.arange(4.0).reshape(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.table(batch).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(sparse: bool) -> list[float]:
        trainer = pl.Trainer(
            strategy=make_strategy(spec, pl, target_batch_size=4), accelerator="cpu", devices=1, logger=False,
            max_steps=2, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Model(sparse)
        trainer.fit(model, torch.utils.data.DataLoader([0, 1, 2, 2, 1, 3, 0, 0], batch_size=2))
        values: list[float] = model.table.weight.detach().flatten().tolist()
        return values

    initial = Model(False).table.weight.detach().flatten().tolist()
    Recorder(spec).write("trained", sparse=train(True), dense=train(False), initial=initial)


def evaluate(spec: PeerSpec) -> None:
    """Load a checkpoint for test and predict."""
    from swarm.models import make_loader, make_model
    from swarm.peer_main import digest_of, make_strategy, packages
    from swarm.wholes import wholes

    pl = packages(spec)
    recorder = Recorder(spec)
    strategy = {} if spec.strategy is None else {"strategy": make_strategy(spec, pl)}
    trainer = pl.Trainer(
        accelerator="cpu", devices=spec.ranks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **strategy,
    )  # fmt: skip
    model, loader = make_model(pl, seed=3, **spec.model), make_loader(32, 8, None)
    if strategy:
        strategy["strategy"].events.subscribe(lambda event: recorder.write(type(event).__name__))
    (result,) = trainer.test(model, loader, ckpt_path=spec.free["checkpoint"], verbose=False)
    predictions = trainer.predict(model, loader, ckpt_path=spec.free["checkpoint"])
    recorder.write("evaluated", digest=digest_of(wholes(model)), predictions=len(predictions), **result)


def handlers(spec: PeerSpec) -> None:
    """A whole fit, and the signal handlers before and after."""
    import signal

    from swarm.peer_main import fit

    def mine(*_: object) -> None:
        pass

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
    signal.signal(signal.SIGTERM, mine)
    before = [repr(signal.getsignal(number)) for number in numbers]
    spec.trainer["max_steps"] = 2
    fit(spec)
    Recorder(spec).write("handlers", before=before, after=[repr(signal.getsignal(number)) for number in numbers])


def fit_twice(spec: PeerSpec) -> None:
    """Two fits, one after the other, each with its own strategy."""
    from swarm.peer_main import fit

    spec.trainer["max_steps"] = 1
    fit(spec)
    trainer, _ = fit(spec)
    Recorder(spec).write("second", global_step=trainer.global_step)


def only_dht(spec: PeerSpec) -> None:
    """A strategy whose DHT is asked for, and that validates but never fits."""
    from swarm.models import make_loader, make_model
    from swarm.peer_main import make_strategy, packages

    pl = packages(spec)
    strategy = make_strategy(spec, pl)
    Recorder(spec).write("addresses", addresses=[str(address) for address in strategy.dht.get_visible_maddrs()])
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.validate(make_model(pl), make_loader(16, 8, 0), verbose=False)
    Recorder(spec).write("validated", addresses=[str(address) for address in strategy.dht.get_visible_maddrs()])


def other_package(spec: PeerSpec) -> None:
    """Both packages are imported; the strategy is made first, then taken by pytorch_lightning's Trainer."""
    import lightning.pytorch
    import pytorch_lightning

    from swarm.models import make_loader, make_model
    from swarm.peer_main import make_strategy

    strategy = make_strategy(spec, lightning.pytorch, matchmaking_time=2.0)
    trainer = pytorch_lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    assert isinstance(strategy, pytorch_lightning.strategies.Strategy)
    trainer.fit(make_model(pytorch_lightning), make_loader(256, 8, 0))
    base = type(strategy).__mro__
    module = next(cls.__module__ for cls in base if cls.__name__ == "Strategy")
    Recorder(spec).write("finished", global_step=trainer.global_step, base=module.split(".")[0])


def older_name(spec: PeerSpec) -> None:
    """The strategy under its older published name, from where it was published."""
    from lightning_hivemind.strategy import CollaborativeStrategy, HivemindStrategy
    from swarm.models import make_loader, make_model
    from swarm.peer_main import packages

    pl = packages(spec)
    strategy = CollaborativeStrategy(target_batch_size=16, engine=spec.engine, matchmaking_time=2.0)
    assert isinstance(strategy, HivemindStrategy)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(make_model(pl), make_loader(256, 8, 0))
    Recorder(spec).write("finished", global_step=trainer.global_step)


def registry(spec: PeerSpec) -> None:
    """What Lightning's registry holds once the strategy was imported, and what a name alone brings."""
    from swarm.peer_main import packages

    pl = packages(spec)
    from lightning_hivemind import HivemindStrategy

    assert HivemindStrategy
    names, error = list(pl.strategies.StrategyRegistry.available_strategies()), None
    try:
        pl.Trainer(strategy="hivemind", accelerator="cpu")
    except ValueError as raised:
        error = str(raised)
    Recorder(spec).write("registry", names=names, error=error)


def cli(spec: PeerSpec) -> None:
    """``LightningCLI`` with the strategy in a YAML file."""
    import sys

    from swarm.models import make_loader, make_model
    from swarm.peer_main import packages

    pl = packages(spec)
    sys.argv = ["script.py", "fit", "--config", spec.free["config"]]
    cli_module = __import__(f"{pl.__name__}.cli", fromlist=["LightningCLI"])
    regression = type(make_model(pl))

    class Model(regression):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()

        def train_dataloader(self) -> object:
            return make_loader(256, 8, 0)

        def val_dataloader(self) -> object:
            return make_loader(32, 8, None)

    made = cli_module.LightningCLI(Model, save_config_callback=None)
    arguments = made.trainer.strategy.arguments
    target, engine = arguments.target_batch_size, arguments.engine
    Recorder(spec).write("finished", global_step=made.trainer.global_step, target=target, engine=engine)


def dht_hangs(spec: PeerSpec) -> None:
    """The DHT's process hangs before the fit."""
    import os
    import signal

    from swarm.models import make_loader, make_model
    from swarm.peer_main import make_strategy, packages

    pl = packages(spec)
    strategy = make_strategy(spec, pl)
    os.kill(strategy.dht.pid, signal.SIGSTOP)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(make_model(pl), make_loader(256, 8, 0))


def gives_no_state(spec: PeerSpec) -> None:
    """Train as a peer that never has a copy of its state for others."""
    from lightning_hivemind.engine.native.stepper import Stepper

    Stepper.snapshot = lambda self, known, memory=None: None  # type: ignore[method-assign]
    from swarm.peer_main import train

    train(spec)
