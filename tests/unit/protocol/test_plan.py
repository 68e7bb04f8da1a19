"""Who reduces what: each chunk once, by bandwidth, and anew when somebody is lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.engine.native.protocol.lineage import Contribution, Head
from lightning_hivemind.engine.native.protocol.plan import (
    Offer,
    Plan,
    make_plan,
    reducers_of,
    share_chunks,
    shares,
    slow_lines,
)

PEERS = [f"p{number}" for number in range(6)]
BANDWIDTHS = st.dictionaries(st.sampled_from(PEERS), st.floats(0.01, 1e9), min_size=1)


def plan(bandwidths: dict[str, float], chunks: int, givers: list[str]) -> Plan:
    return make_plan(
        b"round",
        Head.root("run", "p0"),
        "p0",
        members=PEERS,
        contributions=[Contribution(peer=peer, number=1, samples=8) for peer in givers],
        bandwidths=bandwidths,
        chunks=chunks,
        stop=False,
    )


@given(BANDWIDTHS, st.integers(0, 300))
def test_every_chunk_has_one_owner_and_shares_follow_the_bandwidth(bandwidths: dict[str, float], chunks: int) -> None:
    owners = share_chunks(chunks, sorted(bandwidths.items()))
    assert len(owners) == chunks
    total = sum(bandwidths.values())
    for peer, bandwidth in bandwidths.items():
        assert abs(owners.count(peer) - chunks * bandwidth / total) <= 1.0001
    assert owners == sorted(owners), "an owner's chunks are neighbours"


@given(BANDWIDTHS, st.integers(3, 1000))
def test_all_who_reduce_have_sent_what_they_must_at_the_same_time(bandwidths: dict[str, float], members: int) -> None:
    members = max(members, len(bandwidths))
    found = shares(bandwidths, members)
    assert found.keys() == bandwidths.keys()
    assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-6)
    times = {peer: (1 + share * (members - 2)) / bandwidths[peer] for peer, share in found.items()}
    reducing = [times[peer] for peer, share in found.items() if share > 0.0]
    assert max(reducing) <= min(reducing) * (1 + 1e-6)
    for peer, share in found.items():
        assert share > 0.0 or times[peer] >= max(reducing) * (1 - 1e-6), "it would have been done before the others"


@given(BANDWIDTHS, st.integers(0, 300), st.sampled_from(PEERS))
def test_inputs_are_spread_over_all_owners_all_the_way(bandwidths: dict[str, float], chunks: int, sender: str) -> None:
    made = plan(bandwidths, chunks, PEERS)
    order = made.by_turns(sender)
    assert sorted(order) == list(range(chunks)), "each chunk once"
    for owner in set(made.owners):
        mine = made.chunks_of(owner)
        sent = 0
        for number, chunk in enumerate(order):
            if made.owners[chunk] == owner:
                assert chunk == mine[sent], "an owner's chunks in order"
                sent += 1
            share = (number + 1) * len(mine) / chunks
            assert abs(sent - share) <= len(set(made.owners)), "no owner waits for what others get"


def test_not_all_senders_send_to_the_same_owner_first() -> None:
    made = plan(dict.fromkeys(PEERS[:3], 1.0), 30, PEERS)
    assert [made.owners[made.by_turns(sender)[0]] for sender in PEERS] == ["p1", "p2", "p0", "p0", "p0", "p0"]


def test_equal_lines_have_equal_shares_and_a_slow_one_has_less() -> None:
    assert shares(dict.fromkeys("abcd", 7.0), 9) == pytest.approx(dict.fromkeys("abcd", 0.25))
    uneven = shares({"a": 10.0, "b": 10.0, "c": 5.0}, 3)
    assert uneven["c"] == 0.0, "its own values take it as long as everything takes the others"
    assert shares({"a": 10.0, "b": 10.0, "c": 9.0}, 3)["c"] == pytest.approx(0.24, abs=0.01)
    assert shares({"a": 0.0, "b": 0.0}, 5) == {"a": 0.0, "b": 0.0}


@given(BANDWIDTHS, st.integers(1, 40), st.sets(st.sampled_from(PEERS[1:])), st.sets(st.sampled_from(PEERS)))
def test_after_a_loss_nothing_of_the_lost_is_left(
    bandwidths: dict[str, float], chunks: int, lost: set[str], givers: set[str]
) -> None:
    before = plan(bandwidths, chunks, sorted(givers))
    after = before.without(frozenset(lost))
    assert after.version == before.version + 1
    assert not lost & {*after.members, *after.contributors, *after.owners, *dict(after.reducers)}
    assert len(after.owners) == chunks
    for chunk in range(chunks):
        changed = after.owners[chunk] != before.owners[chunk] or after.contributions != before.contributions
        assert after.since[chunk] == (after.version if changed else before.since[chunk])
        assert after.wants(chunk, after.version, after.owners[chunk])
        assert after.wants(chunk, before.version, before.owners[chunk]) == (not changed)


def test_a_refused_peer_gives_nothing_and_stays_a_member_that_reduces() -> None:
    after = plan(dict.fromkeys(PEERS, 1.0), 6, PEERS).without(frozenset(), frozenset({"p3"}))
    assert "p3" not in after.contributors
    assert "p3" in after.members
    assert "p3" in after.owners


def test_where_nobody_can_be_reached_the_coordinator_reduces() -> None:
    assert set(plan({}, 4, PEERS).owners) == {"p0"}
    assert set(plan({"p1": 1.0}, 4, PEERS).without(frozenset({"p1"})).owners) == {"p0"}


def test_a_plan_names_a_peer_only_with_what_it_offers_now() -> None:
    mine = Contribution(peer="p1", number=1, samples=8)
    earlier = Contribution(peer="p1", number=0, samples=8)
    assert plan({}, 1, PEERS).names("p1", Offer(contribution=mine))
    assert not plan({}, 1, PEERS).names("p1", Offer(contribution=earlier))
    assert not plan({}, 1, PEERS).names("stranger", Offer(contribution=None))
    assert not plan({}, 1, PEERS).names("p1", None)


def test_who_receives_slowly_reduces_nothing_where_others_can() -> None:
    offer = Offer(contribution=None)
    quick, slow = replace(offer, slow_to=("c",)), replace(offer, trails=True)
    assert set(reducers_of({"a": quick, "b": quick, "c": offer, "d": offer})) == {"a", "b", "d"}, "most say so"
    assert set(reducers_of({"a": quick, "b": offer, "c": offer, "d": offer})) == {*"abcd"}, "one says so"
    assert set(reducers_of({"a": quick, "c": offer})) == {"a"}, "of two, the other one says so"
    assert set(reducers_of({"a": offer, "b": offer, "c": slow})) == {"a", "b"}, "it has found so itself"
    assert set(reducers_of({"a": slow, "b": slow})) == {"a", "b"}, "somebody has to"


@pytest.mark.parametrize(
    ("bandwidths", "slow"),
    [
        ({"a": 50.0, "b": 50.0, "c": 1.0}, ["c"]),
        ({"a": 50.0, "b": 50.0, "c": 20.0}, []),
        ({"a": 50.0, "c": 1.0}, ["c"]),
        ({"a": 50.0, "c": 30.0}, []),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, []),
        ({"a": 1.0}, []),
        ({"a": 50.0, "b": 1.0, "c": 1.0, "d": 1.0}, ["b", "c", "d"]),
    ],
    ids=str,
)
def test_a_line_is_slow_if_the_others_would_wait_for_what_it_sends(
    bandwidths: dict[str, float], slow: list[str]
) -> None:
    """In the last case steps are made as gradients come."""
    assert slow_lines(bandwidths, bandwidths.keys()) == slow


def test_who_can_only_give_has_a_slow_line_too() -> None:
    assert slow_lines({"a": 50.0, "b": 50.0, "client": 1.0}, ["a", "b"]) == ["client"]
    assert slow_lines({"one client": 1.0, "another": 50.0}, []) == []


@pytest.mark.parametrize("slow", [0.0, 5e-324, 1e-300])
def test_who_says_that_it_can_send_next_to_nothing_spoils_no_plan(slow: float) -> None:
    assert set(plan({"p0": slow}, 4, PEERS).owners) == {"p0"}, "nobody else can"
    assert set(plan({"p0": slow, "p1": 1.0}, 4, PEERS).owners) == {"p1"}
