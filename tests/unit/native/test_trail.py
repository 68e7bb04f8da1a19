"""Which steps another lineage undoes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.engine.native import trail as trail_module
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.trail import MARK_BYTES, Decided, Trail, Undone, remembered, sound_marks

ROOT = Head.root("run", "founder")


def on(head: Head, group: str, samples: int = 10) -> Head:
    """The step that ``group`` makes from there."""
    lineage = hashlib.sha256(head.lineage + group.encode()).digest()[:16]
    return Head(epoch=head.epoch + 1, lineage=lineage, samples=head.samples + samples)


def walk(trail: Trail, group: str, steps: int, mine: int = 0) -> None:
    for _ in range(steps):
        trail.step(on(trail.head, group), mine)


def taken(taker: Trail, giver: Trail) -> Undone | None:
    assert sound_marks(giver.head, giver.marks)
    found = taker.take(giver.head, giver.marks)
    assert (taker.head, taker.marks) == (giver.head, giver.marks)
    return found


@pytest.mark.parametrize("theirs", [1, 3, 9])
def test_the_steps_since_the_swarm_fell_apart_are_undone_whoever_made_more(theirs: int) -> None:
    one, other = Trail(ROOT), Trail(ROOT)
    for trail in (one, other):
        walk(trail, "both", 5, mine=7)
    walk(one, "here", 4, mine=3)
    walk(other, "there", theirs)
    assert taken(one, other) == Undone(first=6, last=9, samples=12)


def test_who_is_behind_loses_nothing() -> None:
    one, other = Trail(ROOT), Trail(ROOT)
    walk(one, "both", 5, mine=7)
    walk(other, "both", 50)
    assert taken(one, other) is None


def test_who_joins_loses_nothing_though_it_began_elsewhere() -> None:
    joiner, swarm = Trail(Head.root("run", "joiner")), Trail(ROOT)
    walk(swarm, "both", 3)
    assert taken(joiner, swarm) is None


def test_who_had_joined_knows_the_way_of_its_donor_and_its_own_part_of_it() -> None:
    joiner, swarm, rest = Trail(Head.root("run", "joiner")), Trail(ROOT), Trail(ROOT)
    walk(swarm, "both", 3, mine=5)
    walk(rest, "both", 2)
    taken(joiner, swarm)
    walk(joiner, "both", 2, mine=8)
    walk(rest, "rest", 9)
    assert taken(joiner, rest) == Undone(first=3, last=5, samples=16)


def test_what_was_common_still_counts_if_it_is_undone_later() -> None:
    one, other, third = Trail(ROOT), Trail(ROOT), Trail(ROOT)
    for trail in (one, other):
        walk(trail, "both", 2, mine=7)
    walk(one, "here", 1, mine=1)
    walk(other, "there", 2)
    taken(one, other)
    walk(third, "third", 9)
    assert taken(one, third) == Undone(first=1, last=4, samples=14)


def decided(parent: Head, steps: int, mine: int) -> list[Decided]:
    """So many steps on from there that the peer took part in and has not made yet."""
    found: list[Decided] = []
    for _ in range(steps):
        contribution = Contribution(peer="me", number=1, samples=mine)
        commit = Commit(round=b"r", parent=parent, contributions=(contribution,), digest=b"d")
        found.append(Decided(commit, mine))
        parent = commit.head
    return found


@pytest.mark.parametrize("made", [0, 2], ids=["all of them", "the later ones"])
@pytest.mark.parametrize("theirs", [1, 3, 9], ids=["fewer", "as many", "more"])
def test_steps_that_were_decided_and_not_made_here_are_undone_too(made: int, theirs: int) -> None:
    """In the midst of a long batch, say."""
    one, other = Trail(ROOT), Trail(ROOT)
    walk(one, "here", made, mine=2)
    walk(other, "there", theirs)
    later = decided(one.head, 3 - made, mine=5)
    assert one.take(other.head, other.marks, later) == Undone(first=1, last=3, samples=2 * made + 5 * (3 - made))
    walk(other, "there", 9)
    assert taken(one, other) is None, "told once"


def test_steps_that_are_still_to_be_made_are_undone_by_none_on_their_way() -> None:
    one, donor = Trail(ROOT), Trail(ROOT)
    steps = decided(ROOT, 3, mine=5)
    donor.step(steps[0].commit.head, 0)
    assert one.take(donor.head, donor.marks, steps) is None
    other = Trail(ROOT)
    walk(other, "there", 9)
    assert taken(one, other) == Undone(first=1, last=3, samples=15)


def test_steps_that_were_made_meanwhile_are_counted_once() -> None:
    one, donor, other = Trail(ROOT), Trail(ROOT), Trail(ROOT)
    steps = decided(ROOT, 2, mine=5)
    assert one.take(donor.head, donor.marks, steps) is None
    for step in steps:
        one.step(step.commit.head, step.mine)
    walk(other, "there", 9)
    assert taken(one, other) == Undone(first=1, last=2, samples=10)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory in which long ago is soon."""
    monkeypatch.setattr(trail_module, "REMEMBERED", 4)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mine", [4, 5, 9])
@pytest.mark.parametrize("theirs", [10, 40, 1000])
def test_of_what_is_long_ago_something_is_known(mine: int, theirs: int) -> None:
    """Who was cut off alone makes few steps while the others make many."""
    one, other = Trail(ROOT), Trail(ROOT)
    walk(one, "here", mine, mine=2)
    walk(other, "there", theirs)
    kept = [epoch for epoch in remembered(other.head.epoch) if epoch <= mine]
    if max(kept) == 0:
        assert taken(one, other) is None, "nothing tells that it was on another way"
    else:
        found = taken(one, other)
        assert found is not None
        assert (found.last, found.samples) == (mine, 2 * mine)


@pytest.mark.usefixtures("short")
def test_who_slept_for_long_loses_nothing() -> None:
    one, other = Trail(ROOT), Trail(ROOT)
    for trail in (one, other):
        walk(trail, "both", 50, mine=1)
    walk(other, "both", 1000)
    assert taken(one, other) is None


@pytest.mark.usefixtures("short")
def test_samples_are_counted_though_not_every_step_is_remembered() -> None:
    one, other = Trail(ROOT), Trail(ROOT)
    walk(one, "here", 100, mine=2)
    walk(other, "there", 90)
    found = taken(one, other)
    assert found is not None
    assert (found.last, found.samples) == (100, 200)


@pytest.mark.usefixtures("short")
@given(st.integers(0, 5000))
def test_what_is_remembered_was_so_a_step_before(last: int) -> None:
    before, now = list(remembered(last)), list(remembered(last + 1))
    assert now == sorted(now, reverse=True)
    assert {*now} <= {last + 1, *before}
    assert now[:4] == [epoch for epoch in range(last + 1, last - 3, -1) if epoch >= 0]
    assert len(now) <= 4 + 2 * (last + 1).bit_length()
    assert now[-1] == 0


def test_a_step_back_on_one_s_own_way_undoes_none_in_favour_of_others() -> None:
    """A donor that has not heard of the last step yet: it will be made again."""
    one, other = Trail(ROOT), Trail(ROOT)
    for trail in (one, other):
        walk(trail, "both", 5, mine=7)
    walk(one, "both", 1, mine=7)
    assert taken(one, other) is None


def test_from_a_checkpoint_a_trail_begins() -> None:
    head = Head(epoch=50, lineage=b"c" * 16, samples=500)
    one, other = Trail(head), Trail(head)
    walk(one, "here", 2, mine=1)
    walk(other, "there", 3)
    assert taken(one, other) == Undone(first=51, last=52, samples=2)


@pytest.mark.parametrize(
    "marks",
    [None, "text", b"", b"x" * MARK_BYTES, ROOT.lineage[:7], 2 * ROOT.lineage[:MARK_BYTES]],
    ids=["none", "text", "empty", "elsewhere", "short", "longer than there are epochs"],
)
def test_what_is_no_way_to_the_head_is_refused(marks: object) -> None:
    assert not sound_marks(ROOT, marks)
