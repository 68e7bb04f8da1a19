"""``kill -9`` of a member, an owner of chunks and the coordinator in every phase of a round."""

from __future__ import annotations

import os
import signal

import pytest

from swarm.checks import assert_ledger, together
from swarm.harness import Peer, Swarm
from swarm.phases import MOMENTS
from swarm.processes import wait_until
from swarm.spec import ENDLESS

pytestmark = pytest.mark.swarm

TRAINS = {"scenario": "swarm.phases:trains", "trainer": ENDLESS, "delay_s": 0.03}

#: in `make test`; the others in `make test-full`
OFTEN = {"member, has given one chunk", "owner, one other has a result"}
OFTEN |= {"coordinator, one other has the plan", "coordinator, has decided"}


@pytest.fixture
def engine() -> str:
    return "native"


@pytest.mark.parametrize("role", ["member", "owner", "coordinator"])
def test_whoever_dies_whenever_the_others_go_on_alike_and_nothing_counts_twice(swarm: Swarm, role: str) -> None:
    survivors = swarm.start(2, **TRAINS)
    for moment in MOMENTS:
        if moment.startswith(role) and (moment in OFTEN or "ENGINES" in os.environ):
            die(swarm, survivors, moment)
    check(survivors)
    if role == "coordinator":  # with which a round dies that the others were in
        told = [peer for peer in survivors if peer.said("RoundIncomplete", kind="gradients", fraction=0.0)]
        assert told
        assert all("nothing was changed; the next attempt has the same gradients" in peer.output for peer in told)


def test_the_first_peer_is_a_peer_like_any_other(swarm: Swarm) -> None:
    """Through which all the others have joined."""
    moment = "coordinator, one other knows"
    first, *others = swarm.start(3, peers=[{"scenario": "swarm.phases:dies", "free": {"dies": moment}}], **TRAINS)
    end(first, others, moment)
    swarm.start(1, together=False, **TRAINS)
    check(others)


def die(swarm: Swarm, survivors: list[Peer], moment: str) -> None:
    """One more peer, which dies at ``moment``."""
    fields = {**TRAINS, "scenario": "swarm.phases:dies", "free": {"dies": moment}}
    (victim,) = swarm.start(1, together=False, **fields)
    end(victim, survivors, moment)


def end(victim: Peer, others: list[Peer], moment: str) -> None:
    victim.wait_until(lambda: bool(together([victim, *others])), timeout_s=60, what=f"in one step: {moment}")
    (victim.folder / "die").touch()
    wait_until(lambda: victim.exit_code is not None, timeout_s=60, what=f"{victim.name} dies: {moment}")
    assert victim.exit_code == -signal.SIGKILL
    victim.wait_exit(code=-signal.SIGKILL)
    for peer in others:
        peer.wait_epoch(max(peer.commits) + 3, timeout_s=60)


def check(survivors: list[Peer]) -> None:
    last = min(max(peer.commits) for peer in survivors)
    steps = [{one["epoch"]: one["digest"] for one in peer.said("step") if one["epoch"] <= last} for peer in survivors]
    assert len(steps[0]) >= last
    assert steps[0] == steps[1]
    assert not [event for peer in survivors for event in peer.said("RoundMissed") + peer.said("StateLoaded")[1:]]
    assert_ledger(survivors)
