"""What runs inside the processes of a swarm test: an ordinary Lightning script, and the records that it leaves."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from swarm.models import make_loader, make_model, pause
from swarm.ports import free_port
from swarm.spec import PeerSpec, file_of
from swarm.wholes import in_parts, wholes

HOLD_S = 120.0


def main(folder: str) -> None:
    """Entry of every peer: load the spec and run its scenario."""
    spec = PeerSpec.load(Path(folder) / "spec.json")
    if spec.ranks > 1:
        fork_ranks(spec.ranks)
        Recorder(spec).write("started", pid=os.getpid())
    torch.set_num_threads(spec.free.get("threads", 1))
    module, _, function = spec.scenario.partition(":")
    run = getattr(importlib.import_module(module), function)
    try:
        run(spec)
    except BaseException as error:
        Recorder(spec).write("raised", kind=type(error).__name__, text=str(error), trace=traceback.format_exc())
        raise


def fork_ranks(count: int) -> None:
    """Make this process rank 0 of so many, as a launcher would."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "LOCAL_RANK": "0"}
    os.environ["WORLD_SIZE"] = str(count)
    for rank in range(1, count):
        if os.fork() == 0:
            os.environ["LOCAL_RANK"] = str(rank)
            return


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


class Recorder:
    """Appends records to the file that the harness reads."""

    def __init__(self, spec: PeerSpec) -> None:
        path = Path(spec.folder) / file_of(local_rank(), "records.jsonl")
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, "time": time.time(), **fields}, default=str) + "\n")


class Batch(NamedTuple):
    """Indices of its samples, and of which epoch the parameters were that it saw."""

    indices: list[int]
    epoch: int


class Ledger:
    """Which samples are in which step, read off the order of the events (they come in the training thread)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.pending: list[Batch] = []
        self.lost: list[Batch] = []
        self.of_epoch: dict[int, tuple[list[Batch], list[Batch]]] = {}
        self.adopted: set[int] = set()
        self.on_commit: Callable[[int], None] = lambda epoch: None

    def take(self, indices: list[int], epoch: int) -> None:
        self.pending.append(Batch(indices, epoch))

    def on_event(self, event: Any) -> None:
        values = event.as_dict()
        self._recorder.write(values.pop("event"), **{**values, "thread": threading.current_thread().name})
        kind = type(event).__name__
        if kind == "EpochCommitted":
            self.close(event.epoch, event.samples)
            self.on_commit(event.epoch)
        elif kind == "BatchDropped":  # the newest batch, and with reused buffers those before it
            dropped = 0
            while dropped < event.samples:
                dropped += len(self.pending[-1].indices)
                self.lost.append(self.pending.pop())
        elif kind == "RoundMissed":
            self.lost += self._oldest(event.samples_lost)
        elif kind == "StateLoaded":
            self.adopted.add(event.epoch)

    def close(self, epoch: int, samples: int | None = None) -> None:
        """The oldest ``samples`` (None: all) were in the step that led to ``epoch``."""
        of_epoch = self._oldest(count(self.pending) if samples is None else samples)
        self.of_epoch[epoch], self.lost = (of_epoch, self.lost), []

    def _oldest(self, samples: int) -> list[Batch]:
        taken: list[Batch] = []
        while self.pending and count(taken) < samples:
            taken.append(self.pending.pop(0))
        return taken


def count(batches: list[Batch]) -> int:
    return sum(len(batch.indices) for batch in batches)


def digest_of(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 of all parameters, or buffers, bit for bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(named):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_parameters(spec: PeerSpec, model: torch.nn.Module, epoch: int | str) -> None:
    """For the tests that compare within a tolerance; see ``Peer.parameters``."""
    flat = torch.cat([p.detach().cpu().double().flatten() for _, p in wholes(model)])
    np.save(Path(spec.folder) / file_of(local_rank(), f"parameters_{epoch}.npy"), flat.numpy())


def save_common(spec: PeerSpec, strategy: Any, epoch: int) -> None:
    """What all peers have after a round, and each has moved on from, as ``parameters("common_<epoch>")``."""
    engine = strategy._session.engine
    stepper = getattr(engine, "_engine", engine)._stepper
    flat = torch.cat([one.double().flatten() for one in stepper.statistics.base])
    np.save(Path(spec.folder) / f"parameters_common_{epoch}.npy", flat.numpy())


def packages(spec: PeerSpec) -> ModuleType:
    """The Lightning package that this peer's script uses."""
    if spec.lightning == "both":
        importlib.import_module("pytorch_lightning")
    return importlib.import_module(
        "pytorch_lightning" if spec.lightning == "pytorch_lightning" else "lightning.pytorch"
    )


def evaluate(code: dict[str, str], pl: ModuleType, spec: PeerSpec) -> dict[str, Any]:
    """Arguments that are no plain values (codecs, factories, callbacks), written as a user would write them."""
    names: dict[str, Any] = {"torch": torch, "functools": functools, "partial": functools.partial, "pl": pl}
    names |= {"spec": spec, "Path": Path}
    if any("Compression" in text or "Quantization" in text for text in code.values()):
        compression = importlib.import_module("hivemind.compression")
        names |= {name: getattr(compression, name) for name in dir(compression) if name[0].isupper()}
        names["ours"] = importlib.import_module("lightning_hivemind.codecs")
    if any("DiesInARound" in text for text in code.values()):
        names["DiesInARound"] = importlib.import_module("swarm.faults").DiesInARound
    if any("CheckpointAtBatch(" in text for text in code.values()):
        names["CheckpointAtBatch"] = make_checkpoint_at_batch(pl)
    if any("DiLoCo(" in text for text in code.values()):
        ours = importlib.import_module("lightning_hivemind")
        names |= {"DiLoCo": ours.DiLoCo, "StreamingDiLoCo": ours.StreamingDiLoCo}
    if any("hooked(" in text or "OnCpus" in text for text in code.values()):
        hooks = importlib.import_module("swarm.hooks")
        names |= {name: getattr(hooks, name) for name in ("hooked", "OnCpus", "FsdpOnCpus", "ZeroOnCpus")}
    if any("PowerSGD" in text for text in code.values()):
        module = importlib.import_module("hivemind.optim.power_sgd_averager")
        names["PowerSGDGradientAverager"] = module.PowerSGDGradientAverager
    return {name: eval(text, names) for name, text in code.items()}


def make_checkpoint_at_batch(pl: ModuleType) -> type:
    """A callback that saves a checkpoint after so many batches of the whole fit."""

    class CheckpointAtBatch(pl.Callback):  # type: ignore[misc,name-defined]
        def __init__(self, batch: int, path: str) -> None:
            self.batch, self.path = batch, path

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == self.batch:
                trainer.save_checkpoint(self.path)

    return CheckpointAtBatch


def make_strategy(spec: PeerSpec, pl: ModuleType, **more: Any) -> Any:
    """HivemindStrategy as the spec wants it, with all events recorded."""
    from lightning_hivemind import HivemindStrategy

    arguments = {"target_batch_size": 32, "engine": spec.engine, **(spec.strategy or {}), **more}
    return HivemindStrategy(**{**arguments, **evaluate(spec.strategy_code, pl, spec)})


def make_trainer(spec: PeerSpec, pl: ModuleType, strategy: Any, recorder: Recorder, ledger: Ledger) -> Any:
    defaults = {
        "accelerator": "cpu",
        "devices": spec.ranks,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": 5,
        "default_root_dir": spec.folder,
    }
    arguments = {**defaults, **spec.trainer, **evaluate(spec.trainer_code, pl, spec)}
    recording = make_recording(pl, spec, strategy, recorder, ledger)
    arguments["callbacks"] = [*arguments.get("callbacks", []), recording]
    if "batches_of_ranks" in spec.free:
        arguments["limit_train_batches"] = spec.free["batches_of_ranks"][local_rank()]
    if strategy is not None:
        arguments["strategy"] = strategy
    return pl.Trainer(**arguments)


def train(spec: PeerSpec) -> None:
    """The default scenario: fit, and record every step."""
    fit(spec)


def fit(spec: PeerSpec) -> tuple[Any, Any]:
    """Build everything and fit; returns trainer and model."""
    pl = packages(spec)
    recorder = Recorder(spec)
    ledger = Ledger(recorder)
    strategy = None
    if spec.strategy is not None:
        strategy = make_strategy(spec, pl)
        strategy.events.subscribe(ledger.on_event)
        measure_leaving(strategy, recorder)
    trainer = make_trainer(spec, pl, strategy, recorder, ledger)
    empty = trainer.init_module(empty_init=True) if spec.free.get("empty_init") else contextlib.nullcontext()
    with empty:
        model = make_model(pl, **spec.model)
    model.before_batch = BeforeBatch(spec, trainer, strategy, recorder, ledger)
    loader = make_loader(spec.data_samples, spec.batch_size, spec.order_seed)
    validation = make_loader(32, 32, None)
    trainer.fit(model, loader, validation, ckpt_path=spec.ckpt_path)
    save_parameters(spec, model, -1)
    if spec.free.get("save_to"):
        trainer.save_checkpoint(spec.free["save_to"])
    if spec.free.get("tests"):
        (result,) = trainer.test(model, make_loader(32, 8, None), ckpt_path=spec.free["save_to"], verbose=False)
        recorder.write("tested", digest=digest_of(wholes(model)), **result)
    recorder.write("finished", **summary(trainer, strategy, model))
    return trainer, model


def record_gathers(strategy: Any, recorder: Recorder) -> None:
    """Record each time something in parts is put together for the engine: ``gathered`` and ``gathered_sum``."""
    refresh, sums = strategy.peer_model.refresh, strategy.peer_model.sums

    def recorded(what: Any) -> None:
        recorder.write("gathered", what=int(what))
        refresh(what)

    strategy.peer_model.refresh = recorded
    if sums is not None:
        gather = sums.gather

        def recorded_sum(whole: Any) -> Any:
            recorder.write("gathered_sum")
            return gather(whole)

        sums.gather = recorded_sum


def measure_leaving(strategy: Any, recorder: Recorder) -> None:
    """Record how long the strategy's teardown takes: ``left``."""
    teardown = strategy.teardown

    def measured() -> None:
        began = time.monotonic()
        try:
            teardown()
        finally:
            recorder.write("left", duration_s=time.monotonic() - began)

    strategy.teardown = measured


def settings_in_hivemind(strategy: Any) -> dict[str, Any]:
    """What hivemind's own objects of a running fit hold of the arguments."""
    parts = strategy._session.engine._parts
    tracker, dht = parts.tracker, strategy.dht
    found: dict[str, Any] = {
        "tracker": {name: getattr(tracker, name) for name in ("max_refresh_period", "metadata_expiration")},
        "speed": [one.alpha for one in (tracker.performance_ema, parts.state.delay_before_averaging)],
        "dht": {name: dht.kwargs[name] for name in ("wait_timeout", "bootstrap_timeout")},
    }
    for name, averager in (("grads", parts.grads), ("state", parts.state)):
        found[name] = {
            "matchmaking_time": averager.matchmaking_kwargs["min_matchmaking_time"],
            "target_group_size": averager.matchmaking_kwargs["target_group_size"],
            "allreduce_timeout": averager._allreduce_timeout,
            "sender_timeout": averager.allreduce_kwargs["sender_timeout"],
            "shutdown_timeout": averager.shutdown_timeout,
        }
    return found


def settings_in_the_native_engine(strategy: Any) -> dict[str, Any]:
    """What its parts hold of the arguments in a running fit."""
    engine, dht = strategy._session.engine, strategy.dht
    rounds = engine._parts.driver._peer._settings
    return {
        "dht": {name: dht.kwargs[name] for name in ("wait_timeout", "bootstrap_timeout")},
        "rounds": {name: getattr(rounds, name) for name in ("matchmaking_s", "stall_s", "round_s")},
        "donor_silence_s": engine._parts.downloads._silence_s,
        "training_waits_s": engine._limit_s,
    }


def summary(trainer: Any, strategy: Any, model: Any) -> dict[str, Any]:
    epoch = trainer.global_step if strategy is None else strategy.global_epoch
    extra = [] if strategy is None else [tensor.tolist() for tensor in strategy.arguments.extra_tensors]
    return {
        "extra_tensors": extra,
        "zero_grad": [name for name in ("zero_grad", "optimizer_zero_grad") if name in vars(model)],
        "global_step": trainer.global_step,
        "epoch": epoch,
        "current_epoch": trainer.current_epoch,
        "digest": digest_of(wholes(model)),
        "batches": model.batches_seen,
        "state": str(trainer.state.status.value),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


class BeforeBatch:
    """Called by the model at the start of each training step: barrier, ledger, delay."""

    def __init__(self, spec: PeerSpec, trainer: Any, strategy: Any, recorder: Recorder, ledger: Ledger) -> None:
        self._spec, self._trainer, self._strategy = spec, trainer, strategy
        self._recorder, self._ledger = recorder, ledger
        self._number = 0

    def __call__(self, batch: dict[str, Any]) -> None:
        spec, number = self._spec, self._number
        if number == spec.free.get("barrier_batch", 1) and spec.barrier:
            if local_rank() == 0:
                wait(lambda: self._strategy.num_peers >= spec.min_peers, f"{spec.min_peers} peers are seen")
            self._recorder.write("at_barrier", num_peers=self._strategy.num_peers)
            wait((Path(spec.folder) / "go").exists, "the test lets this peer go")
        self._number += 1
        if "metric" in spec.free:
            value, samples = spec.free["metric"][local_rank()] if spec.ranks > 1 else spec.free["metric"]
            logged = self._trainer.callback_metrics.get("of_the_swarm")
            mean = self._strategy.swarm_mean("metric", value, samples)
            self._trainer.lightning_module.log("of_the_swarm", mean)
            self._recorder.write("metric", value=mean, logged=None if logged is None else float(logged))
        if spec.free.get("stops_at", [None])[0] == local_rank():
            self._trainer.should_stop |= now_at(self._trainer, self._strategy) >= spec.free["stops_at"][1]
        if "record_scale" in spec.free:
            self._recorder.write("scale", value=self._strategy.precision_plugin.scaler.get_scale())
        if number == 0 and "record_settings" in spec.free:
            read = settings_in_hivemind if spec.engine == "hivemind" else settings_in_the_native_engine
            self._recorder.write("settings", **read(self._strategy))
        if number == 0 and "count_gathers" in spec.free:
            record_gathers(self._strategy, self._recorder)
        if number == 1 and "move_parameters" in spec.free:
            with torch.no_grad():
                for parameter in self._trainer.lightning_module.parameters():
                    parameter.add_(spec.free["move_parameters"])
        if number and "rounds_unlike" in spec.free:  # as another processor would in every step
            with torch.no_grad():
                next(self._trainer.lightning_module.parameters()).mul_(1 + 2**-22)
        if number == 1 and "extra_value" in spec.free:
            self._strategy.arguments.extra_tensors[0].fill_(spec.free["extra_value"])
        self._ledger.take(indices_of_all_ranks(batch, self._trainer), now_at(self._trainer, self._strategy))
        if spec.delay_s and number >= spec.delay_from_batch:
            pause(spec.delay_s)


def indices_of_all_ranks(batch: dict[str, Any], trainer: Any) -> list[int]:
    """Of the samples that this peer has in a batch: those of a group of tensor-parallel ranks once."""
    mine = batch["index"].tolist()
    if not torch.distributed.is_initialized():
        return list(mine)
    place = trainer.strategy.distributed_sampler_kwargs["rank"]
    found: list[tuple[int, list[int]]] = [(0, [])] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (place, mine))
    return [index for one in dict(found).values() for index in one]


def wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + HOLD_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {HOLD_S:.0f} s still not: {what}")
        time.sleep(0.02)


def now_at(trainer: Any, strategy: Any) -> int:
    """Global steps so far."""
    return int(trainer.global_step if strategy is None else strategy.global_epoch)


def make_recording(pl: ModuleType, spec: PeerSpec, strategy: Any, recorder: Recorder, ledger: Ledger) -> Any:
    """The callback that writes ``commit`` after each batch that brought a step, and ``step`` at each step itself."""

    class Recording(pl.Callback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.epoch: int | None = None
            self.at_steps: set[int] = set()

        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            if self.epoch is None:  # where this peer starts: a fresh model, a checkpoint, or the swarm's state
                self.epoch = now_at(trainer, strategy)
                self.write("commit", trainer, model, self.epoch)
                if spec.engine == "native":  # may make two steps between two batches
                    ledger.on_commit = lambda epoch: self.write("step", trainer, model, epoch)

        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if spec.free.get("raises_after") == [local_rank(), model.batches_seen]:
                raise RuntimeError(f"induced failure after batch {model.batches_seen}")
            epoch = now_at(trainer, strategy)
            if strategy is None and epoch != self.epoch:
                ledger.close(epoch)
            if epoch != self.epoch:
                self.epoch = epoch
                self.write("commit", trainer, model, epoch)
                if epoch in spec.hold_at:
                    recorder.write("holding", epoch=epoch)
                    wait((Path(spec.folder) / f"release_{epoch}").exists, f"the test releases epoch {epoch}")

        def write(self, event: str, trainer: Any, model: Any, epoch: int) -> None:
            samples, lost = ledger.of_epoch.get(epoch, ([], []))
            if "record_state" in spec.free and trainer.optimizers:
                found = [state.get(spec.free["record_state"]) for state in trainer.optimizers[0].state.values()]
                total = sum(float(tensor.double().sum()) for tensor in found if tensor is not None)
                recorder.write("optimizer_state", epoch=epoch, sum=total)
            # with local updates the batch after a step that was made just before it has moved them on
            moves_on = strategy is not None and strategy.arguments.use_local_updates
            parts = in_parts(model)  # of which only rank 0 hears of a step when it is made
            known = event == "commit" or not parts
            if known and (parts or event == "step" or epoch not in self.at_steps or not moves_on):
                save_parameters(spec, model, epoch)
            if event == "step":
                self.at_steps.add(epoch)
                if strategy.arguments.outer is not None:
                    save_common(spec, strategy, epoch)
            recorder.write(
                event,
                epoch=epoch,
                digest=digest_of(wholes(model)) if known else "",
                buffers=digest_of(model.named_buffers()),
                samples=[batch.indices for batch in samples],
                of=[batch.epoch for batch in samples],
                lost=[batch.indices for batch in lost],
                lr=trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0.0,
                global_step=trainer.global_step,
                adopted=epoch in ledger.adopted,
                loss=float(getattr(model, "last_loss", float("nan"))),
            )

        def on_validation_end(self, trainer: Any, model: Any) -> None:
            if not trainer.sanity_checking:
                save_parameters(spec, model, f"validated_{model.batches_seen}")
                recorder.write(
                    "validated",
                    epoch=now_at(trainer, strategy),
                    global_step=trainer.global_step,
                    batch=model.batches_seen,
                    digest=digest_of(wholes(model)),
                )

        def on_exception(self, trainer: Any, model: Any, exception: BaseException) -> None:
            recorder.write("exception", kind=type(exception).__name__, text=str(exception))

    return Recording()


if __name__ == "__main__":
    main(sys.argv[1])
