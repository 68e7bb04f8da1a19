"""A peer that gives nothing to rounds, as its line is slow, is in them all the same: nobody waits for its answers."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_hivemind.engine.native.protocol.actions import Apply
from lightning_hivemind.engine.native.protocol.lineage import Contribution, Head
from lightning_hivemind.engine.native.protocol.messages import Begin, Call, Decline, Ended, Message, Progress
from lightning_hivemind.engine.native.protocol.plan import Offer, Plan
from lightning_hivemind.engine.native.protocol.roster import SENDS_SLOWLY, Place
from lightning_hivemind.engine.native.protocol.settings import Settings
from swarm import table as table_module
from swarm.table import Data, Table, by_rank

SETTINGS = Settings(run="run", target_samples=16, chunks=3)
FIRST, SECOND, THIRD = by_rank(["a", "b", "c"], "run")


class Slow(Table):
    """What ``slow`` ones say stays on the table; the others know that they are so. Keeps all that is said."""

    def __init__(self, *slow: str, settings: Settings = SETTINGS) -> None:
        super().__init__(["a", "b", "c"], settings)
        self.said: list[Message | Data] = []
        self._slow: set[str] = set()
        self.hold = self._is_slow
        self.slow(*slow)

    def slow(self, *names: str) -> None:
        """From now on."""
        for name in names:
            self.peers[name].sends_slowly(True)
            for other, peer in self.peers.items():
                if other != name:
                    peer.saw(name, Place(head=self.head, samples=0, stamp=1.0, cuts=SENDS_SLOWLY), self.now)
        self.flow()
        self._slow.update(names)

    def _is_slow(self, sender: str, to: str, what: Message | Data) -> bool:
        self.said.append(what)
        return sender in self._slow and to != sender

    @property
    def head(self) -> Head:
        found = self.peers[FIRST].head
        assert found is not None
        return found

    @property
    def plan(self) -> Plan:
        (plan,) = {one.plan for one in self.said if isinstance(one, Begin)}
        return plan

    @property
    def calls(self) -> int:
        return len({one.round for one in self.said if isinstance(one, Call)})


def test_who_gives_nothing_is_in_the_round_before_it_has_answered() -> None:
    table = Slow(THIRD)
    table.train(**{FIRST: 8, SECOND: 8})
    table.flow()
    (step,) = table.applied[FIRST]
    assert table.applied == {FIRST: [step], SECOND: [step], THIRD: [step]}, "in one instant"
    assert table.plan.members == ("a", "b", "c")
    assert table.plan.trailing == table.plan.slow == (THIRD,)
    assert set(table.plan.owners) == {FIRST, SECOND}
    (applied,) = [action for name, action in table.done if name == THIRD and isinstance(action, Apply)]
    assert applied.complete, "it has the results of the round, and takes no state"


def test_its_answer_that_comes_late_changes_nothing() -> None:
    table = Slow(THIRD)
    table.train(**{FIRST: 8, SECOND: 8})
    table.flow()
    table.release()
    for number in range(2, 5):
        table.train(**{FIRST: 8, SECOND: 8})
        table.flow()
        assert [len(steps) for steps in table.applied.values()] == [number] * 3
    assert table.applied[FIRST] == table.applied[THIRD]


@pytest.mark.parametrize("word", ["stop", "last"])
def test_before_a_run_ends_its_answer_is_waited_for(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get no results afterwards."""
    monkeypatch.setattr(table_module, "Offer", partial(Offer, **{word: True}))
    table = Slow(THIRD)
    table.train(**{FIRST: 8, SECOND: 8})
    table.wait(SETTINGS.matchmaking_s - 0.5)
    assert not table.applied[FIRST]
    table.release()
    assert table.applied[FIRST] == table.applied[THIRD] != []


def test_its_wish_to_stop_is_known_from_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """That comes after the plan each time."""

    def offer(*, contribution: Contribution | None) -> Offer:
        return Offer(contribution=contribution, stop=contribution is None)

    monkeypatch.setattr(table_module, "Offer", offer)
    table = Slow(THIRD)
    for _ in range(4):  # others lead in turn
        table.train(**{FIRST: 8, SECOND: 8})
        table.flow()
        for letter in table.held:
            table.read(*letter)
        table.held.clear()
        table.flow()
    stops = [step.stop for step in table.applied[FIRST]]
    assert not stops[0]
    assert any(stops[1:])
    assert table.applied[FIRST] == table.applied[THIRD]


def test_what_it_offered_while_its_line_was_quick_says_nothing_about_its_line() -> None:
    """Else every leader that has such an answer would say that its line is quick again."""
    table = Slow()
    for _ in range(4):
        table.train(a=8, b=8, c=8)
        table.flow()
    said = len(table.said)
    table.slow(THIRD)
    for _ in range(4):
        table.train(**{FIRST: 8, SECOND: 8})
        table.flow()
    plans = {one.plan for one in table.said[said:] if isinstance(one, Begin)}
    assert len(plans) == 4
    assert {plan.slow for plan in plans} == {(THIRD,)}


def test_who_cannot_reach_it_reduces_nothing() -> None:
    """It would never have those results."""
    table = Slow(THIRD)
    table.peers[SECOND].lost(THIRD, table.now)
    table.train(**{FIRST: 8, SECOND: 8})
    table.flow()
    assert set(table.plan.owners) == {FIRST}


def test_who_has_declined_is_not_expected_before_it_has_joined_again() -> None:
    table = Slow(THIRD)
    table.read(THIRD, FIRST, Decline(round=b"r" * 16))
    table.train(**{FIRST: 8, SECOND: 8})
    table.flow()
    assert THIRD not in table.plan.members


def test_it_is_waited_for_where_too_few_would_be_there_without_it() -> None:
    table = Slow(THIRD, settings=Settings(run="run", target_samples=16, chunks=3, min_group_size=3))
    table.train(**{FIRST: 8, SECOND: 8})
    table.wait(SETTINGS.matchmaking_s - 0.5)
    assert not table.applied[FIRST]
    table.release()
    assert table.applied[FIRST] == table.applied[THIRD] != []


def test_such_peers_are_not_more_than_half_of_a_round() -> None:
    table = Slow(SECOND, THIRD)
    table.train(**{FIRST: 16})
    table.flow()
    (behind,) = {"a", "b", "c"} - {*table.plan.members}
    assert behind != FIRST
    assert len(table.applied[FIRST]) == 1
    assert [one.reason for one in table.said if isinstance(one, Ended)] == ["came too late"]


def test_who_stands_elsewhere_is_not_expected() -> None:
    table = Slow(THIRD)
    elsewhere = Head.root("run", "another start")
    for name in (FIRST, SECOND):
        table.peers[name].saw(THIRD, Place(head=elsewhere, samples=0, stamp=2.0, cuts=SENDS_SLOWLY), table.now)
    table.train(**{FIRST: 8, SECOND: 8})
    table.flow()
    assert table.plan.members == tuple(sorted([FIRST, SECOND]))


def test_a_call_to_which_too_few_came_is_not_repeated_for_the_same_words() -> None:
    """They were of samples that had gone elsewhere since: those who heard so go on saying it."""
    table = Slow(THIRD)
    table.read(THIRD, FIRST, Progress(head=table.head, samples=8, swarm_samples=8, cuts=SENDS_SLOWLY))
    table.train(**{FIRST: 4, SECOND: 4})
    table.flow()
    assert table.calls == 1
    for _ in range(10):
        table.wait(SETTINGS.resend_s)
        table.read(SECOND, FIRST, Progress(head=table.head, samples=4, swarm_samples=16, cuts=0))
        table.flow()
    assert table.calls == 1
    table.train(**{FIRST: 8, SECOND: 8})
    table.wait(SETTINGS.max_backoff_s)
    assert len(table.applied[FIRST]) == 1
    table.read(SECOND, FIRST, Progress(head=table.head, samples=4, swarm_samples=16, cuts=0))
    table.flow()
    assert table.calls == 3, "after the next step others' words count again"


def test_a_call_that_cannot_come_to_a_round_is_over_at_once() -> None:
    """Whose answers would take seconds could not change that."""
    table = Slow(THIRD)
    table.read(SECOND, FIRST, Progress(head=table.head, samples=4, swarm_samples=16, cuts=0))
    table.flow()
    assert [what for _, what in table.notes()] == ["2 peers with 0 samples came: too few for a round"]
