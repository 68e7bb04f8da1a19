"""Peers whose ranks have the model in parts (FSDP, FSDP2, tensor parallel), alone and together with others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_hivemind.cli import main
from swarm.checks import assert_one_process, assert_workers
from swarm.harness import Peer, Swarm
from swarm.kinds import KINDS, MORE, end_after, peer_of, same_digests
from swarm.models import make_model
from swarm.replay import distance, replay
from swarm.spec import ENDLESS

pytestmark = pytest.mark.swarm
STEPS = 50


@pytest.fixture
def engine() -> str:
    return "native"


#: with all kinds of peers, as in `make test-full`; else with some, for each takes ten seconds
FULL = "hivemind" in os.environ.get("ENGINES", "")
MAIN = ["fsdp2", "fsdp wrapped", "zero 3 offload"] if FULL else ["fsdp2", "zero 3 offload"]
MIXED = list(KINDS) if FULL else ["fsdp2 tensor", "fsdp", "fsdp grad op", "zero 1", "zero 2 offload", "zero 3"]


@pytest.mark.parametrize("name", [*KINDS, *MORE])
def test_alone_in_a_swarm_it_is_lightnings_own_strategy_bit_for_bit(swarm: Swarm, name: str) -> None:
    one = {**KINDS, **MORE}[name]
    target, config = 8 * one["data"], swarm.folder / "deepspeed.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}))
    common: dict[str, Any] = {
        # as seed_everything(7) does: else each peer has an order of its own
        "env": {"PL_GLOBAL_SEED": "7", **({"PL_DEEPSPEED_CONFIG_PATH": str(config)} if "file" in name else {})},
        "trainer": {"max_steps": STEPS},
    }
    made = peer_of(name, model={"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential"})
    (peer,) = swarm.start(1, together=False, strategy={"target_batch_size": target}, **common, **made)
    del made["strategy_code"]
    plain = swarm.plain(trainer_code={"strategy": one["plain"]}, **common, **made)
    swarm.finish()
    assert sorted(peer.commits) == sorted(plain.commits) == list(range(STEPS + 1))
    different = [step for step in range(STEPS + 1) if peer.commits[step].digest != plain.commits[step].digest]
    assert not different, f"first different step: {different[0]}"
    assert [c.lr for c in peer.commits.values()] == [c.lr for c in plain.commits.values()]


@pytest.mark.parametrize("name", MIXED)
def test_together_with_a_peer_of_one_process_it_is_one_process_with_the_samples_of_all(swarm: Swarm, name: str) -> None:
    peers = swarm.start(
        2,
        peers=[peer_of(name, data_samples=4091), {"delay_s": 0.01, "data_samples": 4091}],
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": STEPS},
    )
    swarm.finish(timeout_s=150)
    assert_one_process(peers, STEPS)
    assert not peers[0].said("ParametersDiffered")


def unlike(**fields: Any) -> list[dict[str, Any]]:
    """A plain peer, two ranks of DDP, two of FSDP2, two of ZeRO-3 with offload; of unlike batches and speeds."""
    ranks = [{}, {"ranks": 2}, peer_of("fsdp2"), peer_of("zero 3 offload")]
    paces = [
        {"batch_size": 6, "delay_s": 0.01},
        {"batch_size": 4},
        {"batch_size": 8, "delay_s": 0.02},
        {"batch_size": 5},
    ]
    made = [{**one, **pace} for one, pace in zip(ranks, paces, strict=True)]
    for one in made:
        one["strategy_code"] = {**one.get("strategy_code", {}), **fields}
    return made


def test_unlike_peers_are_one_process_with_the_samples_of_all(swarm: Swarm) -> None:
    peers = swarm.start(
        4,
        peers=unlike(),
        strategy={"target_batch_size": 96},
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": STEPS},
    )
    swarm.finish(timeout_s=240)
    assert_one_process(peers, STEPS)
    assert not any(peer.said("ParametersDiffered") for peer in peers)


@pytest.mark.parametrize("fragments", [1, 3])
def test_unlike_peers_make_the_outer_steps_of_workers_one_after_another(swarm: Swarm, fragments: int) -> None:
    settings = {"lr": 0.7, "momentum": 0.6, "nesterov": True}
    if fragments > 1:
        settings["fragments"] = fragments
    made = unlike(outer=f"{'StreamingDiLoCo' if fragments > 1 else 'DiLoCo'}(**{settings})")
    peers = swarm.start(
        4,
        peers=[{**one, "delay_s": 0.05} for one in made],  # so that a round is longer than a batch of the slowest
        strategy={"target_batch_size": 384},
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": 5 * fragments},
        free={"barrier_batch": 0},
    )
    swarm.finish(timeout_s=240)
    assert_workers(peers, 5 * fragments, **settings)


def test_each_of_unlike_peers_may_die_and_come_back(swarm: Swarm) -> None:
    peers = swarm.start(4, peers=unlike(), strategy={"target_batch_size": 96}, trainer=ENDLESS, delay_s=0.02)
    for number, one in enumerate(unlike()[1:], start=1):
        peers[0].wait_epoch(max(peers[0].commits) + 3, timeout_s=90)
        os.kill(int(peers[number].of_rank(1).wait_for("started")["pid"]), signal.SIGKILL)
        peers[number].wait_exit(code=None)
        peers[0].wait_epoch(max(peers[0].commits) + 3, timeout_s=90)
        (again,) = swarm.start(
            1, together=False, strategy={"target_batch_size": 96}, trainer=ENDLESS, **{**one, "delay_s": 0.02}
        )
        assert again.wait_for("StateLoaded", timeout_s=60)
        again.wait_until(lambda p=again: len(p.commits) > 4, timeout_s=60, what="steps after it came back")
        assert same_digests([peers[0], again])[1:]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp wrapped"] if FULL else ["fsdp wrapped"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"offload_optimizer": True},
        {"delay_state_averaging": True, "delay_optimizer_step": True},
        {"delay_state_averaging": True, "delay_grad_averaging": True},
    ],
    ids=["offload", "delayed step", "delayed averaging"],
)
def test_it_stays_equal_to_others_in_every_way_to_step(swarm: Swarm, name: str, strategy: dict[str, Any]) -> None:
    peers = swarm.start(
        2,
        peers=[peer_of(name), {"delay_s": 0.01}],
        strategy=strategy,
        model={"optimizer": "adamw", "lr": 0.01, "norm": True},
        trainer={"max_steps": 12},
    )
    swarm.finish(timeout_s=120)
    ends = [one.said("finished")[0] for one in peers]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 12
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["digest"] != peers[0].commits[0].digest


@pytest.mark.parametrize("name", MAIN)
def test_outer_steps_are_those_of_workers_one_after_another(swarm: Swarm, name: str) -> None:
    outer = {"outer": "DiLoCo(lr=0.7, momentum=0.6, nesterov=True)"}
    peers = swarm.start(
        2,
        peers=[
            peer_of(name, batch_size=4, strategy_code=outer),
            {"delay_s": 0.01, "batch_size": 6, "strategy_code": outer},
        ],
        strategy={"target_batch_size": 64},
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": 5},
        free={"barrier_batch": 0},
    )
    swarm.finish(timeout_s=120)
    assert_workers(peers, 5, lr=0.7, momentum=0.6, nesterov=True)


def test_parameters_go_to_rank_0_once_a_round_and_not_at_each_of_its_own_steps(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 160},
        trainer={"max_steps": 5},
        free={"count_gathers": True},
        **peer_of("fsdp2", strategy_code={"outer": "DiLoCo()"}),
    )
    swarm.finish()
    steps = [event["batch_samples"] for event in peer.said("BatchAccumulated")]
    assert len(steps) >= 50
    assert 5 <= len(peer.said("gathered")) <= 12


@pytest.mark.parametrize("name", MAIN)
def test_gradients_go_to_rank_0_once_a_round_and_not_at_each_batch(swarm: Swarm, name: str) -> None:
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 160},
        trainer={"max_steps": 5},
        **peer_of(name, free={"count_gathers": True}),
    )
    swarm.finish()
    assert len(peer.said("BatchAccumulated")) >= 50
    assert len(peer.said("gathered_sum")) == 5


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("joins", [True, False])
def test_who_joins_has_the_whole_state(swarm: Swarm, name: str, joins: bool) -> None:
    """Parameters, moments, buffers, and the place of the scheduler: from a model in parts, or into one."""
    model = {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential", "norm": True}
    common: dict[str, Any] = {"trainer": ENDLESS, "together": False, "delay_s": 0.05}
    parts, whole = peer_of(name, model=model), {"model": model}
    (first,) = swarm.start(1, **common, **(whole if joins else parts))
    first.wait_epoch(5)
    (second,) = swarm.start(1, order_seed=1, **common, **(parts if joins else whole))
    end_after([first, second], 15)
    assert second.said("StateLoaded")
    steps = [step for step in same_digests([first, second]) if step > 5]
    assert len(steps) > 10
    for step in steps:
        assert first.commits[step].lr == second.commits[step].lr
    assert not first.said("ParametersDiffered")


RESUMED = [
    ("fsdp2", "zero 3 offload"),
    ("zero 3", "fsdp wrapped"),
    ("fsdp", "plain"),
    ("plain", "zero 2"),
    ("zero 3", "plain"),
]


@pytest.mark.parametrize(("saves", "resumes"), RESUMED)
def test_what_one_kind_of_peer_saves_another_one_resumes(swarm: Swarm, saves: str, resumes: str) -> None:
    """As if the run had not been interrupted: parameters, moments, the scheduler. (All samples are in each step.)"""
    saved, model = str(swarm.folder / "half.ckpt"), {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential"}
    common: dict[str, Any] = {"together": False, "env": {"PL_GLOBAL_SEED": "7"}, "data_samples": 16}

    def fit(name: str, until: int, **fields: Any) -> Peer:
        ranks = {"batch_size": 16, "model": model} if name == "plain" else peer_of(name, model=model)
        target = {"target_batch_size": 16}
        (peer,) = swarm.start(1, trainer={"max_steps": until}, strategy=target, **common, **ranks, **fields)
        swarm.finish(peer)
        return peer

    half = fit(saves, 4, free={"save_to": saved})
    assert Path(saved).is_file()
    rest = fit(resumes, 8, ckpt_path=saved)
    through = fit(saves, 8)
    assert sorted(rest.commits) == [4, 5, 6, 7, 8]
    assert rest.commits[4].digest == half.commits[4].digest
    assert distance(rest.parameters(8), through.parameters(8)) < 1e-5
    assert [c.lr for c in rest.commits.values()] == [c.lr for e, c in through.commits.items() if e >= 4]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp sharded", "zero 3"])
def test_it_resumes_what_lightnings_own_strategy_writes_for_it(swarm: Swarm, name: str) -> None:
    saved, model = str(swarm.folder / "half.ckpt"), {"optimizer": "adamw", "lr": 0.01, "scheduler": "exponential"}
    common: dict[str, Any] = {"together": False, "env": {"PL_GLOBAL_SEED": "7"}, **peer_of(name, model=model)}
    common |= {"strategy": {"target_batch_size": 16, "portable_checkpoints": False}, "data_samples": 16}

    def fit(until: int, **fields: Any) -> Peer:
        (peer,) = swarm.start(1, trainer={"max_steps": until}, **common, **fields)
        swarm.finish(peer)
        return peer

    half = fit(4, free={"save_to": saved})
    assert Path(saved).is_dir()
    rest, through = fit(8, ckpt_path=saved), fit(8)
    assert sorted(rest.commits) == [4, 5, 6, 7, 8]
    assert rest.commits[4].digest == half.commits[4].digest
    assert distance(rest.parameters(8), through.parameters(8)) < 1e-5
    whole = swarm.folder / "whole.ckpt"
    assert main(["collate", saved, str(whole)]) == 0
    weights = torch.load(whole, weights_only=False)["state_dict"]
    names = [name for name, _ in make_model(pl, **model).named_parameters()]
    assert (torch.cat([weights[name].double().flatten() for name in names]).numpy() == half.parameters(4)).all()
    assert main(["collate", saved, str(whole)]) == 2, "what is there is not overwritten"


@pytest.mark.parametrize("name", ["fsdp2", "zero 3"])
def test_a_model_that_is_made_in_configure_model_is_sharded_there(swarm: Swarm, name: str) -> None:
    """Layer by layer as each is made (DeepSpeed), or at once."""
    peers = swarm.start(
        2,
        peers=[peer_of(name, model={"late": True}), {"delay_s": 0.01}],
        model={"optimizer": "adamw", "lr": 0.01},
        trainer={"max_steps": 10},
    )
    swarm.finish(timeout_s=90)
    assert_one_process(peers, 10)


@pytest.mark.parametrize("name", MAIN)
def test_one_that_is_bad_at_one_rank_is_left_out_by_all(swarm: Swarm, name: str) -> None:
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16},
        trainer={"max_steps": 6},
        **peer_of(name, model={"nan_at": [3]}),
    )
    swarm.finish()
    assert [one["samples"] for one in peer.said("BatchDropped")] == [16]
    assert distance(peer.parameters(6), replay([peer], 6)[6]) < 1e-5


@pytest.mark.parametrize("name", ["fsdp2", "fsdp wrapped by hand", "zero 2", "zero 3 offload"])
def test_the_norm_of_the_averaged_gradient_is_clipped_as_of_one_process(swarm: Swarm, name: str) -> None:
    peers = swarm.start(
        2,
        peers=[peer_of(name), {"delay_s": 0.01}],
        model={"scale_loss": 10.0},
        trainer={"max_steps": 10, "gradient_clip_val": 0.5},
    )
    swarm.finish(timeout_s=90)
    expected = replay(peers, 10, clip=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5))
    for peer in peers:
        assert distance(peer.parameters(10), expected[10]) < 1e-5
    assert len(same_digests(peers)) > 5
    assert distance(replay(peers, 10)[10], expected[10]) > 1e-2, "nothing was clipped"


@pytest.mark.parametrize("name", [*MAIN, "fsdp wrapped"][-2:])
def test_it_validates_between_and_others_join_meanwhile(swarm: Swarm, name: str) -> None:
    common: dict[str, Any] = {"delay_s": 0.02, "trainer": {**ENDLESS, "val_check_interval": 4}, "together": False}
    (first,) = swarm.start(1, **common, **peer_of(name))
    first.wait_epoch(3)
    (second,) = swarm.start(1, order_seed=1, **common)
    end_after([first, second], 10)
    assert len(first.said("validated")) >= 3
    assert len(same_digests([first, second])) >= 5


@pytest.mark.parametrize("rank", [0, 1])
def test_one_whose_rank_is_killed_ends_and_the_others_go_on(swarm: Swarm, rank: int) -> None:
    peers = swarm.start(2, peers=[{}, peer_of("fsdp2")], trainer=ENDLESS, delay_s=0.05)
    for peer in peers:
        peer.wait_epoch(2)
    os.kill(int(peers[1].of_rank(rank).wait_for("started")["pid"]), signal.SIGKILL)
    peers[1].wait_exit(code=None)
    assert peers[1].exit_code != 0
    at = max(peers[0].commits)
    peers[0].wait_epoch(at + 5)
    assert peers[1].of_rank(1 - rank).said("raised")
