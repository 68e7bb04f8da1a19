"""Peers that have the model in parts, with what users do besides: other precisions, optimizers, ways to save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.checks import assert_one_process
from swarm.harness import Swarm
from swarm.kinds import KINDS, end_after, peer_of, same_digests, zero
from swarm.replay import distance, replay
from swarm.spec import ENDLESS, PeerSpec

pytestmark = pytest.mark.swarm
ADAMW = {"optimizer": "adamw", "lr": 0.01}
#: in `make test-full`: DeepSpeed compiles its Adam, which takes two minutes
FULL = "hivemind" in os.environ.get("ENGINES", "")


@pytest.fixture
def engine() -> str:
    return "native"


@pytest.mark.parametrize("name", ["fsdp2", "fsdp", "fsdp wrapped", "zero 2", "zero 3"])
def test_what_the_optimizer_does_not_have_stays_where_it_is(swarm: Swarm, name: str) -> None:
    """As with adapters: what is not trained is in parts, too."""
    model = {**ADAMW, "unreached": True, "frozen": True}
    peers = swarm.start(
        2, peers=[peer_of(name, model=model), {"delay_s": 0.01, "model": model}], trainer={"max_steps": 6}
    )
    swarm.finish(timeout_s=120)
    ends = [one.said("finished")[0]["digest"] for one in peers]
    assert ends[0] == ends[1] != peers[0].commits[0].digest


@pytest.mark.parametrize("name", ["fsdp2", "fsdp", "zero 3"])
def test_one_rank_may_be_all_there_is(swarm: Swarm, name: str) -> None:
    one = {**peer_of(name, model=ADAMW), "ranks": 1}
    one["strategy_code"] = {"local_strategy": KINDS[name]["code"].replace("size=2", "size=1")}
    peers = swarm.start(2, peers=[one, {"delay_s": 0.01, "model": ADAMW}], trainer={"max_steps": 6})
    swarm.finish(timeout_s=120)
    ends = [one.said("finished")[0]["digest"] for one in peers]
    assert ends[0] == ends[1] != peers[0].commits[0].digest


@pytest.mark.parametrize("name", ["fsdp2", "fsdp wrapped", "zero 3"])
def test_in_bfloat16_it_is_lightnings_own_strategy_bit_for_bit(swarm: Swarm, name: str) -> None:
    common: dict[str, Any] = {
        "env": {"PL_GLOBAL_SEED": "7"},
        "trainer": {"max_steps": 10, "precision": "bf16-mixed"},
    }
    made = peer_of(name, model=ADAMW)
    (peer,) = swarm.start(1, together=False, strategy={"target_batch_size": 16}, **common, **made)
    del made["strategy_code"]
    plain = swarm.plain(trainer_code={"strategy": KINDS[name]["plain"]}, **common, **made)
    swarm.finish()
    assert [one.digest for one in peer.commits.values()] == [one.digest for one in plain.commits.values()]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp wrapped", "zero 3"])
def test_in_bfloat16_it_stays_equal_to_a_plain_peer_with_its_buffers(swarm: Swarm, name: str) -> None:
    # (DeepSpeed's BatchNorm in bfloat16 is none that torch evaluates on a CPU)
    common: dict[str, Any] = {"model": {**ADAMW, "norm": name != "zero 3"}}
    precise = {"max_steps": 6, "precision": "bf16-mixed"}
    peers = swarm.start(
        2,
        peers=[peer_of(name, model=common["model"]), {"delay_s": 0.01, **common}],
        trainer=precise,
    )
    swarm.finish(timeout_s=120)
    ends = [torch.from_numpy(one.parameters(-1)) for one in peers]
    if name == "zero 3":  # whose parameters are what is made of float32 ones
        ends[1] = ends[1].bfloat16().double()
    assert torch.equal(*ends)
    assert distance(peers[1].parameters(-1), peers[1].parameters(0)) > 1e-2


def test_a_checkpoint_has_the_step_that_was_under_way(swarm: Swarm) -> None:
    """With delay_optimizer_step: the weights of the epoch that it names, at every rank."""
    saved = str(swarm.folder / "some.ckpt")
    strategy = {"target_batch_size": 16, "delay_state_averaging": True, "delay_optimizer_step": True}
    common: dict[str, Any] = {"together": False, "env": {"PL_GLOBAL_SEED": "7"}, "strategy": strategy}
    one = peer_of("fsdp2", model=ADAMW)
    code = {"callbacks": f"[CheckpointAtBatch(6, {saved!r})]"}
    (peer,) = swarm.start(1, trainer={"max_steps": 12}, trainer_code=code, **common, **one)
    swarm.finish(peer)
    checkpoint = torch.load(saved, weights_only=False)
    steps = checkpoint["lightning_hivemind"]["epoch"]
    assert 3 <= steps <= 6
    (other,) = swarm.start(1, trainer={"max_steps": steps}, **common, **one)
    swarm.finish(other)
    weights = torch.cat([one.double().flatten() for one in checkpoint["state_dict"].values()]).numpy()
    assert distance(weights, other.parameters(-1)) == 0.0


def test_an_optimizer_whose_state_no_part_has_trains_and_says_so(swarm: Swarm) -> None:
    (peer,) = swarm.start(
        1,
        together=False,
        strategy={"target_batch_size": 16},
        trainer={"max_steps": 6, "val_check_interval": 2},
        **peer_of("fsdp", model={"optimizer": "counting", "lr": 0.01}),
    )
    swarm.finish()
    assert sorted(peer.commits) == list(range(7))
    assert len(peer.said("validated")) >= 3
    assert "Counting keeps 'counts' of shape (3,)" in peer.output


def test_full_weights_of_deepspeed_are_loaded_with_the_rest(swarm: Swarm) -> None:
    saved = str(swarm.folder / "half.ckpt")
    common: dict[str, Any] = {"together": False, "env": {"PL_GLOBAL_SEED": "7"}, "data_samples": 16}
    common |= {"strategy": {"target_batch_size": 16}}
    one = peer_of("zero 3", model=ADAMW)
    (half,) = swarm.start(1, trainer={"max_steps": 4}, free={"save_to": saved}, **common, **one)
    swarm.finish(half)
    assert Path(saved).is_file()
    one["strategy_code"] = {"local_strategy": "pl.strategies.DeepSpeedStrategy(stage=3, load_full_weights=True)"}
    (rest,) = swarm.start(1, trainer={"max_steps": 8}, ckpt_path=saved, **common, **one)
    swarm.finish(rest)
    assert rest.commits[4].digest == half.commits[4].digest
    assert sorted(rest.commits) == [4, 5, 6, 7, 8]


def test_ranks_that_share_a_batch_count_once_in_a_mean_over_the_swarm(swarm: Swarm) -> None:
    peers = swarm.start(
        2,
        peers=[
            peer_of("tensor", free={"metric": [[2.0, 8], [2.0, 8]]}),
            {"delay_s": 0.01, "free": {"metric": [5.0, 8]}},
        ],
        trainer={"max_steps": 12},
        delay_s=0.2,
    )
    swarm.finish(timeout_s=120)
    for peer in peers:
        assert peer.said("metric")[-1]["value"] == pytest.approx(3.5)


REFUSED = {
    "ratio": (
        "DeepSpeedStrategy(config={'zero_optimization': {'stage': 3, 'offload_optimizer':"
        " {'device': 'cpu', 'ratio': 0.5}}})",
        {},
        "ratio of 0.5",
    ),
    "own format": (
        "FSDPStrategy(state_dict_type='sharded')",
        {"portable_checkpoints": False, "offload_optimizer": True},
        "Leave one of them away",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_it_begins(swarm: Swarm, name: str) -> None:
    code, strategy, says = REFUSED[name]
    local = {"local_strategy": f"pl.strategies.{code}"}
    peer = swarm.launch(
        PeerSpec(ranks=2, strategy_code=local, strategy={"initial_peers": [], "target_batch_size": 16, **strategy})
    )
    peer.wait_exit(code=None)
    assert peer.exit_code != 0
    for one in (peer, peer.of_rank(1)):
        (raised,) = one.said("raised")
        assert raised["kind"] == "ArgumentError"
        assert says in raised["text"]


@pytest.mark.parametrize("name", ["plain", "fsdp2", "fsdp", "zero 3"])
def test_who_joins_needs_no_values_of_its_own(swarm: Swarm, name: str) -> None:
    """``trainer.init_module(empty_init=True)``: without memory on the meta device, or with whatever lies there."""
    common: dict[str, Any] = {"trainer": ENDLESS, "together": False, "delay_s": 0.05}
    (first,) = swarm.start(1, model=ADAMW, **common)
    first.wait_epoch(3)
    one = {"model": ADAMW} if name == "plain" else peer_of(name, model=ADAMW)
    (second,) = swarm.start(1, order_seed=1, free={"empty_init": True}, **common, **one)
    end_after([first, second], 6)
    assert second.said("StateLoaded")
    assert len([step for step in same_digests([first, second]) if step > 3]) > 3


@pytest.mark.parametrize("name", ["fsdp2", "fsdp wrapped", "zero 2", "zero 3"])
def test_what_was_saved_is_tested_and_predicts(swarm: Swarm, name: str) -> None:
    """By the Trainer that has trained it, and by another one, which needs no network."""
    saved, one = str(swarm.folder / "saved.ckpt"), peer_of(name, model=ADAMW)
    (peer,) = swarm.start(1, together=False, trainer={"max_steps": 4}, free={"save_to": saved, "tests": True}, **one)
    swarm.finish(peer)
    (tested,) = peer.said("tested")
    assert tested["digest"] == peer.said("finished")[0]["digest"]
    reader = swarm.launch(
        PeerSpec(scenario="swarm.scenarios:evaluate", strategy={}, free={"checkpoint": saved}, **one), name="reader"
    )
    found = reader.wait_for("evaluated", timeout_s=90)
    reader.wait_exit()
    assert found["digest"] == tested["digest"]
    assert found["test_loss"] == pytest.approx(tested["test_loss"])
    assert found["predictions"] == 2, "of each rank"
    assert not reader.said("PeerStarted")


def compiled(builder: str, folder: Path) -> dict[str, str]:
    """An extension of DeepSpeed, once, here, where nobody kills the compiler; the environment in which it is found."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of ninja
    env = {"PATH": paths, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder)}
    code = f"from deepspeed.ops.op_builder import {builder}; {builder}().load()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True, timeout=600)
    return env


@pytest.fixture(scope="module")
def deepspeeds_adam(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return compiled("CPUAdamBuilder", tmp_path_factory.mktemp("extensions"))


@pytest.fixture(scope="module")
def async_io(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """DeepSpeed's way to a disk."""
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("needs libaio-dev")
    return compiled("AsyncIOBuilder", tmp_path_factory.mktemp("extensions"))


@pytest.mark.skipif(not FULL, reason="compiles for a minute: make test-full")
def test_parameters_that_lie_on_nvme_are_trained_as_others_are(
    swarm: Swarm, async_io: dict[str, str], tmp_path: Path
) -> None:
    """Alone bit for bit as by the same strategy without a swarm; and together with a plain peer.

    Made in ``configure_model``, or before: which DeepSpeed by itself would round.
    """
    wide: dict[str, Any] = {"width": 1024, "lr": 0.05}  # what is less than 1 MiB stays in memory
    offload: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    offload["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
    inside, bare = zero(3, **offload)
    common: dict[str, Any] = {"ranks": 2, "env": {"PL_GLOBAL_SEED": "7", **async_io}}
    code = {"strategy_code": {"local_strategy": inside}}
    steps: dict[str, Any] = {"trainer": {"max_steps": 10}}
    by_itself: dict[str, Any] = {**steps, **common, "model": {**wide, "late": True}}
    (alone,) = swarm.start(1, together=False, strategy={"target_batch_size": 16}, **by_itself, **code)
    swarm.finish(timeout_s=180)
    files = [one for one in tmp_path.rglob("*") if one.is_file() and one.stat().st_size >= 1 << 20]
    assert files, "nothing was on the disk"
    plain = swarm.plain(trainer_code={"strategy": bare}, **by_itself)
    swarm.finish(timeout_s=180)
    assert [alone.commits[n].digest for n in range(11)] == [plain.commits[n].digest for n in range(11)]
    peers = swarm.start(2, peers=[{**common, **code}, {"delay_s": 0.01}], model=wide, **steps)
    swarm.finish(timeout_s=180)
    assert_one_process(peers, 10)


@pytest.mark.skipif(not FULL, reason="compiles for two minutes: make test-full")
@pytest.mark.parametrize("name", ["deepspeed_stage_2_offload", "deepspeed_stage_3_offload"])
def test_deepspeeds_own_adam_makes_the_steps_of_torchs(
    swarm: Swarm, deepspeeds_adam: dict[str, str], name: str
) -> None:
    """Together with a plain peer; and who joins takes over its moments."""
    strategy, model = {"local_strategy": repr(name)}, {"optimizer": "deepspeed adam", "lr": 0.01}
    first = {"ranks": 2, "strategy_code": strategy, "model": model, "env": deepspeeds_adam}
    peers = swarm.start(2, peers=[first, {"delay_s": 0.01, "model": ADAMW}], trainer={"max_steps": 50})
    swarm.finish(timeout_s=180)
    expected = replay(peers, 50)[50]
    assert max(distance(one.parameters(50), expected) for one in peers) < 1e-5, "but not to the last bit"
    common: dict[str, Any] = {"trainer": ENDLESS, "together": False, "delay_s": 0.05}
    for one, other in ((first, {"model": ADAMW}), ({"model": ADAMW}, first)):
        (there,) = swarm.start(1, **common, **one)
        there.wait_epoch(5)
        (joiner,) = swarm.start(1, order_seed=1, **common, **other)
        end_after([there, joiner], 6)
        assert joiner.said("StateLoaded")
        last = max(set(there.commits) & set(joiner.commits))
        assert distance(there.parameters(last), joiner.parameters(last)) < 1e-4
        assert not joiner.said("ParametersDiffered")


@pytest.mark.parametrize(("rank", "target", "saved"), [(0, 4096, True), (0, 16, False), (1, 4096, False)])
@pytest.mark.parametrize("name", ["fsdp2", "zero 3"])
def test_an_error_at_one_rank_is_what_ends_it_whatever_can_be_saved(
    swarm: Swarm, name: str, rank: int, target: int, saved: bool
) -> None:
    """A callback wants a checkpoint, for which all must come. After a step rank 1 is in a collective of the test's."""
    (peer,) = swarm.start(
        1,
        together=False,
        trainer={**ENDLESS, "enable_checkpointing": True},
        trainer_code={"callbacks": "[pl.callbacks.OnExceptionCheckpoint(spec.folder)]"},
        free={"raises_after": [rank, 3]},
        strategy={"target_batch_size": target},
        **peer_of(name),
    )
    peer.wait_exit(code=1)
    ends = [one.said("raised")[0] for one in (peer, peer.of_rank(1))]
    assert ends[rank]["text"] == "induced failure after batch 3"
    assert ends[1 - rank]["kind"] == "RanksError" or not saved, "it may be in a collective of torch's"
    assert peer.said("PeerStopped")
    assert (peer.folder / "on_exception.ckpt").exists() == saved
