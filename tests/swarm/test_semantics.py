"""What Lightning's words mean in a swarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.checks import assert_complete, assert_ledger
from swarm.harness import START_S, Peer, Swarm
from swarm.marks import ANY_ENGINE, HIVEMIND_ONLY
from swarm.spec import PeerSpec

pytestmark = [pytest.mark.swarm, pytest.mark.above_engines]


def alone(swarm: Swarm, **fields: Any) -> Peer:
    """One peer, run to its end; target of two batches unless said otherwise."""
    fields["strategy"] = {"target_batch_size": 16, **fields.get("strategy", {})}
    (peer,) = swarm.start(1, together=False, **fields)
    swarm.finish(peer)
    return peer


def refused(swarm: Swarm, **fields: Any) -> str:
    """The message with which a run is refused before anything was started."""
    peer = swarm.launch(PeerSpec(**fields))
    error = peer.wait_for("raised", timeout_s=START_S)
    assert error["kind"] == "ArgumentError", error["trace"]
    assert not peer.said("PeerStarted"), "the network was started for nothing"
    peer.wait_exit(code=1)
    return str(error["text"])


def test_global_step_counts_global_steps(swarm: Swarm) -> None:
    peer = alone(swarm, trainer={"max_steps": 3})
    assert [(c.epoch, c.global_step) for c in peer.commits.values()] == [(k, k) for k in range(4)]
    assert peer.said("finished")[0]["batches"] == 6
    assert [(one["epoch"], one["samples"]) for one in peer.said("RoundStarted")] == [(0, 16), (1, 16), (2, 16)]


def test_the_epoch_stays_readable_after_the_fit(swarm: Swarm) -> None:
    assert alone(swarm, trainer={"max_steps": 2}).said("finished")[0]["epoch"] == 2


@pytest.mark.each_engine
def test_max_steps_ends_all_peers_at_the_same_step_though_one_is_slower(swarm: Swarm) -> None:
    peers = swarm.start(2, peers=[{"delay_s": 0.02}, {"delay_s": 0.1}], trainer={"max_steps": 3})
    swarm.finish()
    assert [peer.said("finished")[0]["global_step"] for peer in peers] == [3, 3]
    assert_complete(peers, [1, 2, 3])
    assert_ledger(peers)


def test_max_epochs_counts_passes_over_this_peers_own_data(swarm: Swarm) -> None:
    peer = alone(swarm, trainer={"max_steps": -1, "max_epochs": 2}, data_samples=64)
    finished = peer.said("finished")[0]
    assert (finished["current_epoch"], finished["batches"], finished["global_step"]) == (2, 16, 8)


NOTES = """[type("Notes", (pl.Callback,), {
    "on_fit_start": lambda self, trainer, model: Path(spec.folder, "zero").write_text(str(trainer.is_global_zero)),
    "on_before_optimizer_step": lambda self, *_: Path(spec.folder, "steps").open("a").write("."),
})()]"""


def test_limits_count_batches_and_optimizer_hooks_global_steps(swarm: Swarm) -> None:
    limits = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 3, "num_sanity_val_steps": 0}
    limits |= {"check_val_every_n_epoch": 2}
    peer = alone(swarm, trainer=limits, trainer_code={"callbacks": NOTES})
    finished = peer.said("finished")[0]
    assert (finished["current_epoch"], finished["batches"], finished["global_step"]) == (2, 6, 3)
    assert (peer.folder / "steps").read_text() == "..."
    assert [one["batch"] for one in peer.said("validated")] == [6]


OWN_STEP = """[type("Own", (pl.Callback,), {"on_fit_start": lambda self, trainer, model: setattr(
    model, "optimizer_step", lambda epoch, index, optimizer, closure: %s
)})()]"""


@ANY_ENGINE
@pytest.mark.parametrize("reuse", [False, True], ids=["", "in place"])
def test_a_module_whose_optimizer_step_calls_the_closure_itself_contributes_all_the_same(
    swarm: Swarm, reuse: bool
) -> None:
    limits = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 8, "num_sanity_val_steps": 0}
    code, strategy = {"callbacks": OWN_STEP % "(closure(), optimizer.step())"}, {"reuse_grad_buffers": reuse}
    peer = alone(swarm, trainer=limits, trainer_code=code, strategy=strategy)
    assert peer.said("finished")[0]["global_step"] == 4
    assert not peer.said("BatchDropped")


@ANY_ENGINE
@pytest.mark.parametrize("reuse", [False, True], ids=["", "in place"])
def test_a_batch_whose_optimizer_step_is_left_out_is_dropped_and_told(swarm: Swarm, reuse: bool) -> None:
    """As one does in a plain Trainer to update at every second batch. The last ones are told of, too."""
    limits = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 16, "num_sanity_val_steps": 0}
    code = {"callbacks": OWN_STEP % "optimizer.step(closure) if index % 4 < 2 else closure()"}
    peer = alone(swarm, trainer=limits, trainer_code=code, strategy={"reuse_grad_buffers": reuse})
    dropped = peer.said("BatchDropped", reason="optimizer.step() was not called")
    assert (len(dropped), sum(one["samples"] for one in dropped)) == (8, 8 * 8)
    assert peer.said("finished")[0]["global_step"] == 4


@ANY_ENGINE
@pytest.mark.parametrize("reuse", [False, True], ids=["", "in place"])
def test_a_batch_whose_gradient_is_computed_twice_is_never_counted_with_the_sum(swarm: Swarm, reuse: bool) -> None:
    """A second closure (after "out of memory", say) begins anew, as in a plain Trainer; in place nothing clears."""
    limits = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 8, "num_sanity_val_steps": 0}
    code = {"callbacks": OWN_STEP % "(index % 4 or closure(), optimizer.step(closure))"}
    peer = alone(swarm, trainer=limits, trainer_code=code, strategy={"reuse_grad_buffers": reuse})
    dropped = [one["samples"] for one in peer.said("BatchDropped", reason="it has the sum of several backward passes")]
    assert dropped == ([8, 16] if reuse else [])  # in place, with those before it
    assert peer.said("finished")[0]["global_step"] == (2 if reuse else 4)


@ANY_ENGINE
def test_a_module_that_computes_every_gradient_twice_in_place_is_told_the_fix(swarm: Swarm) -> None:
    """After more batches in a row than a peer would compute again by chance (out of memory, say)."""
    limits = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 32, "num_sanity_val_steps": 0}
    (peer,) = swarm.start(
        1,
        together=False,
        trainer=limits,
        trainer_code={"callbacks": OWN_STEP % "(closure(), optimizer.step(closure))"},
        strategy={"target_batch_size": 16, "reuse_grad_buffers": True},
    )
    error = peer.wait_for("raised", timeout_s=START_S)
    assert error["kind"] == "ArgumentError", error["trace"]
    assert "Set reuse_grad_buffers=False" in error["text"]
    assert len(peer.said("BatchDropped")) == 9
    peer.wait_exit(code=1)


SWAPS = """[type("Swaps", (pl.Callback,), {
    "on_validation_start": lambda self, trainer, model: (
        setattr(self, "kept", [one.detach().clone() for one in model.parameters()]),
        [one.data.add_(1.0) for one in model.parameters()],
        Path(spec.folder, "gave").open("a").write(str(trainer.strategy._session.engine._copy_state(None) is None)),
    ),
    "on_validation_end": lambda self, trainer, model: [
        one.data.copy_(kept) for one, kept in zip(model.parameters(), self.kept)
    ],
    "on_train_batch_start": lambda self, trainer, *_: Path(spec.folder, "gave").open("a").write(
        "" if trainer.global_step < 2 else str(trainer.strategy._session.engine._copy_state(None) is None)[0]
    ),
})()]"""


@ANY_ENGINE
def test_what_a_callback_puts_into_the_model_to_validate_it_is_given_to_nobody(swarm: Swarm) -> None:
    limits = {"max_steps": 4, "val_check_interval": 4, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    peer = alone(swarm, trainer=limits, trainer_code={"callbacks": SWAPS})
    gave = (peer.folder / "gave").read_text()
    assert gave.startswith("True"), "given while it validates"
    assert "F" in gave.replace("False", "").replace("True", ""), "given again with the next batch"


STOPS = """[type("Stops", (pl.Callback,), {
    "on_train_batch_end": lambda self, trainer, *_: setattr(trainer, "should_stop", trainer.global_step >= 2),
})()]"""


@pytest.mark.parametrize("limit", [{"min_steps": 6}, {"min_epochs": 3}], ids=["steps", "passes"])
@pytest.mark.above_engines
def test_who_wants_to_stop_trains_at_least_what_it_was_told_to(swarm: Swarm, limit: dict[str, int]) -> None:
    limits = {"max_steps": 40, "max_epochs": -1, "limit_train_batches": 4, "num_sanity_val_steps": 0, **limit}
    peer = alone(swarm, trainer=limits, trainer_code={"callbacks": STOPS})
    assert peer.said("finished")[0]["global_step"] == 6


def test_max_time_ends_this_peer_only(swarm: Swarm) -> None:
    brief = {"trainer": {"max_steps": -1, "max_time": {"seconds": 4}}}
    first, second = swarm.start(2, peers=[brief, {}], trainer={"max_steps": -1}, delay_s=0.05)
    first.wait_exit()
    (finished,) = first.said("finished")
    assert finished["state"] == "finished"
    second.wait_epoch(max(second.commits) + 3)
    assert not second.said("StopRequested")


def test_val_check_interval_counts_this_peers_batches(swarm: Swarm) -> None:
    peer = alone(swarm, trainer={"max_steps": 6, "val_check_interval": 4, "num_sanity_val_steps": 0})
    assert [v["batch"] for v in peer.said("validated")] == [4, 8, 12]
    assert [v["global_step"] for v in peer.said("validated")] == [2, 4, 6]


def test_checkpoints_are_written_every_n_global_steps(swarm: Swarm) -> None:
    code = "[pl.callbacks.ModelCheckpoint(Path(spec.folder) / 'kept', every_n_train_steps=2, save_top_k=-1)]"
    peer = alone(swarm, trainer={"max_steps": 5, "enable_checkpointing": True}, trainer_code={"callbacks": code})
    files = sorted((peer.folder / "kept").glob("*.ckpt"))
    steps = [torch.load(path)["global_step"] for path in files]
    assert steps == [2, 4]


def test_the_learning_rate_monitor_sees_one_rate_per_global_step(swarm: Swarm) -> None:
    peer = alone(
        swarm,
        model={"scheduler": "exponential"},
        trainer={"max_steps": 4, "log_every_n_steps": 1},
        trainer_code={
            "callbacks": "[pl.callbacks.LearningRateMonitor('step')]",
            "logger": "pl.loggers.CSVLogger(spec.folder, name='csv', version=0)",
        },
    )
    lines = (peer.folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("lr-SGD")
    rates = sorted({float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]}, reverse=True)
    assert rates[:4] == pytest.approx([0.05 * 0.9**k for k in range(4)])
    assert [c.lr for c in peer.commits.values()] == pytest.approx([0.05 * 0.9**k for k in range(5)])


@pytest.mark.each_engine
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_advances_once_per_global_step(swarm: Swarm, interval: str) -> None:
    peers = swarm.start(
        2, model={"scheduler": "exponential", "interval": interval}, trainer={"max_steps": 3}, delay_s=0.02
    )
    swarm.finish()
    for peer in peers:
        assert [peer.commits[k].lr for k in range(4)] == pytest.approx([0.05 * 0.9**k for k in range(4)])
        assert ("it advances once per 1 global step(s)" in peer.output) == (interval == "epoch")


@ANY_ENGINE
def test_accumulate_grad_batches_is_refused_with_the_fix(swarm: Swarm) -> None:
    text = refused(swarm, trainer={"accumulate_grad_batches": 2})
    assert "accumulate_grad_batches=2" in text
    assert "target_batch_size" in text


@ANY_ENGINE
def test_a_gradient_accumulation_scheduler_is_refused(swarm: Swarm) -> None:
    code = "[pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})]"
    assert "target_batch_size" in refused(swarm, trainer_code={"callbacks": code})


@ANY_ENGINE
def test_several_optimizers_are_refused(swarm: Swarm) -> None:
    """Lightning allows them in manual optimization only, and says so; in a swarm that is no fix."""
    assert "optimizer" in refused(swarm, model={"optimizers": 2, "manual": True})
    assert "exactly one" in refused(swarm, model={"optimizers": 2})


@ANY_ENGINE
def test_manual_optimization_is_refused(swarm: Swarm) -> None:
    assert "automatic_optimization=False" in refused(swarm, model={"manual": True})


@ANY_ENGINE
def test_reduce_on_plateau_is_refused(swarm: Swarm) -> None:
    assert "ReduceLROnPlateau" in refused(swarm, model={"scheduler": "plateau"})


@HIVEMIND_ONLY
def test_several_devices_are_refused_by_hivemind(swarm: Swarm) -> None:
    assert "devices" in refused(swarm, ranks=2)


def test_a_swarm_metric_is_weighted_by_samples(swarm: Swarm) -> None:
    """Two peers publish 1.0 over 10 and 4.0 over 30 samples; both then read 3.25, and so does what watches logs."""
    peers = swarm.start(
        2,
        peers=[{"free": {"metric": [1.0, 10]}}, {"free": {"metric": [4.0, 30]}}],
        trainer={"max_steps": -1},
        delay_s=0.05,
    )
    for peer in peers:
        peer.wait_for("metric", value=3.25)
        peer.wait_for("metric", logged=3.25)


@ANY_ENGINE
def test_a_batch_of_unknown_size_is_refused_with_the_fix(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:batch_without_size"))
    error = peer.wait_for("raised", timeout_s=START_S)
    assert error["kind"] == "ArgumentError", error["trace"]
    assert "batch_size=" in error["text"]
    peer.wait_exit(code=1)


@ANY_ENGINE
def test_an_optimizer_that_evaluates_the_loss_itself_is_refused(swarm: Swarm) -> None:
    assert "LBFGS" in refused(swarm, model={"optimizer": "lbfgs"})


@ANY_ENGINE
def test_complex_parameters_are_refused_by_name(swarm: Swarm) -> None:
    assert "net.0.weight has dtype torch.complex64" in refused(swarm, model={"dtype": "complex64"})


@ANY_ENGINE
def test_an_event_file_that_cannot_be_written_is_refused(swarm: Swarm) -> None:
    text = refused(swarm, env={"LIGHTNING_HIVEMIND_EVENTS": str(swarm.folder)})
    assert str(swarm.folder) in text


def test_sparse_gradients_are_averaged_as_dense_ones(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:sparse_gradients"))
    found = peer.wait_for("trained", timeout_s=START_S)
    peer.wait_exit()
    assert found["sparse"] == found["dense"]
    assert found["sparse"] != found["initial"]


def test_batch_size_counts_batches_of_unknown_size(swarm: Swarm) -> None:
    peer = swarm.launch(
        PeerSpec(scenario="swarm.scenarios:batch_without_size", strategy={"batch_size": 3, "target_batch_size": 6})
    )
    peer.wait_for("trained", timeout_s=START_S)
    peer.wait_exit()
    written = [json.loads(line) for line in (peer.folder / "events.jsonl").read_text().splitlines()]
    assert [event["batch_samples"] for event in written if event["event"] == "BatchAccumulated"] == [3, 3]
    assert [event["samples"] for event in written if event["event"] == "EpochCommitted"] == [6]


def test_every_peer_is_global_zero_and_writes_its_own_files(swarm: Swarm) -> None:
    peers = swarm.start(
        2,
        trainer={"max_steps": 1, "log_every_n_steps": 1},
        trainer_code={"logger": "pl.loggers.CSVLogger(spec.folder, name='csv', version=0)", "callbacks": NOTES},
        delay_s=0.02,
    )
    swarm.finish()
    assert all(Path(peer.folder, "csv", "version_0", "metrics.csv").exists() for peer in peers)
    assert all((peer.folder / "zero").read_text() == "True" for peer in peers)
