"""``local_strategy``: what a strategy becomes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

pytest.importorskip("hivemind")

from lightning_hivemind import CollaborativeStrategy, HivemindStrategy
from lightning_hivemind.arguments import Arguments
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer.several import SeveralProcesses


def made(local_strategy: Any, devices: int = 2, cls: Any = HivemindStrategy, **settings: Any) -> Any:
    strategy = cls(target_batch_size=8, initial_peers=[], local_strategy=local_strategy)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False, **settings
    )
    assert trainer.strategy is strategy
    return strategy


@pytest.mark.parametrize("cls", [HivemindStrategy, CollaborativeStrategy])
def test_auto_is_plain_on_one_device_and_ddp_on_several(cls: Any) -> None:
    one, two = made("auto", devices=1, cls=cls), made("auto", devices=2, cls=cls)
    assert isinstance(one, cls)
    assert isinstance(two, cls)
    assert not isinstance(one, DDPStrategy)
    assert isinstance(two, DDPStrategy)
    assert (one.world_size, two.world_size) == (1, 2)
    assert two.parallel_devices == [torch.device("cpu")] * 2


def test_what_the_trainer_gave_before_its_devices_is_kept() -> None:
    strategy = made("auto", precision="bf16-mixed")
    assert strategy.precision_plugin.precision == "bf16-mixed"
    assert strategy.accelerator is not None
    assert strategy.cluster_environment is not None


def test_a_name_brings_what_lightning_has_registered_with_it() -> None:
    strategy = made("ddp_find_unused_parameters_true")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_options_of_a_strategy_object_are_kept_and_its_class_too() -> None:
    class Own(DDPStrategy):
        def greet(self) -> str:
            return "own"

    strategy = made(Own(static_graph=True, gradient_as_bucket_view=True))
    assert strategy._ddp_kwargs == {"static_graph": True, "gradient_as_bucket_view": True}
    assert strategy.greet() == "own"
    assert isinstance(strategy, HivemindStrategy)


def test_a_subclass_of_ours_may_give_it_too() -> None:
    class Mine(HivemindStrategy):
        def __init__(self) -> None:
            super().__init__(target_batch_size=8, initial_peers=[], local_strategy="ddp")

    assert isinstance(Mine(), DDPStrategy)


@pytest.mark.parametrize(
    ("local_strategy", "says"),
    [
        ("dpp", "there is no such strategy. did you mean 'ddp'? Give one of ddp,"),
        ("ddp_spawn", "spawned ranks"),
        (DDPStrategy(start_method="spawn"), "spawned ranks"),
        (SingleDeviceStrategy("cpu"), "cannot be such a one. Use DeepSpeedStrategy,"),
        ("hivemind", "cannot be such a one. Use DeepSpeedStrategy,"),
        (object(), "is no strategy"),
        (2, "an int is no strategy"),
        (None, "a NoneType is no strategy"),
    ],
)
def test_what_is_none_is_refused_with_what_to_write(local_strategy: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=r"local_strategy=") as error:
        HivemindStrategy(target_batch_size=8, initial_peers=[], local_strategy=local_strategy)
    assert says in str(error.value)


def test_what_is_not_seeded_each_peer_shuffles_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own seed is 0 then: peers of several ranks would all see the same samples."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    seeds = []
    for _ in range(2):
        strategy = made("ddp")
        seeds.append(strategy.distributed_sampler_kwargs["seed"])
        assert strategy.distributed_sampler_kwargs["seed"] == seeds[-1]
    assert seeds[0] != seeds[1]
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert "seed" not in made("ddp").distributed_sampler_kwargs


def test_an_object_of_the_other_package_is_refused() -> None:
    other: Any = pytest.importorskip("pytorch_lightning")
    strategy = HivemindStrategy(target_batch_size=8, initial_peers=[], local_strategy=DDPStrategy())
    with pytest.raises(ArgumentError, match=r"it is of lightning\.pytorch, the Trainer of pytorch_lightning"):
        other.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)


def test_nobody_is_given_the_port_of_the_ranks_before_they_listen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "")  # so that it is taken away afterwards
    monkeypatch.delenv("MASTER_PORT")
    strategy = made("ddp")
    port = strategy.cluster_environment.main_port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    store = torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
    store.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize(
    ("local_strategy", "says"),
    [
        ("fdsp", "did you mean 'fsdp'"),
        ("fsdp2", r"for FSDP2 and tensor parallel, an object: ModelParallelStrategy\(\.\.\.\)"),
        (DDPStrategy, r"DDPStrategy: that is a class\. Make an object of it: DDPStrategy\(\)"),
    ],
)
def test_who_nearly_knows_the_name_is_told(local_strategy: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        HivemindStrategy(target_batch_size=8, initial_peers=[], local_strategy=local_strategy)


def test_where_deepspeed_is_missing_it_says_how_to_get_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"DeepSpeed is not installed.*\[deepspeed\]"):
        HivemindStrategy(target_batch_size=8, initial_peers=[], local_strategy="deepspeed_stage_2")


def test_a_module_without_configure_model_is_told_before_anything_is_made() -> None:
    strategy = made(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    strategy._lightning_module = pl.LightningModule()
    with pytest.raises(ArgumentError, match=r"in configure_model\(\), which it does not have"):
        super(type(strategy), strategy).setup(strategy)


def test_advice_of_ddp_names_the_argument_of_the_swarm() -> None:
    strategy = made("ddp")
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one")
    strategy.on_exception(error)
    assert "local_strategy='ddp_find_unused_parameters_true'" in str(error)
    assert "local_strategy=DDPStrategy(find_unused_parameters=True)" in str(error)


@pytest.mark.parametrize(("holds", "writer"), [(".metadata", "FSDP"), ("checkpoint/a", "DeepSpeed"), ("a", None)])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_directory_of_other_ranks_is_refused_with_the_way_out(
    holds: str, writer: str | None, devices: int, tmp_path: Path
) -> None:
    (tmp_path / holds).parent.mkdir(exist_ok=True)
    (tmp_path / holds).touch()
    strategy = made("auto", devices=devices)
    with pytest.raises(ArgumentError, match=r"is a directory.*portable_checkpoints=True, and save") as caught:
        strategy.load_checkpoint(tmp_path)
    assert (f"that {writer}" in str(caught.value)) == (writer is not None)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut", None])
def test_a_checkpoint_that_cannot_be_read_is_named(content: bytes | None, devices: int, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"half\.ckpt' cannot be read \(\w+Error"):
        made("auto", devices=devices).load_checkpoint(path, weights_only=True)


class Base:
    def setup_environment(self) -> None:
        self.seen = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


class Peer(SeveralProcesses, Base):
    arguments = Arguments.create(8, nccl={"SOCKET_NTHREADS": 2, "NCCL_NSOCKS_PERTHREAD": 4, "DEBUG": "INFO"})


def test_variables_of_nccl_are_set_in_each_rank_unless_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Lightning's own strategy makes anything."""
    for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        monkeypatch.setenv(name, "")  # so that it is taken away afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    peer = Peer()
    peer.setup_environment()
    assert peer.seen == {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "4", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["SOCKET_NTHREADS"], "is not a dict"),
        ({"socket": 2}, "no name of a variable"),
        ({"SOCKET_NTHREADS": True}, "neither a number nor a text"),
        ({"SOCKET_NTHREADS": 16, "NSOCKS_PERTHREAD": 8}, "above 64"),
    ],
)
def test_what_is_no_variable_of_nccl_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Arguments.create(8, nccl=value)
