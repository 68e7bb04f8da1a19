"""One peer lives and is connected, but of what it says and hears only that gets through which Hypothesis lets through:
the others wait for it no longer than is stated (I5), and go on."""

from __future__ import annotations

import typing
from itertools import product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lightning_hivemind.engine.native.protocol import messages
from lightning_hivemind.engine.native.protocol.actions import Action, CatchUp
from lightning_hivemind.engine.native.protocol.messages import Message
from lightning_hivemind.engine.native.protocol.settings import Settings
from swarm.table import Data, Table, by_rank
from unit.seeds import examples, takes_long

SETTINGS = Settings(run="run", target_samples=16, chunks=3, matchmaking_s=1.0, stall_s=1.0, round_s=3.0)
HONEST, MUTE = ["a", "b", "c"], "mute"
KINDS: list[type] = [*typing.get_args(messages.Message), Data]
#: whatever is lost: it may hold up rounds that it leads, and those in which it accuses others, until it leads no more
LONGEST_S = 10 * SETTINGS.round_s
#: until a round that it leads, and does not end, is over at its members, and who does not call, join, or tell where the
#: others should be, is passed over twice; with what passes until the next look
ONE_ROUND_S = 1.25 * SETTINGS.round_s + 2 * SETTINGS.resend_s + 2 * SETTINGS.matchmaking_s + 0.2


class WithStates(Table):
    """A state is there as soon as it is asked for."""

    def _do(self, name: str, action: Action) -> None:
        super()._do(name, action)
        if isinstance(action, CatchUp):
            self.peers[name].adopt(action.head, action.commits, self.now)


class Waiting(RuleBasedStateMachine):
    """All train on and on; what gets through between one of them and the others changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = WithStates([*HONEST, MUTE], SETTINGS)
        self.table.hold = self._is_lost
        #: what is lost on its way from it to whom, and to it from whom
        self.unsaid: set[tuple[type, str]] = set()
        self.unheard: set[tuple[type, str]] = set()
        #: of each honest one: how many steps it has made, and when the last one
        self.steps = dict.fromkeys(HONEST, (0, 0.0))

    def _is_lost(self, sender: str, receiver: str, what: Message | Data) -> bool:
        if MUTE not in (sender, receiver) or sender == receiver:
            return False
        return (type(what), receiver) in self.unsaid if sender == MUTE else (type(what), sender) in self.unheard

    @rule(kinds=st.sets(st.sampled_from(KINDS)), others=st.sets(st.sampled_from(HONEST)))
    def it_says_less(self, kinds: set[type], others: set[str]) -> None:
        self.unsaid = set(product(kinds, others))

    @rule(kinds=st.sets(st.sampled_from(KINDS)), others=st.sets(st.sampled_from(HONEST)))
    def it_hears_less(self, kinds: set[type], others: set[str]) -> None:
        self.unheard = set(product(kinds, others))

    @rule()
    def it_says_nothing(self) -> None:
        self.unsaid = set(product(KINDS, HONEST))

    @rule()
    def all_gets_through(self) -> None:
        self.unsaid, self.unheard = set(), set()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]), it_trains=st.booleans(), share=st.sampled_from([1, 4]))
    def time_passes(self, seconds: float, it_trains: bool, share: int) -> None:
        """Each gives a ``share``-th of what a step needs at a time."""
        table, end = self.table, self.table.now + seconds
        while table.now < end:
            for name in [*HONEST, MUTE] if it_trains else HONEST:
                table.train(**{name: table.peers[name].samples + SETTINGS.target_samples // share})
            table.wait(0.1)
            for name, (before, _) in self.steps.items():
                if (steps := len(table.applied[name])) > before:
                    self.steps[name] = steps, table.now

    @invariant()
    def nobody_is_kept_waiting(self, longest_s: float = LONGEST_S) -> None:
        for name, (_, since) in self.steps.items():
            waited = self.table.now - since
            assert waited <= longest_s, f"{name} has made no step for {waited:.1f} s"

    def teardown(self) -> None:
        self.all_gets_through()
        self.time_passes(ONE_ROUND_S, True, 1)
        before = len(self.table.applied[MUTE])
        self.time_passes(ONE_ROUND_S, True, 1)
        assert len(self.table.applied[MUTE]) > before, "it makes no steps any more"


def test_who_has_committed_and_tells_nobody_is_followed_without() -> None:
    """It says that it is ahead whenever the others begin a round, so that they would begin none for ever."""
    run = Waiting()
    run.time_passes(1.0, True, 1)
    run.it_says_less({messages.Committed, messages.News}, set(HONEST))
    stood = dict.fromkeys(HONEST, (run.table.peers["a"].head, run.table.now))
    for _ in range(300):
        run.time_passes(0.1, False, 1)
        for name, (head, since) in stood.items():
            now = run.table.peers[name].head
            stood[name] = (head, since) if now == head else (now, run.table.now)
            assert run.table.now - since <= ONE_ROUND_S + 2 * SETTINGS.resend_s, f"{name} stays at {head}"
    run.teardown()


def test_who_leads_rounds_that_it_gets_nothing_of_leads_the_next_ones_later_and_later() -> None:
    """It would call again and again, and the others would follow, for it is their first candidate."""
    run, waited = Waiting(), list[float]()
    head = run.table.peers["a"].head
    while head is None or by_rank([*HONEST, MUTE], SETTINGS.run, head.epoch)[0] != MUTE:
        run.time_passes(0.1, True, 1)
        head = run.table.peers["a"].head
    run.it_hears_less({messages.Call, messages.Current, Data, messages.Ended}, set(HONEST))
    for _ in range(30):
        run.time_passes(1.0, False, 1)
        waited.append(max(run.table.now - since for _, since in run.steps.values()))
    assert max(waited) <= 5 * SETTINGS.round_s
    run.teardown()


Waiting.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=20, deadline=None)
TestWaiting = takes_long(Waiting.TestCase)
