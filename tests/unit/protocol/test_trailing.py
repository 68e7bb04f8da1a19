"""A peer that is late with the results of a round: the others go on, and it gets them afterwards."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import pytest

from lightning_hivemind.engine.native.protocol.actions import Action, Apply, Arrived
from lightning_hivemind.engine.native.protocol.coordinator import Coordinator
from lightning_hivemind.engine.native.protocol.lineage import Contribution, Head
from lightning_hivemind.engine.native.protocol.messages import Begin, Call, Decline, Done, Ended, Message, Missing
from lightning_hivemind.engine.native.protocol.plan import Offer, make_plan
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.protocol.trailing import MOST, REMEMBERED
from swarm import table as table_module
from swarm.table import Data, Table, by_rank

SETTINGS = Settings(run="run", target_samples=16, chunks=3)
FIRST, SECOND, THIRD = by_rank(["a", "b", "c"], "run")
Spoken = TypeVar("Spoken")
SAMPLES = {"a": 8, "b": 8, "c": 8}


def slow_to_receive(name: str, *, asks: bool = False) -> Table:
    """Results for ``name`` stay on the table until they are released; as long as some come it does not ask for more."""
    table = Table(["a", "b", "c"], SETTINGS)

    def hold(sender: str, to: str, what: Message | Data) -> bool:
        result = to == name != sender and isinstance(what, Data) and bool(what.digest)
        return result or (not asks and sender == name and isinstance(what, Missing))

    table.hold = hold
    return table


def seen(table: Table, name: str, kind: type) -> list[object]:
    return [action for who, action in table.done if who == name and isinstance(action, kind)]


def spoken(table: Table, kind: type[Spoken]) -> list[tuple[str, Spoken]]:
    """Who says a message of this kind from now on, and what."""
    found: list[tuple[str, Spoken]] = []
    hold = table.hold

    def watch(sender: str, to: str, what: Message | Data) -> bool:
        if isinstance(what, kind):
            found.append((sender, what))
        return hold(sender, to, what)

    table.hold = watch
    return found


def test_who_is_late_is_in_the_step_and_has_its_average_a_little_later() -> None:
    table = slow_to_receive(THIRD)
    table.train(**SAMPLES)
    table.flow()
    assert not table.applied[FIRST], "at first the others wait for it"
    table.wait(SETTINGS.patience_s + 0.1)
    (step,) = table.applied[FIRST]
    assert table.applied[SECOND] == table.applied[THIRD] == [step]
    assert {one.peer for one in step.contributions} == {*"abc"}
    (late,) = seen(table, THIRD, Apply)
    assert isinstance(late, Apply)
    assert (late.complete, late.coming) == (False, True)
    assert not seen(table, THIRD, Arrived)
    table.release()
    assert seen(table, THIRD, Arrived) == [Arrived(round=step.round, complete=True)]
    assert not seen(table, FIRST, Arrived)


def test_who_was_late_once_is_not_waited_for_in_the_rounds_that_follow_and_then_again() -> None:
    table = slow_to_receive(THIRD)
    table.train(**SAMPLES)
    table.wait(SETTINGS.patience_s + 0.1)
    table.hold = lambda *_: False
    found = spoken(table, Begin)
    for number in range(REMEMBERED + 1):
        table.train(**SAMPLES)
        table.flow()
        assert len(table.applied[FIRST]) == number + 2, "at once"
    plans = {said.plan.round: said.plan for _, said in found}
    rounds = sorted(plans.values(), key=lambda plan: plan.parent.epoch)
    assert [plan.trailing for plan in rounds] == [(THIRD,)] * REMEMBERED + [()]
    assert THIRD not in {plan.coordinator for plan in rounds[:REMEMBERED]}, "it would hold up all"


def test_who_is_further_behind_comes_to_no_other_round_until_it_has_caught_up() -> None:
    table = slow_to_receive(THIRD)
    for number in range(MOST):
        table.train(**SAMPLES)
        table.wait(SETTINGS.patience_s + 0.1)
        assert len(table.applied[FIRST]) == number + 1
    declined = spoken(table, Decline)
    table.train(**SAMPLES)
    table.flow()
    assert len(table.applied[FIRST]) == MOST + 1, "nobody waits for it"
    assert {sender for sender, _ in declined} == {THIRD}
    assert THIRD not in {one.peer for one in table.applied[FIRST][-1].contributions}


@pytest.mark.parametrize("ends", ["the owner is lost", "nothing comes", "they are not kept", "a state is taken"])
def test_results_that_will_not_come_are_given_up(ends: str) -> None:
    table = slow_to_receive(THIRD, asks=ends == "they are not kept")
    table.train(**SAMPLES)
    table.wait(SETTINGS.patience_s + 0.1)
    (step,) = table.applied[THIRD]
    if ends == "the owner is lost":
        for name in (FIRST, SECOND):
            table.kill(name)
    elif ends == "a state is taken":
        table.peers[THIRD].adopt(step.head, (step,), table.now)
    elif ends == "they are not kept":
        table.wait(SETTINGS.resend_s + 0.1)  # it asks
    else:
        table.hold = lambda sender, *_: sender == THIRD
        table.wait(SETTINGS.stall_s - 0.2)
        assert not seen(table, THIRD, Arrived)
        table.wait(0.3)
    table.flow()
    assert seen(table, THIRD, Arrived) == [Arrived(round=step.round, complete=False)]


def test_that_results_are_not_kept_may_overtake_them() -> None:
    """Where a peer has several connections. Who asks again is told again."""
    table = slow_to_receive(THIRD)
    table.train(**SAMPLES)
    table.wait(SETTINGS.patience_s + 0.1)
    (step,) = table.applied[THIRD]
    over, late = Ended(round=step.round, reason="its results are not kept", aborted=False), table.peers[THIRD]
    late.heard(step.round, FIRST, table.now)
    late.receive(FIRST, over, table.now)
    table.wait(SETTINGS.resend_s - 0.1)
    late.receive(FIRST, over, table.now)
    table.flow()
    assert not seen(table, THIRD, Arrived)
    table.wait(0.2)
    late.receive(FIRST, over, table.now)
    table.flow()
    assert seen(table, THIRD, Arrived) == [Arrived(round=step.round, complete=False)]


def test_as_long_as_something_comes_a_late_peer_waits_for_the_rest() -> None:
    table = slow_to_receive(THIRD, asks=True)
    table.train(**SAMPLES)
    table.wait(SETTINGS.patience_s + 0.1)
    (step,) = table.applied[THIRD]
    while table.now < 3 * SETTINGS.stall_s:
        table.wait(SETTINGS.resend_s / 2)
        for name in (FIRST, SECOND):
            table.peers[THIRD].heard(step.round, name, table.now)
    assert not seen(table, THIRD, Arrived)
    table.wait(2 * SETTINGS.resend_s)
    assert seen(table, THIRD, Arrived) == [Arrived(round=step.round, complete=False)]


def test_who_sends_a_byte_now_and_then_holds_a_late_peer_up_for_a_rounds_time_and_no_longer() -> None:
    table = slow_to_receive(THIRD, asks=True)
    table.train(**SAMPLES)
    table.wait(SETTINGS.patience_s + 0.1)
    (step,) = table.applied[THIRD]
    decided = table.now
    while not seen(table, THIRD, Arrived):
        assert table.now < decided + SETTINGS.round_s + 1.0
        table.wait(SETTINGS.resend_s / 2)
        for name in (FIRST, SECOND):
            table.peers[THIRD].heard(step.round, name, table.now)
    assert seen(table, THIRD, Arrived) == [Arrived(round=step.round, complete=False)]
    assert table.now > decided + SETTINGS.round_s - 1.0


def test_the_others_wait_as_long_again_as_the_quick_ones_took() -> None:
    """For a peer that is nearly as quick as they are; what is slow for all is slow for nobody."""
    table = slow_to_receive(THIRD)
    slow = 4.0
    hold = table.hold
    table.hold = lambda sender, to, what: hold(sender, to, what) or (isinstance(what, Data) and table.now < slow)
    table.train(**SAMPLES)
    table.wait(slow)
    late = [letter for letter in table.held if letter[1] == THIRD and letter[2].digest]  # type: ignore[union-attr]
    letters = [letter for letter in table.held if letter not in late]
    table.held = late
    for letter in letters:
        table.read(*letter)
    table.flow()
    table.wait(0.8 * slow)
    assert not table.applied[FIRST]
    table.wait(0.4 * slow)
    assert table.applied[FIRST]


def test_nobody_leads_a_round_for_which_it_would_have_to_be_waited_for() -> None:
    """A peer with two rounds to come calls none itself either."""
    table = slow_to_receive(THIRD)
    called = spoken(table, Call)
    for _ in range(6):
        table.train(**SAMPLES)
        table.wait(SETTINGS.patience_s + 0.1)
    assert len(table.applied[FIRST]) == 6
    assert THIRD not in {sender for sender, _ in called[2:]}


@pytest.mark.parametrize("word", ["stop", "last"])
def test_before_a_run_ends_all_wait_for_who_is_late(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it ends for are gone afterwards, and send no results."""
    monkeypatch.setattr(table_module, "Offer", partial(Offer, **{word: True}))
    table = slow_to_receive(THIRD)
    table.train(**SAMPLES)
    table.wait(4.0)
    assert not table.applied[FIRST]
    table.release()
    assert table.applied[FIRST] == table.applied[THIRD] != []
    assert table.applied[FIRST][0].stop is (word == "stop")


@pytest.mark.parametrize(("late_s", "trails"), [(0.1, False), (0.5, True)])
def test_who_holds_up_the_others_a_little_in_every_round_is_not_waited_for_either(late_s: float, trails: bool) -> None:
    """Not so long that a round would go on without it, so it is told."""
    table = slow_to_receive(THIRD)
    table.train(**SAMPLES)
    table.wait(late_s)
    table.release()
    assert len(table.applied[FIRST]) == 1
    assert not seen(table, THIRD, Arrived)
    found = spoken(table, Begin)
    table.train(**SAMPLES)
    table.flow()
    assert {said.plan.trailing for _, said in found} == {(THIRD,) if trails else ()}


def test_a_member_that_is_late_everywhere_is_not_more_than_half_of_a_round() -> None:
    """Where most lines are slow, they are what a round takes."""
    table = Table(["a", "b", "c"], SETTINGS)
    table.hold = lambda sender, to, what: to != FIRST and to != sender and isinstance(what, Data) and bool(what.digest)
    table.train(**SAMPLES)
    table.wait(4.0)
    assert not table.applied[FIRST]


def test_where_only_those_are_left_that_nobody_waits_for_they_go_on() -> None:
    """The one that was waited for is lost: there is nobody yet who has all results."""
    sent: list[Action] = []
    contributions = [Contribution(peer=name, number=1, samples=16) for name in "ab"]
    plan = make_plan(
        b"r" * 16,
        Head.root("run", "a"),
        "a",
        members="ab",
        contributions=contributions,
        bandwidths={"a": 1.0, "b": 1.0},
        chunks=3,
        trailing="a",
        stop=False,
    )
    coordinator = Coordinator(SETTINGS, "a", plan, sent.append, 0.0)
    coordinator.lost("b", "connection lost")
    assert not coordinator.ended
    assert coordinator.plan.members == ("a",)
    coordinator.done("a", Done(round=plan.round, version=1, digest=b"d"), 1.0)
    assert coordinator.commit is not None
    assert coordinator.commit.contributions == (contributions[0],)
