"""Peers that live and cannot reach one another, as behind two routers: others lead and reduce for them."""

from __future__ import annotations

import pytest

from lightning_hivemind.engine.native.protocol.lineage import Contribution, Head
from lightning_hivemind.engine.native.protocol.plan import Offer, reducers_of
from lightning_hivemind.engine.native.protocol.roster import RECEIVES_SLOWLY, Place, Roster
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.simulation.network import HostileNetwork
from lightning_hivemind.simulation.trainer import Habits
from lightning_hivemind.simulation.world import World
from swarm.table import Table

BATCH_S, SECONDS = 0.1, 30.0
SETTLES_S = 0.2


def trained(names: str, cuts: list[str], seed: int) -> World:
    """Everybody trains, and no connection between these pairs is ever made."""
    settings = Settings(run="run", target_samples=16 * len(names), chunks=8)
    world = World(settings, HostileNetwork(seed=seed, delay_s=0.02))
    for name in names:
        world.add(name, Habits(batch_s=BATCH_S))
    for one, other in cuts:
        world.cut(one, other)
    world.clock.run(SECONDS)
    return world


def contributed(world: World) -> dict[str, float]:
    """Of each peer, which share of its samples is in a commit."""
    front = max(world.living(), key=lambda peer: peer.head.samples)
    counts = dict.fromkeys(world.peers, 0)
    for commit in front.applied:
        for one in commit.contributions:
            counts[one.peer] += one.samples
    return {name: count / world.peers[name].made for name, count in counts.items()}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("names", "cuts"),
    [("abc", ["ab"]), ("abc", ["ac"]), ("abcde", ["ab"]), ("abcde", ["ab", "ad", "bd"]), ("abcd", ["ab", "ac", "bc"])],
    ids=["one between two", "the founder in a corner", "one pair of five", "three of five", "a star"],
)
def test_who_cannot_reach_one_another_train_as_quickly_through_the_others(
    names: str, cuts: list[str], seed: int
) -> None:
    """(Before roles were given to those who reach all, a single such pair of five cost nine tenths of the steps.)"""
    world = trained(names, cuts, seed)
    steps = min(peer.head.epoch for peer in world.living())
    assert steps >= 0.67 * SECONDS / (2 * BATCH_S), "up to ten seconds are for finding out"
    assert min(contributed(world).values()) >= 0.85
    assert world.forks <= 2
    for peer in world.living():
        world.check_ledger(peer)


def test_where_nobody_reaches_all_everybody_still_contributes() -> None:
    world = trained("abcd", ["ac", "bd"], seed=1)
    assert min(contributed(world).values()) >= 0.8
    for peer in world.living():
        world.check_ledger(peer)


def test_a_pair_that_can_reach_one_another_again_is_given_roles_again() -> None:
    world = trained("abc", ["ab"], seed=1)
    assert world.peers["a"].core.cut == ("b",)
    world.heal()
    world.clock.run(SECONDS + 20.0)  # they try every 15 s
    assert [peer.core.cut for peer in world.living()] == [(), (), ()]
    assert {peer.core.living for peer in world.living()} == {("a", "b"), ("a", "c"), ("b", "c")}


def test_who_dies_is_not_taken_for_one_that_is_out_of_reach_for_long() -> None:
    world = trained("abc", [], seed=1)
    world.crash("b")
    world.clock.run(SECONDS + 40.0)
    assert [peer.core.cut for peer in world.living()] == [(), ()]
    assert [peer.core.living for peer in world.living()] == [("c",), ("a",)]


def test_two_that_each_believe_the_other_cut_off_agree_on_who_leads() -> None:
    """After a heal, say: each knows itself better than the other's last record does."""
    table = Table(["a", "b"], Settings(run="run", target_samples=16, chunks=2))
    for name, other in (("a", "b"), ("b", "a")):
        head = table.peers[other].head
        assert head is not None
        table.peers[name].saw(other, Place(head=head, samples=0, stamp=1.0, cuts=1), table.now)
    table.train(a=16, b=16)
    table.wait(1.0)
    assert [len(table.applied[name]) for name in "ab"] == [1, 1]


def test_who_makes_steps_with_others_lives_though_no_record_of_it_was_read() -> None:
    """That of the first step may have been on its way while it died, and that of the second have been called then."""
    table = Table(["a", "b", "c"], Settings(run="run", target_samples=16, chunks=2))
    ends = {"b", "c"}
    table.hold = lambda sender, receiver, _: {sender, receiver} == ends
    for name in ends:
        (other,) = ends - {name}
        table.peers[name].lost(other, table.now)
        head = table.peers[name].head
        assert head is not None
        table.peers["a"].saw(name, Place(head=head, samples=0, stamp=1.0, cuts=1), table.now)  # so it leads itself
    found = []
    for _ in range(4):
        table.train(a=16)
        table.wait(SETTLES_S)
        found.append([table.peers[name].cut for name in sorted(ends)])
        table.train(a=0)
    for _ in range(8):  # and for as long as it does so, though no record says anything
        table.wait(5.0)
        table.train(a=16)
        table.wait(SETTLES_S)
        table.train(a=0)
    assert table.peers["b"].cut == ("c",)
    assert [len(commits) for commits in table.applied.values()] == [12, 12, 12]
    notes = [peer for peer, what in table.notes() if "there is no way to it" in what]
    assert sorted(notes) == ["b", "c"], "said once"
    assert found == [[(), ()], [(), ()], [("c",), ("b",)], [("c",), ("b",)]]


def test_chunks_are_given_to_those_to_whom_all_members_have_connections() -> None:
    given = {"contribution": Contribution(peer="a", number=1, samples=1)}
    offers = {
        "a": Offer(**given, bandwidth=1.0, cut=("b", "elsewhere")),
        "b": Offer(**given, bandwidth=2.0),
        "c": Offer(**given, bandwidth=3.0, cut=("elsewhere",)),
        "d": Offer(**given, bandwidth=4.0, reduces=False),
    }
    assert reducers_of(offers) == {"c": 3.0}


def test_who_reaches_all_leads_over_a_slow_line_and_among_equals_a_quick_one_does() -> None:
    settings = Settings(run="run", target_samples=16, chunks=1)
    head = Head.root("run", "a")
    for slow_cuts, quick_cuts, leader in ((0, 1, "slow"), (0, 0, "quick"), (1, 1, "quick")):
        roster = Roster(settings, "client", reduces=False)
        slow = Place(head=head, samples=0, stamp=1.0, cuts=slow_cuts + RECEIVES_SLOWLY)
        roster.record("slow", slow, 0.0, outdated=False)
        roster.record("quick", Place(head=head, samples=0, stamp=1.0, cuts=quick_cuts), 0.0, outdated=False)
        assert roster.candidate(head) == leader
        assert roster.quick() == ["quick"]
