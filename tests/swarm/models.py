"""The models and the data of the swarm tests; built over whichever Lightning package the peer uses."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

FEATURES = 8
DATA_SEED = 1234
#: With torch's 1e-8 a gradient that is zero but for rounding makes a step of nearly ``lr``, and the order of a sum
#: decides where to: of 1500 runs of ten steps in one process, two ended more than 1e-5 (up to 5e-5) from the same with
#: smaller micro-batches. So: 1e-6 at most.
ADAM_EPS = 1e-5


class Numbered(Dataset[dict[str, Tensor]]):
    """Regression data that is the same in every process; each sample carries its index."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(DATA_SEED)
        self.x = torch.randn(samples, FEATURES, generator=generator)
        teacher = torch.randn(FEATURES, 1, generator=generator)
        self.y = torch.sin(self.x @ teacher) + 0.1 * torch.randn(samples, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index], "index": torch.tensor(index)}

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One batch of these samples, in this order."""
        chosen = torch.tensor(list(indices))
        return {"x": self.x[chosen], "y": self.y[chosen], "index": chosen}


class Order(torch.utils.data.Sampler[int]):
    """All samples once per pass, in an order that ``seed`` and the pass decide (``None``: as they lie)."""

    def __init__(self, samples: int, seed: int | None) -> None:
        self.samples, self.seed, self.passes = samples, seed, 0

    def __iter__(self) -> Any:
        if self.seed is None:
            return iter(range(self.samples))
        self.passes += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + self.passes)
        return iter(torch.randperm(self.samples, generator=generator).tolist())

    def __len__(self) -> int:
        return self.samples


class Resumable(DataLoader[dict[str, Tensor]]):
    """Continues in the middle of a pass: Lightning saves its state in the checkpoint, and loads it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given = self._to_skip = 0

    def __iter__(self) -> Any:
        skip, self._to_skip = self._to_skip, 0
        for self._given, batch in enumerate(super().__iter__(), start=1):
            if self._given > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._to_skip = state["given"]


def make_loader(samples: int, batch_size: int, order_seed: int | None) -> Resumable:
    return Resumable(Numbered(samples), batch_size=batch_size, sampler=Order(samples, order_seed))


#: of a model's options, those of :func:`make_net`
NET = ("width", "norm", "seed")


def make_net(width: int = 16, norm: bool = False, seed: int = 0) -> nn.Sequential:
    """The network; equal for equal ``seed``. ``norm`` adds BatchNorm: buffers that no gradient reaches."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(FEATURES, width)]
        layers += [nn.BatchNorm1d(width)] if norm else []
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def spread(net: nn.Sequential, mesh: Any, how: str) -> None:
    """Over the ranks of a peer: tensor parallel, FSDP2, or both."""
    if any(isinstance(p, DTensor) for p in net.parameters()):
        return  # by a hook that came before
    layers = [name for name, layer in net.named_children() if isinstance(layer, nn.Linear)]
    if "tensor" in how:
        plan = {layers[0]: ColwiseParallel(), layers[1]: RowwiseParallel()}
        parallelize_module(net, mesh["tensor_parallel"], plan)
    if "fsdp2" in how:
        data = mesh["data_parallel"]
        for name in layers:
            fully_shard(net.get_submodule(name), mesh=data)
        fully_shard(net, mesh=data)


def recomputing(net: nn.Sequential, x: Tensor) -> Tensor:
    """What it makes of ``x``; behind its first layer nothing is kept that the backward pass can compute again."""
    checkpoint = importlib.import_module("deepspeed").checkpointing.checkpoint
    first, *rest = net
    out: Tensor = checkpoint(nn.Sequential(*rest), first(x))
    return out


class Counting(torch.optim.SGD):
    """Keeps of each parameter what has another shape than it, and belongs to all of it."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            counts = self.state[parameter].setdefault("counts", torch.zeros(3))
            counts += 1
        return super().step(closure)


def make_optimizer(parameters: Any, name: str = "sgd", lr: float = 0.05) -> torch.optim.Optimizer:
    if name in ("adamw", "adamw, one by one"):  # on a GPU torch takes all at once, but not some spread and others not
        foreach = False if name == "adamw, one by one" else None
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, eps=ADAM_EPS, foreach=foreach)
    if name == "counting":
        return Counting(parameters, lr=lr)
    if name == "deepspeed adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, lr=lr, weight_decay=0.01, eps=ADAM_EPS)  # type: ignore[no-any-return]
    if name == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=lr)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return torch.optim.SGD(parameters, lr=lr)


def make_scheduler(optimizer: torch.optim.Optimizer, name: str) -> Any:
    if name == "exponential":
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    if name == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    raise ValueError(name)


def make_model(pl: ModuleType, **options: Any) -> Any:
    """A LightningModule of the given package.

    Options: ``width``, ``norm``, ``seed``, ``dtype``, ``frozen``, ``unreached`` (the network);
    ``optimizer``, ``lr``, ``scheduler``, ``interval``; ``optimizers`` (how many), ``manual``; ``nan_at``,
    ``inf_at``, ``raise_at`` (numbers of batches), ``scale_loss``, ``log_gradient_norm``; ``monitor_values`` (what
    validation logs, by global step); ``own_zero_grad``; ``parts`` (how the network is spread over ranks:
    ``"fsdp2"``, ``"tensor"``, ``"fsdp2 tensor"``; ``"wrap"``: by FSDP, by hand; or ``"recompute"``: not at all, but
    activations are checkpointed by DeepSpeed's own function); ``late``: made in ``configure_model``.
    """

    class Regression(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.options = options
            if not options.get("late"):
                self.make()
            if options.get("unreached"):  # by any loss
                self.unreached = nn.Linear(3, 3)
                nn.init.constant_(self.unreached.weight, 1.0)
                nn.init.constant_(self.unreached.bias, 1.0)
            self.batches_seen = 0
            self.automatic_optimization = not options.get("manual", False)
            self.before_batch: Any = lambda batch: None

        def make(self) -> None:
            self.net = make_net(**{key: options[key] for key in NET if key in options})
            if "dtype" in options:
                self.net.to(getattr(torch, options["dtype"]))
            self.net[0].requires_grad_(not options.get("frozen", False))

        def configure_model(self) -> None:
            if options.get("late") and not hasattr(self, "net"):
                self.make()
            if options.get("parts") == "wrap":
                for name, layer in self.net.named_children():
                    self.net.set_submodule(name, wrap(layer))
            elif "parts" in options and options["parts"] != "recompute":
                spread(self.net, self.device_mesh, options["parts"])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            number, self.batches_seen = self.batches_seen, self.batches_seen + 1
            self.before_batch(batch)
            if number in options.get("raise_at", ()):
                raise RuntimeError(f"induced failure in batch {number}")
            x = batch["x"].to(getattr(torch, options["dtype"])) if "dtype" in options else batch["x"]
            out = recomputing(self.net, x) if options.get("parts") == "recompute" else self.net(x)
            loss = mse_loss(out, batch["y"].to(out.dtype))
            if number in options.get("nan_at", ()):
                loss = loss * float("nan")
            if number in options.get("inf_at", ()):
                loss = loss * 1e38 * 1e38
            loss = loss * options.get("scale_loss", 1.0)
            self.log("train_loss", loss, prog_bar=False)
            self.last_loss = loss.detach()
            return loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            values = options.get("monitor_values")
            x = batch["x"].to(getattr(torch, options["dtype"])) if "dtype" in options else batch["x"]
            value = mse_loss(self.net(x), batch["y"].to(self.net(x).dtype))
            if values:  # a metric that the test decides, by the number of committed steps
                value = torch.tensor(float(values[min(self.trainer.global_step, len(values) - 1)]))
            self.log("val_loss", value)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if options.get("log_gradient_norm"):
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                norm = torch.stack([one.norm() for one in gradients]).norm()
                self.log("gradient_norm", norm, sync_dist=True)

        def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("test_loss", mse_loss(self.net(batch["x"]), batch["y"]))

        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            out: Tensor = self.net(batch["x"])
            return out

        def configure_optimizers(self) -> Any:
            name, lr = options.get("optimizer", "sgd"), options.get("lr", 0.05)
            optimizers = [make_optimizer(self.net.parameters(), name, lr) for _ in range(options.get("optimizers", 1))]
            if len(optimizers) > 1:
                return optimizers
            if "scheduler" not in options:
                return optimizers[0]
            scheduler = make_scheduler(optimizers[0], options["scheduler"])
            settings = {"scheduler": scheduler, "interval": options.get("interval", "step"), "monitor": "val_loss"}
            return {"optimizer": optimizers[0], "lr_scheduler": settings}

    class WithOwnZeroGrad(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)

    return (WithOwnZeroGrad if options.get("own_zero_grad") else Regression)()


def pause(seconds: float) -> None:
    """Stand in for a slower device."""
    time.sleep(seconds)
