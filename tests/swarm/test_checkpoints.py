"""Stop, continue, and change over between this strategy and a plain Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.checks import assert_in_step, assert_ledger
from swarm.harness import START_S, Peer, Swarm
from swarm.replay import distance
from swarm.spec import PeerSpec

pytestmark = pytest.mark.swarm

MODEL = {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential"}


@pytest.mark.parametrize("package", ["lightning", pytest.param("pytorch_lightning", marks=pytest.mark.above_engines)])
def test_one_peer_continues_as_if_it_had_not_been_interrupted(swarm: Swarm, package: str) -> None:
    """Parameters, optimizer, scheduler and place in the data, bit for bit."""
    common: dict[str, Any] = {
        "model": MODEL,
        "strategy": {"target_batch_size": 16},
        "together": False,
        "lightning": package,
        "data_samples": 1024,
        "order_seed": None,
    }
    saved = str(swarm.folder / "half.ckpt")
    (whole,) = swarm.start(1, trainer={"max_steps": 8}, **common)
    swarm.finish(whole)
    (half,) = swarm.start(1, trainer={"max_steps": 4}, free={"save_to": saved}, **common)
    swarm.finish(half)
    (rest,) = swarm.start(1, trainer={"max_steps": 8}, ckpt_path=saved, **common)
    swarm.finish(rest)
    assert min(rest.commits) == 4
    for step in range(4, 9):
        assert rest.commits[step].digest == whole.commits[step].digest, step
        assert rest.commits[step].lr == whole.commits[step].lr
        assert rest.commits[step].global_step == step


KEEP = "[pl.callbacks.ModelCheckpoint(spec.folder, filename='{step}', every_n_train_steps=3, save_top_k=-1)]"


def saved_while_training(swarm: Swarm, **strategy: Any) -> tuple[Peer, Peer]:
    """One peer that trains six steps, and one that continues from the checkpoint of the third, in a second pass."""
    common: dict[str, Any] = {
        "model": {"optimizer": "adamw", "lr": 0.01},
        "strategy": {"target_batch_size": 16, **strategy},
        "together": False,
        "trainer": {"max_steps": 6, "enable_checkpointing": True},
        "trainer_code": {"callbacks": KEEP},
        "data_samples": 32,
        "order_seed": None,
    }
    (whole,) = swarm.start(1, **common)
    swarm.finish(whole)
    (rest,) = swarm.start(1, ckpt_path=str(whole.folder / "step=3.ckpt"), **common)
    swarm.finish(rest)
    assert min(rest.commits) == 3
    passes = [peer.said("finished")[0]["current_epoch"] for peer in (whole, rest)]
    assert passes[0] == passes[1] > 0
    return whole, rest


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_of_the_middle_of_a_run_continues_it_bit_for_bit(swarm: Swarm, offload: bool) -> None:
    whole, rest = saved_while_training(swarm, offload_optimizer=offload)
    for step in range(3, 7):
        assert rest.commits[step].digest == whole.commits[step].digest, step


def test_a_checkpoint_of_the_middle_of_a_delayed_run_holds_all_of_a_step(swarm: Swarm) -> None:
    """What is under way in the background when it is written is in it: in the parameters and in the optimizer."""
    delays = {"delay_state_averaging": True, "delay_grad_averaging": True, "delay_optimizer_step": True}
    whole, rest = saved_while_training(swarm, **delays)
    saved = torch.load(whole.folder / "step=3.ckpt")
    steps = {int(state["step"]) for state in saved["optimizer_states"][0]["state"].values()}
    assert steps == {saved["lightning_hivemind"]["epoch"]} == {3}
    values = torch.cat([value.flatten() for value in saved["state_dict"].values()])
    assert distance(rest.parameters(3), values.double().numpy()) == 0.0
    assert rest.commits[6].global_step == 6


@pytest.mark.above_engines
def test_a_checkpoint_holds_no_more_and_no_less_than_a_plain_one(swarm: Swarm) -> None:
    saved, plain_saved = str(swarm.folder / "ours.ckpt"), str(swarm.folder / "plain.ckpt")
    (peer,) = swarm.start(
        1, together=False, model=MODEL, strategy={"target_batch_size": 8}, trainer={"max_steps": 2},
        free={"save_to": saved},
    )  # fmt: skip
    swarm.finish(peer)
    swarm.plain(model=MODEL, trainer={"max_steps": 2}, free={"save_to": plain_saved})
    ours, plain = (torch.load(path) for path in (saved, plain_saved))
    assert set(ours) - set(plain) == {"lightning_hivemind"}
    assert set(plain) <= set(ours)
    assert ours["global_step"] == plain["global_step"] == 2
    for name, value in plain["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value)
    ours_state, plain_state = (checkpoint["optimizer_states"][0] for checkpoint in (ours, plain))
    assert ours_state["param_groups"][0]["lr"] == plain_state["param_groups"][0]["lr"]
    for key, entry in plain_state["state"].items():
        assert all(
            torch.equal(torch.as_tensor(ours_state["state"][key][k]), torch.as_tensor(v)) for k, v in entry.items()
        )
    assert ours["lr_schedulers"][0]["last_epoch"] == plain["lr_schedulers"][0]["last_epoch"] == 2


@pytest.mark.above_engines
def test_our_checkpoint_tests_and_predicts_in_a_plain_trainer_and_the_other_way_round(swarm: Swarm) -> None:
    ours, plain = str(swarm.folder / "ours.ckpt"), str(swarm.folder / "plain.ckpt")
    (peer,) = swarm.start(1, together=False, trainer={"max_steps": 2}, free={"save_to": ours})
    swarm.finish(peer)
    trained = swarm.plain(trainer={"max_steps": 2}, free={"save_to": plain})
    for number, (path, strategy) in enumerate([(ours, None), (plain, {})]):
        reader = swarm.launch(
            PeerSpec(scenario="swarm.scenarios:evaluate", strategy=strategy, free={"checkpoint": path}),
            name=f"reader{number}",
        )
        result = reader.wait_for("evaluated", timeout_s=START_S)
        reader.wait_exit()
        origin = peer if path == ours else trained
        assert result["digest"] == origin.said("finished")[0]["digest"]
        assert result["test_loss"] > 0
        assert result["predictions"] == 4
        assert not reader.said("PeerStarted"), "testing needs no network"


@pytest.mark.above_engines
def test_a_plain_checkpoint_is_continued_in_a_swarm(swarm: Swarm) -> None:
    saved = str(swarm.folder / "plain.ckpt")
    plain = swarm.plain(model=MODEL, trainer={"max_steps": 3}, free={"save_to": saved})
    (peer,) = swarm.start(
        1, together=False, model=MODEL, strategy={"target_batch_size": 8}, ckpt_path=saved, trainer={"max_steps": 5}
    )
    swarm.finish(peer)
    assert peer.commits[3].digest == plain.commits[3].digest
    assert sorted(peer.commits) == [3, 4, 5]
    assert peer.commits[5].lr == pytest.approx(0.01 * 0.9**5)


def test_a_peer_that_resumes_while_the_swarm_went_on_takes_the_swarms_state(swarm: Swarm) -> None:
    saved = str(swarm.folder / "old.ckpt")
    (early,) = swarm.start(1, together=False, model=MODEL, trainer={"max_steps": 1}, free={"save_to": saved})
    swarm.finish(early)
    (ahead,) = swarm.start(1, together=False, model=MODEL, hold_at=[4], trainer={"max_steps": 6},
                           delay_s=0.05)  # fmt: skip
    ahead.wait_for("holding", epoch=4)
    (back,) = swarm.start(1, together=False, model=MODEL, ckpt_path=saved, trainer={"max_steps": 6}, delay_s=0.05,
                          hold_at=[0])  # fmt: skip
    loaded = back.wait_for("StateLoaded", timeout_s=START_S)
    assert loaded["epoch"] == 4
    first = back.wait_epoch(4)
    assert first.digest == ahead.commits[4].digest
    assert first.lr == ahead.commits[4].lr
    assert first.global_step == 4
    ahead.release(4)
    swarm.finish(ahead, back)
    assert_ledger([ahead, back])


def test_a_stopped_swarm_continues_from_one_peers_checkpoint(swarm: Swarm) -> None:
    saved = str(swarm.folder / "swarm.ckpt")
    before = swarm.start(
        2, peers=[{"free": {"save_to": saved}}, {}], model=MODEL, trainer={"max_steps": 3}, delay_s=0.02
    )
    swarm.finish()
    after = swarm.start(2, peers=[{"ckpt_path": saved}, {"model": {"seed": 7}}], model=MODEL,
                        trainer={"max_steps": 5}, delay_s=0.02)  # fmt: skip
    swarm.finish(*after)
    for peer in after:
        assert min(peer.commits) == 3, f"{peer.name} did not start where the swarm had stopped"
        assert distance(peer.parameters(3), before[0].parameters(-1)) < 1e-6
        assert peer.commits[5].global_step == 5
        assert peer.commits[5].lr == pytest.approx(0.01 * 0.9**5)
    assert_in_step(after, [3, 4, 5])


def test_a_checkpoint_of_a_delayed_run_holds_every_step(swarm: Swarm) -> None:
    """What is under way in the background is finished before it is saved."""
    saved = str(swarm.folder / "delayed.ckpt")
    delays = {"delay_state_averaging": True, "delay_grad_averaging": True, "delay_optimizer_step": True}
    (peer,) = swarm.start(1, together=False, strategy={"target_batch_size": 8, **delays}, trainer={"max_steps": 3},
                          free={"save_to": saved})  # fmt: skip
    swarm.finish(peer)
    checkpoint = torch.load(saved)
    assert checkpoint["global_step"] == checkpoint["lightning_hivemind"]["epoch"] == 3
    flat = torch.cat([v.double().flatten() for k, v in checkpoint["state_dict"].items()]).numpy()
    assert distance(flat, peer.parameters(-1)) < 1e-7
