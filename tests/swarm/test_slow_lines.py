"""A peer on a slow line costs the others nothing, and trains with them as far as its line goes."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from swarm.checks import together
from swarm.harness import Peer, Swarm
from swarm.marks import ANY_ENGINE
from swarm.namespaces import homes, why_no_homes, why_unavailable
from swarm.spec import ENDLESS

pytest.importorskip("hivemind")
#: stock hivemind waits for the slowest
pytestmark = [ANY_ENGINE, pytest.mark.swarm, pytest.mark.usefixtures("may_make_homes")]

#: of float32; two peers need a second and a little for a step
GRADIENT_BYTES = 1.3e6
RUN = {"model": {"width": 512}, "trainer": ENDLESS, "delay_s": 0.1, "strategy": {"target_batch_size": 160}}


@pytest.fixture
def may_make_homes() -> None:
    if reason := why_unavailable() or why_no_homes():
        pytest.skip(reason)


def assert_not_waited_for(peer: Peer, mbit_s: float, count: int) -> None:
    """In its last rounds it waited for much less than such a line takes."""
    rounds_s = [one["duration_s"] for one in peer.said("EpochCommitted")[-count:]]
    assert median(rounds_s) < 0.5 * GRADIENT_BYTES / (mbit_s / 8 * 1e6), rounds_s


def assert_equal(peers: list[Peer], epochs: list[int]) -> None:
    for epoch in epochs:
        assert len({peer.wait_epoch(epoch).digest for peer in peers}) == 1, f"epoch {epoch}"


def test_who_sends_slowly_hands_its_gradient_to_another_one(swarm: Swarm) -> None:
    """It takes 2.6 s to send; in a round, all would wait for that."""
    with homes(3, 1000.0, slower={2: 4.0}) as spaces:
        places = [{"network": space.name, "strategy": {"max_staleness": 8}} for space in spaces]
        peers = swarm.start(3, peers=places, **RUN)
        *quick, slow = peers
        slow.wait_until(lambda: len(slow.said("GradientHandedOver")) >= 8, timeout_s=120, what="eight handed over")
        handed = slow.said("GradientHandedOver")
        told_of = [one["epoch"] for one in quick[0].said("EpochCommitted") if one["epoch"] > handed[0]["epoch"]]
        epochs = told_of[:-1]  # what it gave to the last one itself may not be recorded yet
        assert len(epochs) >= 5
        assert_not_waited_for(quick[0], 4.0, 10)
        assert_equal(peers, epochs)
        assert not [one for one in slow.said("EpochCommitted") if one["epoch"] in epochs and one["samples"]]
        given = sum(one["samples"] for peer in quick for one in peer.said("EpochCommitted") if one["epoch"] in epochs)
        own = sum(len(commit.indices) for peer in quick for epoch, commit in peer.commits.items() if epoch in epochs)
        slow.wait_until(
            lambda: len(slow.said("GradientHandedOver")) >= len(handed) + 2,
            timeout_s=60,
            what="it has told of all these",
        )
        told = sum(one["samples"] for one in handed)
        told_since = sum(one["samples"] for one in slow.said("GradientHandedOver"))
        assert 0.5 * told < given - own <= told_since, "what it handed over is in steps, and once"
        carried = sum(one["samples"] for peer in quick for one in peer.said("GradientCarried"))
        assert carried >= told, "and whoever had it has said so"
        assert not [one for peer in quick for one in peer.said("RoundMissed")]


def test_a_line_that_is_too_slow_for_any_gradient_says_so_and_costs_the_others_nothing(swarm: Swarm) -> None:
    """It takes 10 s to send, a step one, and a gradient may be one step old."""
    with homes(3, 1000.0, slower={2: 1.0}) as spaces:
        peers = swarm.start(3, peers=[{"network": space.name} for space in spaces], **RUN)
        *quick, slow = peers

        def told() -> list[dict[str, Any]]:
            return [one for one in slow.said("RoundMissed") if "line takes longer to send them" in one["reason"]]

        slow.wait_until(lambda: len(told()) >= 3, timeout_s=120, what="it has said so")
        assert all("than max_staleness=1 allows" in one["reason"] for one in told())
        since = quick[0].said("EpochCommitted")[-1]["epoch"]
        quick[0].wait_epoch(since + 10)
        assert_not_waited_for(quick[0], 1.0, 10)
        assert_equal(peers, list(range(since, since + 9)))


def test_who_receives_slowly_is_not_waited_for_and_in_step_all_the_same(swarm: Swarm) -> None:
    """An average takes 1.3 s to get there, of two that a step takes."""
    with homes(3, 1000.0, downlinks={2: 8.0}) as spaces:
        peers = swarm.start(3, peers=[{"network": space.name, "delay_s": 0.2} for space in spaces], **RUN)
        first, _, slow = peers
        first.wait_until(lambda: len(first.commits) >= 15, timeout_s=120, what="15 steps")
        assert_not_waited_for(first, 8.0, 10)
        assert_equal(peers, [one["epoch"] for one in first.said("EpochCommitted")][1:-2])
        assert together(peers)[-1] > 8, "it gives its gradient to rounds"
        assert not slow.said("StateLoaded")[1:], "it has every average"


def test_a_line_that_does_not_carry_an_average_per_step_costs_the_others_nothing_and_says_so(swarm: Swarm) -> None:
    """An average takes 3.5 s, a step one: nobody can be in step over it."""
    with homes(3, 1000.0, downlinks={2: 3.0}) as spaces:
        peers = swarm.start(3, peers=[{"network": space.name} for space in spaces], **RUN)
        first, second, slow = peers
        slow.wait_until(lambda: bool(slow.said("FallingBehind")), timeout_s=120, what="it is told so")
        first.wait_until(lambda: len(first.commits) >= 20, timeout_s=120, what="20 steps")
        assert_not_waited_for(first, 3.0, 10)
        assert_equal([first, second], [one["epoch"] for one in first.said("EpochCommitted")][1:-2])
