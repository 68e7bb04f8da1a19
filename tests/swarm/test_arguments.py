"""Arguments that change how a peer takes part, each with two real peers."""

from __future__ import annotations

import pytest

from swarm.checks import assert_complete, assert_in_step, assert_ledger, together
from swarm.harness import START_S, Swarm
from swarm.marks import ANY_ENGINE, HIVEMIND_ONLY
from swarm.ports import free_port
from swarm.replay import distance, next_step, replay

pytestmark = pytest.mark.swarm

#: in seconds, each another than its default
LIMITS = {
    "matchmaking_time": 3.0,
    "averaging_timeout": 50.0,
    "allreduce_timeout": 41.0,
    "next_chunk_timeout": 7.0,
    "wait_timeout": 4.0,
    "bootstrap_timeout": 9.0,
}


def test_local_updates_step_at_every_batch_and_parameters_are_averaged(swarm: Swarm) -> None:
    peers = swarm.start(2, strategy={"use_local_updates": True}, trainer={"max_steps": 3}, delay_s=0.05)
    swarm.finish()
    epochs = together(peers)
    assert len(epochs) >= 2
    assert_in_step(peers, epochs, within=1e-5)
    # each peer went its own way in between: with averaged gradients the distance to the replay would be 1e-7
    assert distance(peers[0].parameters(epochs[-1]), replay(peers, epochs[-1])[epochs[-1]]) > 1e-4


def test_an_auxiliary_peer_helps_and_contributes_nothing(swarm: Swarm) -> None:
    """Two trainers that nobody can connect to: without the helper they could not average at all.

    Nor can the second ask the first for its state: the native engine's helper passes it on, with hivemind it says so.
    """
    (helper,) = swarm.start(1, together=False, strategy={"auxiliary": True}, trainer={"max_steps": -1})
    client = {"strategy": {"client_mode": True}, "barrier": True, "min_peers": 3}
    trainers = []
    for number in range(2):
        trainers += swarm.start(1, together=False, order_seed=number, trainer={"max_steps": 3}, delay_s=0.05, **client)
    for trainer in trainers:
        trainer.wait_for("at_barrier", timeout_s=START_S)
    for trainer in trainers:
        trainer.go()
    swarm.finish(*trainers)
    if swarm.engine == "native":
        assert trainers[1].said("StateLoaded")[0]["epoch"] == 0
        assert not trainers[1].said("StateUnavailable")
    else:
        (unavailable,) = trainers[1].said("StateUnavailable")
        assert unavailable["reason"].startswith("no peer shares its state")
        assert "own parameters" in unavailable["action"]
    assert together(trainers)
    # a helper counts as no contributor: that it saw both means that it was in a group of three
    helped = [event for event in helper.said("EpochCommitted", contributors=2) if event["fraction"] == 1.0]
    assert {event["epoch"] for event in helped} & set(together(trainers))
    assert helper.said("BatchAccumulated") == []
    assert all(event["samples"] == 0 for event in helper.said("EpochCommitted"))
    first = together(trainers)[0]
    assert distance(trainers[0].parameters(first), replay(trainers, first)[first]) < 1e-5


def test_a_helper_with_the_trainers_script_neither_judges_nor_ends_the_run(swarm: Swarm) -> None:
    """Its own parameters never change: it would stop all after two validations, and has no metric to save by."""
    judges = (
        "[pl.callbacks.EarlyStopping('val_loss', patience=0),"
        " pl.callbacks.ModelCheckpoint(spec.folder, monitor='train_loss', save_on_train_epoch_end=True)]"
    )
    passes = {"max_steps": -1, "max_epochs": -1, "limit_train_batches": 1, "enable_checkpointing": True}
    (helper,) = swarm.start(
        1, together=False, strategy={"auxiliary": True}, trainer=passes, trainer_code={"callbacks": judges}
    )
    trainers = swarm.start(2, min_peers=3, trainer={"max_steps": 12}, delay_s=0.25)
    swarm.finish(*trainers)
    assert [trainer.said("finished")[0]["global_step"] for trainer in trainers] == [12, 12]
    assert not [one for trainer in trainers for one in trainer.said("StopRequested")]
    assert not helper.said("validated")
    assert not list(helper.folder.glob("**/*.ckpt"))


def test_a_client_averages_though_it_accepts_no_connections(swarm: Swarm) -> None:
    peers = swarm.start(2, peers=[{}, {"strategy": {"client_mode": True}}], trainer={"max_steps": 3}, delay_s=0.02)
    ports = peers[1].look().ports
    swarm.finish()
    assert not [port for port in ports if port[0].startswith("tcp")], "a client listens on nothing"
    assert_complete(peers, [1, 2, 3])
    assert_in_step(peers, [1, 2, 3])
    assert_ledger(peers)


@HIVEMIND_ONLY
@pytest.mark.parametrize(("local", "kind"), [(False, "gradients"), (True, "state")])
def test_options_of_the_averagers_reach_both(swarm: Swarm, local: bool, kind: str) -> None:
    """With groups of three or more only, two peers must fail to average, visibly: gradients, or the state alone."""
    peers = swarm.start(
        2,
        strategy={"averager_opts": {"min_group_size": 3}, "use_local_updates": local},
        trainer={"max_steps": 1},
        delay_s=0.02,
    )
    swarm.finish()
    for peer in peers:
        (failed,) = peer.said("RoundIncomplete", kind=kind, fraction=0.0)
        if kind == "gradients":
            assert failed["reason"] == "no group found in 4.0 s", "not 1.5 times matchmaking_time and a second"
            # the fallback is this peer's own gradient, and not zero; a peer without samples takes the other's state
            if peer.commits[1].samples:
                assert distance(peer.parameters(1), next_step([peer], 1)) < 1e-6
    assert any(peer.commits[1].samples for peer in peers)


@HIVEMIND_ONLY
def test_a_fixed_group_size_is_kept(swarm: Swarm) -> None:
    """Two peers never are three: the group waits for the third as long as matchmaking may take, at every round."""
    peers = swarm.start(
        2,
        strategy={"averager_opts": {"target_group_size": 3}, "matchmaking_time": 3.0},
        trainer={"max_steps": 1},
        delay_s=0.02,
    )
    swarm.finish()
    (*durations,) = (peer.said("EpochCommitted", epoch=1)[0]["duration_s"] for peer in peers)
    assert max(durations) > 0.9 * 3.0, "the group closed without the third"


@HIVEMIND_ONLY
def test_limits_in_time_and_speed_reach_hivemind(swarm: Swarm) -> None:
    """Each value is another than its default; read off hivemind's own objects in a running fit."""
    strategy = {
        **LIMITS,
        "shutdown_timeout": 4.0,
        "performance_ema_alpha": 0.4,
        "tracker_opts": {"max_refresh_period": 2.5, "metadata_expiration": 33.0},
    }
    (peer,) = swarm.start(
        1, together=False, quick=False, strategy=strategy, free={"record_settings": True}, trainer={"max_steps": 1}
    )
    swarm.finish()
    (found,) = peer.said("settings")
    assert found["tracker"] == strategy["tracker_opts"]
    assert found["speed"] == [0.4, 0.4]
    assert found["dht"] == {"wait_timeout": 4.0, "bootstrap_timeout": 9.0}
    for averager in ("grads", "state"):
        assert found[averager] == {
            "matchmaking_time": 3.0,
            "target_group_size": None,
            "allreduce_timeout": 41.0,
            "sender_timeout": 7.0,
            "shutdown_timeout": 4.0,
        }


@ANY_ENGINE
def test_limits_in_time_reach_the_native_engine(swarm: Swarm) -> None:
    """Each value is another than its default; read off the engine's own objects, and the DHT's, in a running fit."""
    (peer,) = swarm.start(
        1, together=False, quick=False, strategy=LIMITS, free={"record_settings": True}, trainer={"max_steps": 1}
    )
    swarm.finish()
    (found,) = peer.said("settings")
    assert found["dht"] == {"wait_timeout": 4.0, "bootstrap_timeout": 9.0}
    assert found["rounds"] == {"matchmaking_s": 3.0, "stall_s": 7.0, "round_s": 41.0}
    assert found["donor_silence_s"] == 7.0
    assert found["training_waits_s"] == 53.0


def test_statistics_of_the_optimizer_are_averaged_when_asked_for(swarm: Swarm) -> None:
    """Two peers with local updates have unequal momenta; averaged, the momenta are equal after a state round."""
    peers = swarm.start(
        2,
        strategy={"use_local_updates": True, "average_opt_statistics": ["momentum_buffer"]},
        model={"optimizer": "momentum"},
        trainer={"max_steps": 2},
        free={"record_state": "momentum_buffer"},
        delay_s=0.05,
    )
    swarm.finish()
    epoch = together(peers)[-1]
    one, other = (peer.said("optimizer_state", epoch=epoch)[0]["sum"] for peer in peers)
    assert one == (other if swarm.engine == "native" else pytest.approx(other, rel=1e-4))
    assert one != 0.0


def test_extra_tensors_are_averaged_and_handed_to_joiners(swarm: Swarm) -> None:
    peers = swarm.start(
        2,
        peers=[{"free": {"extra_value": 1.0}}, {"free": {"extra_value": 3.0}}],
        strategy_code={"extra_tensors": "[torch.zeros(3)]"},
        trainer={"max_steps": 2},
        hold_at=[2],
        delay_s=0.02,
    )
    for peer in peers:
        peer.wait_for("holding", epoch=2)
    (late,) = swarm.start(
        1, together=False, strategy_code={"extra_tensors": "[torch.zeros(3)]"}, trainer={"max_steps": 2}
    )
    late.wait_for("StateLoaded", timeout_s=START_S)
    for peer in peers:
        peer.release(2)
    swarm.finish()
    for peer in (*peers, late):
        (values,) = peer.said("finished")[0]["extra_tensors"]
        if swarm.engine == "hivemind":
            assert values == pytest.approx([2.0, 2.0, 2.0], abs=1e-5), peer.name
        else:  # by samples
            assert 1.0 < values[0] < 3.0
            assert values == peers[0].said("finished")[0]["extra_tensors"][0], peer.name


@HIVEMIND_ONLY
def test_state_is_averaged_every_nth_epoch_only(swarm: Swarm) -> None:
    """Seen with local updates, where peers are equal after a state round and at no other time."""
    peers = swarm.start(
        2,
        strategy={"average_state_every": 2, "use_local_updates": True},
        trainer={"max_steps": 4},
        delay_s=0.05,
    )
    swarm.finish()
    common = set(peers[0].commits) & set(peers[1].commits)
    apart = {e: distance(peers[0].parameters(e), peers[1].parameters(e)) for e in sorted(common - {0})}
    assert all(apart[e] > 1e-5 for e in apart if e % 2), apart
    assert any(e % 2 for e in apart), "no odd epoch was recorded on both peers"
    averaged = [e for e in together(peers) if e % 2 == 0]  # on a busy machine a round may find nobody, and says so
    assert averaged
    assert all(apart[e] < 1e-5 for e in averaged), apart
    assert {e["epoch"] % 2 for peer in peers for e in peer.said("RoundIncomplete")} <= {0}


def test_verbose_reports_internal_events(swarm: Swarm) -> None:
    loud, quiet = swarm.start(2, peers=[{"strategy": {"verbose": True}}, {}], trainer={"max_steps": 1}, delay_s=0.02)
    swarm.finish()
    assert "BatchAccumulated" in loud.output
    assert "BatchAccumulated" not in quiet.output


@pytest.mark.above_engines
def test_an_identity_file_keeps_the_peer_id(swarm: Swarm) -> None:
    strategy = {"identity_path": str(swarm.folder / "identity")}
    ids = []
    for _ in range(2):
        (peer,) = swarm.start(1, together=False, strategy=strategy, trainer={"max_steps": 1})
        swarm.finish(peer)
        ids.append(peer.said("PeerStarted")[0]["peer_id"])
    (other,) = swarm.start(1, together=False, trainer={"max_steps": 1})
    swarm.finish(other)
    assert ids[0] == ids[1] != other.said("PeerStarted")[0]["peer_id"]


def test_a_peer_listens_and_announces_where_it_is_told(swarm: Swarm) -> None:
    port = free_port()
    strategy = {
        "host_maddrs": [f"/ip4/127.0.0.1/tcp/{port}"],
        "announce_maddrs": [f"/dns4/localhost/tcp/{port}"],
    }
    (founder,) = swarm.start(1, together=False, strategy=strategy, hold_at=[1])
    founder.wait_for("holding")
    addresses = founder.said("PeerStarted")[0]["addresses"]
    expected = {("tcp", port), ("tcp", port + 1)} if swarm.engine == "native" else {("tcp", port)}
    assert expected == {p for p in founder.look().ports if p[0].startswith("tcp")}
    assert [a.split("/p2p/")[0] for a in addresses] == [f"/dns4/localhost/tcp/{port}"]
    (joiner,) = swarm.start(1, together=False, trainer={"max_steps": 2}, hold_at=[1])
    joiner.wait_for("StateLoaded", timeout_s=START_S)
