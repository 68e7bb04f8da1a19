"""One process of one turn. The files in its folder are all that it shares with the others.

Every kind trains the same module on the same endless batch with plain SGD. Whoever starts a turn reads
``marks-*.jsonl`` (global steps), ``events-*.jsonl`` or ``outcomes-*.jsonl`` (what averaging said) and ``window.json``
(the measurement).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from bench_led import note_rounds
from bench_machine import cpu_seconds_below
from bench_spec import WIDTH, TurnSpec, outcomes_of

PATIENCE_S = 90.0
SETTLE_S = 20.0  # peers that have not met by now are measured as they are
RUN_ID = "bench"


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same batch for ever: loading data is not what is measured."""

    def __init__(self, spec: TurnSpec) -> None:
        self._batch = torch.randn(spec.batch_samples, WIDTH if spec.layers else 10)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self._batch


class Module(L.LightningModule):
    """A stack of linear layers; its computation is negligible beside the bytes of its gradient."""

    def __init__(self, spec: TurnSpec) -> None:
        super().__init__()
        self._batch_s = spec.batch_s
        sizes = [(WIDTH, WIDTH)] * spec.layers or [(10, 1)]
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in sizes))
        for layer in self.layers:  # torch's own nearly halve what they are given: behind a hundred of them it is zeros
            torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def training_step(self, batch: torch.Tensor, batch_idx: int = 0) -> torch.Tensor:
        time.sleep(self._batch_s)
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Meter:
    """Writes one mark per global step; that of peer 0 opens and closes the measured window."""

    def __init__(self, folder: Path, index: int, spec: TurnSpec) -> None:
        self._folder, self._index, self._spec = folder, index, spec
        self._marks = open(folder / f"marks-{index}.jsonl", "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - until the end
        self._epoch, self._samples, self._count = 0, 0, 0
        self._starter = os.getppid()  # all peers and what they start are below it
        self._began = time.time()
        self._opened: dict[str, float] | None = None
        self._closed = False

    def wait_for_all(self) -> None:
        """Come back once every peer is here."""
        self._touch("ready")
        wait_for(lambda: self._all("ready"), "the other peers to be ready")
        self._began = time.time()

    def batch(self, epoch: int, wait_s: float | None = None) -> None:
        """After every batch: ``epoch`` is the number of global steps so far, ``wait_s`` what averaging took."""
        self._samples += self._spec.batch_samples
        if epoch == self._epoch:
            return
        sent = sent_bytes("line" if self._spec.uplink_mbit_s else "lo")
        mark: dict[str, float] = {"time": time.time(), "epoch": epoch, "samples": self._samples, "sent": sent}
        if wait_s is not None:
            mark["wait_s"] = wait_s
        self._marks.write(json.dumps(mark) + "\n")
        self._epoch, self._samples = epoch, 0
        self._count += 1
        if self._count == self._spec.warm:
            self._touch("warm")
        if self._index == 0 and not self._closed:
            self._window(mark)

    def _window(self, mark: dict[str, float]) -> None:
        if self._opened is None:
            if self._all("warm") and (self._met() or mark["time"] - self._began > SETTLE_S):
                self._opened = {**mark, "cpu_s": cpu_seconds_below(self._starter), "starter": self._starter}
                publish(self._folder / "opened.json", json.dumps(self._opened))
            return
        first = self._opened
        if mark["epoch"] - first["epoch"] < self._spec.steps and mark["time"] - first["time"] < self._spec.window_s:
            return
        self._closed = True
        window = {"first": first, "last": {**mark, "cpu_s": cpu_seconds_below(self._starter)}}
        publish(self._folder / "window.json", json.dumps(window))

    def _met(self) -> bool:
        """Whether there was a round with all peers: a cold start is not what is measured."""
        outcomes = outcomes_of(self._spec, self._folder, self._index)
        return not self._spec.swarm or any(one["contributors"] == self._spec.peers for one in outcomes)

    def _touch(self, what: str) -> None:
        (self._folder / f"{what}-{self._index}").touch()

    def _all(self, what: str) -> bool:
        return all((self._folder / f"{what}-{index}").exists() for index in range(self._spec.peers))


class MeterCallback(L.Callback):
    """Feeds a :class:`Meter` from a Trainer."""

    def __init__(self, meter: Meter, epoch: Callable[[L.Trainer], int], wait_s: Callable[[], float | None]) -> None:
        self._meter, self._epoch, self._wait_s = meter, epoch, wait_s

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._meter.wait_for_all()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._meter.batch(self._epoch(trainer), self._wait_s())


class AllReduceSpan:
    """DDP's own all-reduce as a hook that notes when the first bucket of a step left and the last one was back."""

    def __init__(self) -> None:
        self._begin, self._end = 0.0, 0.0

    def __call__(self, bucket: Any) -> Any:
        if bucket.index() == 0:
            self._begin = time.monotonic()
        tensor = bucket.buffer().div_(torch.distributed.get_world_size())
        work = torch.distributed.all_reduce(tensor, async_op=True)
        return work.get_future().then(self._finished)

    def _finished(self, future: Any) -> torch.Tensor:
        self._end = time.monotonic()
        tensor: torch.Tensor = future.value()[0]
        return tensor

    def seconds(self) -> float:
        return self._end - self._begin


class DdpMeterCallback(MeterCallback):
    """The same for DDP, whose hook is given to its wrapper directly: Lightning drops hooks on the CPU."""

    def __init__(self, meter: Meter, span: AllReduceSpan | None) -> None:
        super().__init__(meter, lambda trainer: int(trainer.global_step), span.seconds if span else lambda: None)
        self._span = span

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self._span is not None:
            wrapper: Any = trainer.strategy.model
            span = self._span
            wrapper.register_comm_hook(None, lambda state, bucket: span(bucket))
        super().on_train_batch_start(trainer, module, batch, batch_idx)


def sent_bytes(name: str) -> int:
    """What has left through an interface so far. (TCP's and IP's headers count once for what is sent at once.)"""
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            return int(counters.split()[8])
    raise RuntimeError(f"there is no interface {name}")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s for {what}")
        time.sleep(0.02)


def publish(path: Path, text: str) -> None:
    """Write a file that others wait for: it is there as a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def first_peers(folder: Path, index: int) -> list[str]:
    """Addresses of peer 0, once it has published them; none for peer 0 itself."""
    if index == 0:
        return []
    path = folder / "address"
    wait_for(path.exists, "the address of peer 0")
    return path.read_text(encoding="utf-8").split(",")


def fit(spec: TurnSpec, strategy: Any, callback: L.Callback) -> None:
    trainer = L.Trainer(
        strategy=strategy,
        devices=spec.peers if spec.kind == "ddp" else 1,
        accelerator="cpu",
        accumulate_grad_batches=1 if spec.swarm else spec.batches,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(spec), torch.utils.data.DataLoader(Batches(spec), batch_size=None))


def train_ours(spec: TurnSpec, folder: Path, index: int, meter: Meter) -> None:
    import lightning_hivemind

    options = {"engine": "hivemind", **spec.options}  # bench_plan.native() names the other one
    if spec.codec:
        options["grad_compression"] = getattr(lightning_hivemind, spec.codec)()
    if spec.uplink_mbit_s:
        note_rounds(folder / f"led-{index}.jsonl")
    peers = first_peers(folder, index)
    strategy = lightning_hivemind.HivemindStrategy(
        target_batch_size=spec.target_samples,
        run_id=RUN_ID,
        initial_peers=peers,
        host_maddrs=[f"/ip4/{os.environ.get('BENCH_ADDRESS', '127.0.0.1')}/tcp/0"],
        **options,
    )
    if not peers:
        publish(folder / "address", ",".join(map(str, strategy.dht.get_visible_maddrs())))
    fit(spec, strategy, MeterCallback(meter, lambda trainer: strategy.global_epoch, lambda: None))


def train_ddp(spec: TurnSpec, folder: Path, index: int, meter: Meter) -> None:
    callback = DdpMeterCallback(meter, AllReduceSpan() if spec.layers else None)
    fit(spec, DDPStrategy(process_group_backend="gloo"), callback)


def train_alone(spec: TurnSpec, folder: Path, index: int, meter: Meter) -> None:
    fit(spec, "auto", MeterCallback(meter, lambda trainer: int(trainer.global_step), lambda: None))


def observe_rounds(path: Path, averager: str) -> None:
    """Let every ``"grad_averager"`` or ``"state_averager"`` made from now on say how its rounds ended."""
    from hivemind.averaging import DecentralizedAverager

    from lightning_hivemind.engine.stock.averagers import received_share

    original = DecentralizedAverager._run_allreduce_inplace_

    async def observed(self: Any, tensors: Any, group_info: Any, group_id: Any = None, **kwargs: Any) -> None:
        future = self._running_groups[group_info.group_id if group_id is None else group_id]
        await original(self, tensors, group_info, group_id=group_id, **kwargs)
        if self.prefix.endswith(averager):
            outcome = {
                "time": time.time(),
                "contributors": len(group_info.peer_ids),
                "fraction": received_share(future.result()),
            }
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")

    DecentralizedAverager._run_allreduce_inplace_ = observed


def train_stock(spec: TurnSpec, folder: Path, index: int, meter: Meter) -> None:
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager

    options = dict(spec.options)
    averager = "state_averager" if options.get("use_local_updates") else "grad_averager"
    observe_rounds(folder / f"outcomes-{index}.jsonl", averager)
    if "target_group_size" in options:  # averager_opts reach only the averager of the state
        size = {"target_group_size": options.pop("target_group_size")}
        options.update(averager_opts=size, grad_averager_factory=partial(GradientAverager, **size))
    peers = first_peers(folder, index)
    dht = hivemind.DHT(start=True, initial_peers=peers or None, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if not peers:
        publish(folder / "address", ",".join(map(str, dht.get_visible_maddrs())))
    module = Module(spec)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=RUN_ID,
        target_batch_size=spec.target_samples,
        batch_size_per_step=spec.batch_samples,
        optimizer=module.configure_optimizers(),
        **options,
    )
    meter.wait_for_all()
    for batch in Batches(spec):
        optimizer.zero_grad()
        torch.autograd.backward(module.training_step(batch))
        start = time.monotonic()
        optimizer.step()
        meter.batch(optimizer.local_epoch, time.monotonic() - start)


def main(folder: Path, index: int) -> None:
    """Train until somebody ends this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spec = TurnSpec.load(folder / "spec.json")
    kinds = {"ours": train_ours, "ddp": train_ddp, "alone": train_alone, "stock": train_stock}
    kinds[spec.kind](spec, folder, index, Meter(folder, index, spec))
