"""Both Lightning packages, LightningCLI, the registry and the accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.checks import assert_complete, assert_in_step
from swarm.harness import START_S, Swarm
from swarm.marks import ANY_ENGINE
from swarm.spec import PeerSpec

pytestmark = [pytest.mark.swarm, pytest.mark.above_engines]


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning", "both"])
def test_each_lightning_package_trains(swarm: Swarm, package: str) -> None:
    """``both``: both are imported, and the Trainer is lightning.pytorch's."""
    (peer,) = swarm.start(1, together=False, lightning=package, trainer={"max_steps": 2})
    swarm.finish()
    assert peer.said("finished")[0]["global_step"] == 2


def test_with_both_packages_imported_the_other_trainer_works_too(swarm: Swarm) -> None:
    peer = swarm.launch(PeerSpec(lightning="both", scenario="swarm.scenarios:other_package"))
    peer.wait_for("finished", timeout_s=START_S)
    assert peer.said("finished")[0]["base"] == "pytorch_lightning"
    peer.wait_exit()


def test_peers_of_unlike_packages_train_together(swarm: Swarm) -> None:
    peers = swarm.start(
        2,
        peers=[{"lightning": "lightning"}, {"lightning": "pytorch_lightning"}],
        trainer={"max_steps": 2},
        delay_s=0.02,
    )
    swarm.finish()
    assert_complete(peers, [1, 2])
    assert_in_step(peers, [1, 2])


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_accelerators_by_name(swarm: Swarm, accelerator: str) -> None:
    (peer,) = swarm.start(1, together=False, trainer={"accelerator": accelerator, "max_steps": 1})
    swarm.finish()
    assert peer.said("finished")[0]["global_step"] == 1


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_older_name_is_the_same_strategy(swarm: Swarm, package: str) -> None:
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:older_name", lightning=package))
    assert peer.wait_for("finished", timeout_s=START_S)["global_step"] == 1
    peer.wait_exit()


@ANY_ENGINE
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_registry_knows_the_strategy_by_name(swarm: Swarm, package: str) -> None:
    """A name alone says nothing of the swarm's batch: the error has the line to write."""
    peer = swarm.launch(PeerSpec(scenario="swarm.scenarios:registry", lightning=package))
    found = peer.wait_for("registry", timeout_s=START_S)
    assert set(found["names"]) >= {"hivemind", "collaborative"}
    assert "Trainer(strategy=HivemindStrategy(target_batch_size=...))" in found["error"]
    peer.wait_exit()


CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy:
    class_path: CLASS_PATH
    init_args:
      target_batch_size: 16
      max_staleness: 2
      grad_compression:
        class_path: lightning_hivemind.Float16Compression
      matchmaking_time: 2.0
      host_maddrs: [/ip4/127.0.0.1/tcp/0]
"""


@ANY_ENGINE
@pytest.mark.parametrize(
    ("package", "home"),
    [("lightning", "lightning_hivemind.strategy"), ("pytorch_lightning", "lightning_hivemind")],
)
def test_lightning_cli_takes_the_strategy_from_yaml(swarm: Swarm, package: str, home: str) -> None:
    config = Path(swarm.folder, "config.yaml")
    config.write_text(CONFIG.replace("CLASS_PATH", f"{home}.HivemindStrategy"), encoding="utf-8")
    peer = swarm.launch(PeerSpec(lightning=package, scenario="swarm.scenarios:cli", free={"config": str(config)}))
    result = peer.wait_for("finished", timeout_s=START_S)
    assert (result["global_step"], result["target"], result["engine"]) == (2, 16, "native")
    peer.wait_exit()
