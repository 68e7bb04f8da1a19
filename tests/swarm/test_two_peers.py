"""Two peers: what holds at the defaults, and how a peer finds the others."""

from __future__ import annotations

import json

import pytest

from swarm.checks import assert_complete, assert_in_step, assert_ledger
from swarm.harness import START_S, Swarm
from swarm.replay import distance, replay

pytestmark = pytest.mark.swarm


def test_two_peers_at_the_defaults_make_the_same_steps_together(swarm: Swarm) -> None:
    peers = swarm.start(2, quick=False, trainer={"max_steps": 2}, delay_s=0.02)
    swarm.finish()
    assert_complete(peers, [1, 2])
    assert_ledger(peers)
    assert_in_step(peers, [1, 2])
    expected = replay(peers, 2)
    assert distance(peers[0].parameters(2), expected[2]) < 1e-5
    assert all(sum(len(p.commits[e].indices) for p in peers) >= 32 for e in (1, 2)), "a step below target_batch_size"


def test_a_joiner_with_another_seed_takes_the_first_peers_parameters(swarm: Swarm) -> None:
    first, second = swarm.start(
        2, peers=[{}, {"model": {"seed": 99}}], model={"seed": 1}, trainer={"max_steps": 1}, delay_s=0.02
    )
    assert first.commits[0].digest == second.commits[0].digest
    second.wait_for("StateLoaded", epoch=0)
    swarm.finish()
    assert_in_step([first, second], [1])


@pytest.mark.above_engines
def test_events_go_to_the_file_that_the_environment_names(swarm: Swarm) -> None:
    (peer,) = swarm.start(1, together=False, trainer={"max_steps": 2})
    swarm.finish()
    written = [json.loads(line) for line in (peer.folder / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in written]
    assert names[0] == "PeerStarted"
    assert names[-1] == "PeerStopped"
    assert [e["epoch"] for e in written if e["event"] == "EpochCommitted"] == [1, 2]


@pytest.mark.above_engines
def test_every_way_to_name_initial_peers_joins(swarm: Swarm) -> None:
    """Published: INITIAL_PEERS (documented), PL_INITIAL_PEERS (older), a list, and a text with commas."""
    (founder,) = swarm.start(1, together=False, hold_at=[1])
    founder.wait_for("holding")
    addresses = swarm.addresses()
    ways = [
        {"env": {"INITIAL_PEERS": ",".join(addresses)}},
        {"env": {"PL_INITIAL_PEERS": ",".join(addresses)}},
        {"strategy": {"initial_peers": addresses}},
        {"strategy": {"initial_peers": ", ".join(addresses)}},
    ]
    for joiner in swarm.start(4, peers=ways, together=False, trainer={"max_steps": -1}, delay_s=0.2):
        joiner.wait_for("StateLoaded", timeout_s=START_S)


@pytest.mark.above_engines
def test_the_printed_invitation_names_addresses_under_which_the_peer_answers(swarm: Swarm) -> None:
    (founder,) = swarm.start(1, together=False, hold_at=[1])
    founder.wait_for("holding")
    (line,) = [text for text in founder.output.splitlines() if text.startswith("INITIAL_PEERS=")]
    value = line.split("=", 1)[1].split()[0]
    (joiner,) = swarm.start(1, env={"INITIAL_PEERS": value}, together=False)
    joiner.wait_for("StateLoaded", timeout_s=START_S)


@pytest.mark.above_engines
def test_a_script_can_wait_for_the_others_before_its_first_batch(swarm: Swarm) -> None:
    """``strategy.num_peers`` counts those who have not finished a batch yet, whenever it is read."""
    peers = swarm.start(2, free={"barrier_batch": 0}, trainer={"max_steps": 1}, delay_s=0.02)
    swarm.finish()
    assert_complete(peers, [1])


def test_early_stopping_on_one_peer_stops_both_at_the_same_epoch(swarm: Swarm) -> None:
    stopping = "[pl.callbacks.EarlyStopping('val_loss', patience=1)]"
    trainer = {"max_steps": -1, "val_check_interval": 3}
    first, second = swarm.start(
        2,
        peers=[{"trainer_code": {"callbacks": stopping}, "model": {"monitor_values": [1.0, 1.0, 2.0, 3.0]}}, {}],
        trainer=trainer,
        delay_s=0.05,
    )
    swarm.finish()
    ends = [peer.said("finished")[0] for peer in (first, second)]
    assert ends[0]["global_step"] == ends[1]["global_step"] == max(first.commits) == max(second.commits)
    assert first.said("StopRequested", by_this_peer=True)
    assert second.said("StopRequested", by_this_peer=False)
