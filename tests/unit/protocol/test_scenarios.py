"""Single messages that are late, lost, or read in the wrong moment. Each was a fault once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hivemind.engine.native.protocol.actions import Called, CatchUp, GiveUp, Send
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.protocol.messages import (
    Accuse,
    Ask,
    Begin,
    Call,
    Committed,
    Decline,
    Done,
    Ended,
    Join,
    News,
    Probe,
    Progress,
)
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.roster import ARRIVES_STEPS, Place
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.protocol.standing import WITHOUT_S
from swarm.table import Data, Table, by_rank

SETTINGS = Settings(run="run", target_samples=16, chunks=3)
FIRST, SECOND, THIRD = by_rank(["a", "b", "c"], "run")


def three(settings: Settings = SETTINGS) -> Table:
    return Table(["a", "b", "c"], settings)


def test_three_peers_commit_in_one_instant() -> None:
    table = three()
    table.train(a=8, b=8, c=8)
    table.flow()
    (commit,) = {table.applied[name][0] for name in "abc"}
    assert commit.samples == 24


def test_who_was_not_in_a_round_hears_of_its_step_before_it_is_called_for_the_next() -> None:
    """Where steps are as quick as messages, it would be one behind for ever."""
    table = three()
    table.hold = lambda sender, _, what: sender == THIRD and isinstance(what, (Join, Progress))
    table.train(**{FIRST: 8, SECOND: 8})
    table.wait(2 * SETTINGS.matchmaking_s)
    (step,) = table.applied[FIRST]
    assert THIRD not in {one.peer for one in step.contributions}
    assert table.applied[THIRD] == [step]
    table.hold = lambda *_: False
    table.train(**{FIRST: 8, SECOND: 8, THIRD: 8})
    table.flow()
    assert table.applied[THIRD][1:] == table.applied[FIRST][1:]
    assert {one.peer for one in table.applied[THIRD][1].contributions} == {FIRST, SECOND, THIRD}


def test_a_peer_that_promised_to_take_no_commit_takes_none_in_its_next_round_either() -> None:
    table = three()
    table.hold = lambda sender, _, what: sender == FIRST and isinstance(what, Committed)
    table.train(a=8, b=8, c=8)
    table.flow()
    late = [letter for letter in table.held if letter[1] == THIRD]
    assert late, "the coordinator has committed"
    table.kill(FIRST)
    table.hold = lambda sender, _, what: sender == THIRD and isinstance(what, Done)
    table.wait(1.0)
    table.hold = lambda *_: False
    for letter in late:
        table.read(*letter)
    table.wait(3.0)
    assert table.applied[SECOND] == table.applied[THIRD]
    assert [commit.contributions[0].peer for commit in table.applied[THIRD]]
    assert FIRST not in {one.peer for commit in table.applied[THIRD] for one in commit.contributions}


def one_ahead() -> tuple[Table, Commit]:
    """The first has made a step, from which it has taken out the two others."""
    table = three()
    table.hold = lambda sender, receiver, what: sender == FIRST != receiver and isinstance(what, Committed)
    table.train(a=8, b=8, c=8)
    table.flow()
    (ahead,) = table.applied[FIRST]
    for name in (SECOND, THIRD):
        table.read(FIRST, name, Ended(round=ahead.round, reason="taken out", aborted=False))
    return table, ahead


def test_a_peer_knows_where_its_lineage_is_and_was_and_no_other_one() -> None:
    table, ahead = one_ahead()
    first, second = table.peers[FIRST], table.peers[SECOND]
    assert first.heads == (ahead.head, ahead.parent)
    assert second.heads == (ahead.parent,)
    assert second.knows(first.heads), "it is a step behind"
    assert first.knows(second.heads)
    other = Head.root("run", "another")
    assert not first.knows((other,))
    first.adopt(other, (), table.now)
    assert first.heads == (other,)
    assert not first.knows((ahead.head, ahead.parent))


def test_peers_that_could_not_catch_up_with_a_dead_one_go_on_together() -> None:
    table, ahead = one_ahead()
    for name in (SECOND, THIRD):
        table.read(FIRST, name, News(head=ahead.head, commits=(ahead,)))
    table.flow()
    assert sum(isinstance(action, CatchUp) for _, action in table.done) == 2
    table.kill(FIRST)
    for name in (SECOND, THIRD):  # nobody has that state any more: each goes on with its own
        peer = table.peers[name]
        assert peer.head is not None
        peer.adopt(peer.head, (), table.now)
    table.hold = lambda *_: False
    table.train(**{SECOND: 20, THIRD: 20})
    table.wait(3.0)
    assert table.applied[SECOND] == table.applied[THIRD] != []


def test_a_head_whose_state_nobody_has_any_more_is_given_up_for_good() -> None:
    """Two follow a third one, which dies before either has its state. They must not call one another back there."""
    table, ahead = one_ahead()
    root = ahead.parent
    for name in (SECOND, THIRD):
        table.train(**{name: 0})  # who follows gives nothing
        table.peers[name].adopt(ahead.head, (ahead,), table.now)
    table.flow()
    table.kill(FIRST)
    table.hold = lambda *_: False
    table.peers[SECOND].give_up(root, table.now)
    table.wait(3.0)
    assert (table.peers[SECOND].head, table.peers[THIRD].head) == (root, ahead.head)
    table.peers[THIRD].give_up(root, table.now)
    table.train(**{SECOND: 20, THIRD: 20})
    table.wait(3.0)
    assert table.applied[SECOND] == table.applied[THIRD] != []


def test_who_was_lost_and_comes_back_is_followed_to_a_head_that_was_given_up_without_it() -> None:
    """It has the state; who lived when it was given up has not, and is not followed."""
    table, ahead = one_ahead()
    second = table.peers[SECOND]
    second.adopt(ahead.head, (ahead,), table.now)
    for _ in range(2):
        second.lost(FIRST, table.now)
    second.give_up(ahead.parent, table.now)
    second.take()
    news = News(head=ahead.head, commits=(ahead,))
    second.receive(THIRD, news, table.now)
    assert not any(isinstance(action, CatchUp) for action in second.take())
    second.receive(FIRST, news, table.now)
    assert CatchUp(head=ahead.head, commits=(ahead,)) in second.take()


def test_who_stood_at_a_head_that_was_given_up_is_followed_there_again_later() -> None:
    """It may have got the state meanwhile, from one that this peer does not reach."""
    table, ahead = one_ahead()
    second, news = table.peers[SECOND], News(head=ahead.head, commits=(ahead,))
    second.adopt(ahead.head, (ahead,), table.now)
    for _ in range(2):
        second.lost(FIRST, table.now)
    now = table.now
    for without_s in (WITHOUT_S, 2 * WITHOUT_S):  # in vain once more: for longer
        second.give_up(ahead.parent, now)
        for after_s, follows in ((without_s - 1.0, False), (without_s + 1.0, True)):
            second.take()
            second.receive(THIRD, news, now + after_s)
            assert (CatchUp(head=ahead.head, commits=(ahead,)) in second.take()) is follows
        now += without_s + 1.0
        second.adopt(ahead.head, (ahead,), now)


def test_a_laptop_that_slept_while_a_joiner_took_its_state_is_found_again() -> None:
    """With ``min_group_size`` neither steps without the other: they stood apart for good."""
    table = Table([FIRST, SECOND], replace(SETTINGS, min_group_size=2))
    root = table.peers[FIRST].head
    assert root is not None
    table.train(**{FIRST: 20, SECOND: 20})
    table.flow()
    (commit,) = table.applied[FIRST]
    joiner = table.peers[SECOND]
    table.hold = lambda *_: True
    for _ in range(2):
        joiner.lost(FIRST, table.now)
    joiner.give_up(root, table.now)  # it had followed, and had nothing of it yet
    table.flow()
    table.held.clear()
    table.hold = lambda *_: False
    table.train(**{FIRST: 20, SECOND: 20})
    joiner.saw(FIRST, Place(head=commit.head, samples=20, stamp=table.now + 1.0), table.now)
    table.wait(5.0)
    assert any(isinstance(action, CatchUp) and action.head == commit.head for name, action in table.done)


def test_who_takes_a_state_tells_everybody_so() -> None:
    """A helper stands nowhere before it hears of a head; its record says for seconds that it still does.

    Meanwhile a client, to which nobody can connect, would lead the round, without those that are clients, too.
    """
    helper, client = Peer(SETTINGS, "helper", b"life"), Peer(SETTINGS, "client", b"life", reduces=False)
    root = Head.root("run", "client")
    helper.adopt(Head.nowhere(), (), 0.0)
    client.adopt(root, (), 0.0)
    client.saw("helper", Place(head=Head.nowhere(), samples=0, stamp=1.0), 0.0)
    helper.saw("client", Place(head=root, samples=0, stamp=1.0, reduces=False), 0.0)
    helper.take()
    helper.adopt(root, (), 0.0)
    for action in helper.take():
        if isinstance(action, Send) and action.to == "client":
            client.receive("helper", action.message, 0.0)
    client.take()
    client.contributed(SETTINGS.target_samples, 0.0)
    assert [type(action.message) for action in client.take() if isinstance(action, Send)] == [Progress]


def test_who_missed_a_step_does_not_make_the_next_without_those_that_it_cannot_reach() -> None:
    """It takes its state, and whoever told it so stands there, too, though a record says otherwise for seconds.

    Else it would lead the next round itself, with the one in the middle only; then the other would miss that one, and
    both would make every second step alone, for good.
    """
    table = Table(["left", "middle", "right"], SETTINGS)
    ends = {"left", "right"}
    for one, other in (("left", "right"), ("right", "left")):
        for stamp in (1.0, 2.0):  # lost, and alive all the same: twice, so there is no way to it
            table.peers[one].lost(other, 0.0)
            table.peers[one].saw(other, Place(head=table.peers[one].head, samples=0, stamp=stamp, cuts=1), 0.0)
        assert table.peers[one].cut == (other,)
    table.hold = lambda sender, receiver, what: {sender, receiver} == ends or "right" in (sender, receiver)
    table.train(left=16)
    table.wait(SETTINGS.matchmaking_s + 1.0)
    (missed,) = table.applied["left"]
    table.hold = lambda sender, receiver, what: {sender, receiver} == ends
    table.wait(1.0)
    assert [name for name, action in table.done if isinstance(action, CatchUp)] == ["right"]
    table.peers["right"].adopt(missed.head, (), table.now)
    table.flow()
    table.train(left=0, right=16)
    table.wait(1.0)
    assert [commits[-1].head.epoch for commits in table.applied.values()] == [2, 2, 2]
    assert table.applied["left"][-1] == table.applied["right"][-1]


def test_who_follows_says_that_it_has_no_samples_there() -> None:
    table = three()
    table.train(a=8)
    table.flow()
    ahead = Head(epoch=1, lineage=b"x" * 16, samples=24)
    table.peers["a"].adopt(ahead, (), table.now)
    sent = [action.message for action in table.peers["a"].take() if isinstance(action, Send)]
    assert [message.samples for message in sent if isinstance(message, Progress)] == [0, 0]


def test_who_has_failed_to_follow_hears_of_it_again() -> None:
    """It stands at no round while it follows: for good, if what it was to do for that was lost with the failure."""
    peer, ahead = Peer(SETTINGS, "a", b"1"), Head(epoch=1, lineage=b"x" * 16, samples=24)
    peer.adopt(Head.root("run", "a"), (), 0.0)
    for now in (1.0, 2.0):
        peer.receive("b", News(head=ahead, commits=()), now)
        assert any(isinstance(action, CatchUp) for action in peer.take())
        peer.receive("b", News(head=ahead, commits=()), now)
        assert not any(isinstance(action, CatchUp) for action in peer.take()), "it is on its way"
        peer.leave("the driver failed", now)


@pytest.mark.parametrize("helpers", [1, 2, 3])
def test_nobody_waits_for_helpers_at_a_head_that_was_given_up(helpers: int) -> None:
    """They may all stand there for some time yet, and each that leaves must not be called back by the others."""
    names = [f"helper {number}" for number in range(helpers)]
    table = Table(["trainer", *names], SETTINGS)
    gone = Head(epoch=9, lineage=b"x" * 16, samples=999)
    trainer, root = table.peers["trainer"], table.peers["trainer"].head
    assert root is not None
    for name in table.peers:
        table.peers[name].adopt(gone, (), table.now)
    table.flow()
    trainer.give_up(root, table.now)
    table.flow()
    table.train(trainer=16)
    table.wait(2.0)
    assert len(table.applied["trainer"]) == 1
    for name in names:
        table.peers[name].give_up(Head.nowhere(), table.now)
        table.flow()
        back = [action.head for who, action in table.done if who == name and isinstance(action, CatchUp)]
        assert gone not in back


@pytest.mark.parametrize("reader", ["light", "heavy"])
def test_of_two_lineages_the_one_with_more_samples_wins_however_many_steps_the_other_has(reader: str) -> None:
    table = Table(["light", "heavy"], SETTINGS)
    table.hold = lambda sender, receiver, _: sender != receiver
    table.peers["light"].lost("heavy", 0.0)
    table.peers["heavy"].lost("light", 0.0)
    for _ in range(3):
        table.train(light=16)
        table.wait(0.2)
    table.train(heavy=1000)
    table.wait(0.2)
    assert (len(table.applied["light"]), len(table.applied["heavy"])) == (3, 1)
    table.held, table.hold = [], lambda *_: False
    other = "heavy" if reader == "light" else "light"
    head = table.peers[other].head
    assert head is not None
    table.peers[reader].saw(other, Place(head=head, samples=0, stamp=9.0), table.now)
    table.wait(1.0)
    assert {name for name, action in table.done if isinstance(action, CatchUp)} == {"light"}


def test_a_peer_does_not_count_its_own_samples_twice() -> None:
    """Its turn comes because the candidate lets a round pass: what it would tell the candidate it knows itself."""
    table = three(Settings(run="run", target_samples=100, chunks=3))
    table.gone.add(FIRST)  # frozen, and not yet noticed; its record says 60
    head = table.peers[SECOND].head
    assert head is not None
    table.peers[SECOND].saw(FIRST, Place(head=head, samples=60, stamp=1.0), table.now)
    table.train(**{SECOND: 45})
    table.wait(8.0)
    table.kill(FIRST)
    table.flow()
    assert table.peers[SECOND].swarm_samples == 45


def two_around_one() -> tuple[Table, str, str, str]:
    """Three that have made some steps; who leads now, and who would next, have lost one another; and the third."""
    table = three()
    for _ in range(ARRIVES_STEPS):
        table.train(a=8, b=8, c=8)
        table.flow()
    better, worse, between = by_rank(["a", "b", "c"], "run", ARRIVES_STEPS)
    table.peers[better].lost(worse, table.now)
    table.peers[worse].lost(better, table.now)
    return table, better, worse, between


@pytest.mark.parametrize("heard", [Decline, Begin], ids=["as it leaves", "when it hears of the plan"])
def test_a_round_that_a_member_has_left_for_another_one_does_not_go_on_beside_that(heard: type) -> None:
    """Two that cannot reach one another call the one between them: else each would make the step by itself."""
    table, better, worse, between = two_around_one()
    left: set[str] = set()

    def late(sender: str, receiver: str, what: object) -> bool:
        if isinstance(what, Decline) and heard is Begin and not left:
            left.add(sender)  # that it leaves is lost
            return True
        begins = isinstance(what, Begin) and (sender, receiver) == (worse, between)
        return {sender, receiver} == {better, worse} or begins

    table.hold = late
    table.train(**{worse: 16})
    table.flow()
    assert [what for *_, what in table.held if isinstance(what, Begin)], "it has begun"
    table.train(**{better: 16})
    table.flow()
    for letter in [one for one in table.held if isinstance(one[2], Begin)]:
        table.read(*letter)
    table.flow()
    steps = {name: commits[ARRIVES_STEPS:] for name, commits in table.applied.items()}
    assert steps[better] == steps[between]
    assert [one.peer for one in steps[better][0].contributions] == [better]
    assert steps[worse] == [], "the lineage has forked"


def test_who_has_held_up_a_round_does_not_call_the_next_one() -> None:
    """Its plan does not get through to two of the others, and would not in the next attempt either."""
    settings = Settings(run="run", target_samples=16, chunks=3, matchmaking_s=1.0, stall_s=1.0, round_s=3.0)
    names = by_rank(["a", "b", "c", "d"], "run")
    table = Table(names, settings)
    table.hold = lambda *letter: letter[0] == names[0] and letter[1] in names[1:3] and isinstance(letter[2], Begin)
    table.train(**dict.fromkeys(names, 8))
    table.wait(settings.round_s + settings.matchmaking_s)
    assert [len(table.applied[name]) for name in names[1:]] == [1, 1, 1]


def test_who_comes_from_elsewhere_does_not_lead_before_it_knows_whom_it_cannot_reach() -> None:
    """After a partition it reaches some of the others first: those that it does not would be left out of its rounds."""
    table = three()
    for _ in range(ARRIVES_STEPS + 1):
        table.train(a=8, b=8, c=8)
        table.flow()
    head = table.peers["a"].head
    assert head is not None
    away = Head(epoch=head.epoch, lineage=b"l" * 32, samples=head.samples - 1)
    better, worse, between = by_rank(["a", "b", "c"], "run", head.epoch)
    table.hold = lambda sender, receiver, _: {sender, receiver} == {better, worse}
    table.peers[better].adopt(away, (), table.now)
    table.peers[better].lost(worse, table.now)
    table.peers[worse].lost(better, table.now)
    table.peers[better].adopt(head, (), table.now)
    table.flow()
    table.train(a=8, b=8, c=8)
    table.flow()
    steps = {name: commits[ARRIVES_STEPS + 1 :] for name, commits in table.applied.items()}
    assert steps[worse] == steps[between]
    assert {one.peer for one in steps[worse][0].contributions} >= {worse, between}


def test_who_is_taken_out_of_a_round_that_is_committed_ends_the_one_that_it_went_to() -> None:
    """Its step is made: one beside it would fork the lineage."""
    table, better, worse, between = two_around_one()
    table.hold = lambda sender, receiver, what: (
        {sender, receiver} == {better, worse}
        or (isinstance(what, Begin) and receiver == between)
        or (isinstance(what, Decline) and sender == between)
    )
    table.train(**{worse: 16})
    table.flow()
    (begun,) = [what for *_, what in table.held if isinstance(what, Begin)]
    head = table.peers[between].head
    assert head is not None
    other = Commit(
        round=b"o" * 16,
        parent=head,
        contributions=(Contribution(peer=better, number=1, samples=40),),
        digest=b"d" * 16,
    )
    table.hold = lambda sender, receiver, _: {sender, receiver} == {better, worse}
    table.read(better, between, Committed(commit=other))
    table.flow()
    assert table.applied[between][-1] == other
    assert all(one.round != begun.plan.round for one in table.applied[worse]), "the lineage has forked"


def test_a_call_of_an_earlier_attempt_does_not_throw_a_member_out_of_its_round() -> None:
    table = three(Settings(run="run", target_samples=24, chunks=3, min_group_size=3))
    stale: list[Call] = []

    def first_call(sender: str, receiver: str, what: object) -> bool:
        if isinstance(what, Call) and receiver == THIRD and not stale:
            stale.append(what)
            return True
        return False

    table.hold = first_call
    table.train(a=8, b=8, c=8)
    table.flow()
    assert stale
    table.peers[FIRST].lost(SECOND, table.now)  # too few: the attempt is given up
    table.peers[FIRST].lost(THIRD, table.now)
    table.hold = lambda sender, _, what: sender == THIRD and isinstance(what, Done)
    table.wait(2.0)
    table.read(FIRST, THIRD, stale[0])
    table.flow()
    table.release()
    table.wait(1.0)
    assert [len(table.applied[name]) for name in "abc"] == [1, 1, 1]
    assert ("c", "it has left the round") not in table.notes()


@pytest.mark.parametrize("lost", [0, 1])
def test_an_accusation_that_is_lost_is_said_again(lost: int) -> None:
    table = three()
    said: list[Accuse] = []

    def silent(sender: str, receiver: str, what: object) -> bool:
        if isinstance(what, Accuse):
            said.append(what)
            return len(said) <= lost
        return isinstance(what, Data) and not what.digest and sender == THIRD != receiver

    table.hold = silent
    table.train(a=16, b=8, c=8)
    table.wait(SETTINGS.stall_s + 3.0)
    assert [len(table.applied[name]) for name in (FIRST, SECOND)] == [1, 1]
    (commit,) = table.applied[FIRST]
    assert THIRD not in {one.peer for one in commit.contributions}


def test_the_peer_that_no_data_reach_goes_and_not_those_that_it_accuses() -> None:
    names = ["a", "b", "c", "d", "e"]
    deaf = by_rank(names, "run")[-1]
    table = Table(names, Settings(run="run", target_samples=40, chunks=5))
    table.hold = lambda sender, receiver, what: isinstance(what, Data) and sender != receiver == deaf
    table.train(**dict.fromkeys(names, 8))
    table.wait(2 * SETTINGS.stall_s + 5.0)
    committed = {name for name in names if table.applied[name]}
    assert committed >= set(names) - {deaf}
    (first, *_) = table.applied[next(iter(committed - {deaf}))]
    assert {one.peer for one in first.contributions} == set(names) - {deaf}


def test_a_peer_that_is_never_done_costs_one_round_its_time_and_not_the_run() -> None:
    table = three()
    table.hold = lambda sender, _, what: sender == THIRD and isinstance(what, Done)
    table.train(a=16, b=16, c=16)
    table.wait(SETTINGS.round_s + 2.0)
    (commit,) = {table.applied[name][0] for name in "abc"}
    assert commit.samples == 48, "it has given everything, so it is in"


def test_who_dies_when_all_others_have_the_whole_average_stays_in() -> None:
    """Nothing has to be reduced again: its death takes no sample with it."""
    table = three()
    table.hold = lambda sender, _, what: sender == THIRD and isinstance(what, Done)
    table.train(a=16, b=16, c=16)
    table.flow()
    assert not any(table.applied.values()), "it is still waited for"
    table.kill(THIRD)
    table.flow()
    assert table.applied[FIRST] == table.applied[SECOND]
    (commit,) = table.applied[FIRST]
    assert {one.peer for one in commit.contributions} == {FIRST, SECOND, THIRD}
    assert commit.samples == 48


def given_up(table: Table) -> list[tuple[str, str]]:
    """Who has given up a round, and why."""
    return sorted((name, action.reason) for name, action in table.done if isinstance(action, GiveUp))


@pytest.mark.parametrize("lacking", [{FIRST, SECOND, THIRD}, {FIRST}], ids=["all", "the coordinator"])
def test_a_round_that_can_never_finish_is_aborted_and_all_is_given_again(lacking: set[str]) -> None:
    """Nobody is accused: that takes longer here than the round may take."""
    settings = Settings(run="run", target_samples=16, chunks=3, stall_s=60.0, round_s=2.0)
    table = three(settings)
    table.hold = lambda sender, to, what: isinstance(what, Data) and bool(what.digest) and sender != to in lacking
    table.train(a=8, b=8, c=8)
    table.wait(settings.round_s - 0.1)
    assert given_up(table) == []
    table.wait(0.2)
    reason = "not finished in 2.0 s (allreduce_timeout or averaging_timeout)"
    assert given_up(table) == [(name, reason) for name in "abc"]
    assert not any(table.applied.values())
    table.release()  # what comes now is of a round that is over, or of the next attempt
    table.wait(1.0)
    (commit,) = {table.applied[name][0] for name in "abc"}
    assert commit.samples == 24


@pytest.mark.parametrize("decided", [False, True], ids=["undecided", "its commit on the way"])
def test_an_inquiry_that_nobody_answers_ends_when_a_round_would_and_those_who_asked_go_on_together(
    decided: bool,
) -> None:
    """Both have lost the coordinator, and ask one another; no question gets through, though the rest does."""
    settings = replace(SETTINGS, round_s=4.0)
    table = three(settings)

    def last_words(sender: str, to: str, what: object) -> bool:
        return to != sender == FIRST and isinstance(what, Committed) if decided else isinstance(what, Done)

    table.hold = last_words
    table.train(a=8, b=8, c=8)
    table.flow()
    assert len(table.applied[FIRST]) == decided
    table.hold = lambda *letter: isinstance(letter[2], Ask) or last_words(*letter)
    table.kill(FIRST)
    table.wait(settings.round_s - 0.1)
    assert given_up(table) == []
    assert not table.applied[SECOND]
    assert not table.applied[THIRD]
    asked = [(sender, to) for sender, to, what in table.held if isinstance(what, Ask)]
    assert asked.count((SECOND, THIRD)) > 1, "it is asked once only"
    assert asked.count((THIRD, SECOND)) > 1, "it is asked once only"
    table.hold = lambda _, __, what: isinstance(what, (Ask, Call))  # so that nobody is further when the commit comes
    table.wait(0.2)
    reason = "the coordinator is lost, and nobody saw a commit"
    assert given_up(table) == sorted((name, reason) for name in (SECOND, THIRD))
    table.release()
    table.kill(FIRST)  # what is read of it makes it live, until sending to it fails once more
    table.wait(3.0)
    assert table.applied[SECOND] == table.applied[THIRD] != []
    commit = table.applied[SECOND][0]
    assert {one.peer for one in commit.contributions} == {SECOND, THIRD}, "who asked has taken a commit afterwards"
    assert commit.samples == 16, "what was given is given again"


@pytest.mark.parametrize("stops_at", [Join, Data], ids=["before it begins", "in a round"])
def test_a_connected_coordinator_that_falls_mute_is_left_after_a_bounded_time(stops_at: type) -> None:
    settings = replace(SETTINGS, matchmaking_s=1.0, round_s=3.0)
    table = three(settings)
    table.hold = lambda _, __, what: isinstance(what, stops_at)
    table.train(a=8, b=8, c=8)
    table.flow()
    assert {to for _, to, _ in table.held} >= {FIRST}, "it is under way"
    table.gone.add(FIRST)  # nobody notices
    table.hold = lambda *_: False
    patience_s = settings.matchmaking_s if stops_at is Join else settings.round_s
    table.wait(1.25 * patience_s + 2 * settings.resend_s - 0.1)
    assert given_up(table) == []
    table.wait(0.2)
    assert [name for name, _ in given_up(table)] == sorted([SECOND, THIRD])
    table.wait(2 * settings.matchmaking_s)
    assert table.applied[SECOND] == table.applied[THIRD]
    (commit,) = table.applied[SECOND]
    assert {one.peer for one in commit.contributions} == {SECOND, THIRD}


def test_an_offer_in_the_name_of_another_peer_is_not_taken() -> None:
    table = three()
    forged: list[Join] = []

    def forge(sender: str, receiver: str, what: object) -> bool:
        if not isinstance(what, Join) or sender != THIRD or what.offer.contribution is None:
            return False
        contribution = replace(what.offer.contribution, peer=SECOND)
        if contribution not in [one.offer.contribution for one in forged]:
            forged.append(replace(what, offer=replace(what.offer, contribution=contribution)))
            table.letters.append((sender, receiver, forged[-1]))
        return True

    table.hold = lambda *letter: letter[2] not in forged and forge(*letter)
    table.train(a=16, b=16, c=16)
    table.wait(8.0)
    assert forged
    (commit, *_) = table.applied[FIRST]
    assert sorted(one.peer for one in commit.contributions) == sorted([FIRST, SECOND])


def test_an_idle_peer_has_nothing_to_do_in_the_past() -> None:
    """A driver that sleeps until the deadline would spin."""
    table = three()
    head = table.peers[FIRST].head
    assert head is not None
    table.read(SECOND, FIRST, Progress(head=head, samples=0, swarm_samples=20))
    table.flow()
    for _ in range(100):
        table.now += 0.1
        for peer in table.peers.values():
            peer.tick(table.now)
        table.flow()
        assert all(peer.deadline > table.now for peer in table.peers.values())


def test_a_peer_that_asks_what_became_of_its_round_has_nothing_to_do_in_the_past() -> None:
    table = three()
    table.hold = lambda sender, _, what: sender == FIRST and isinstance(what, Committed)
    table.train(a=8, b=8, c=8)
    table.flow()
    table.hold = lambda *_: True  # whom it asks does not answer
    table.kill(FIRST)
    asking = table.peers[SECOND]
    for _ in range(20):
        table.now += 0.2
        asking.tick(table.now)
        table.flow()
        assert asking.deadline > table.now
    assert any(isinstance(letter[2], Ask) for letter in table.held), "it has not asked"


def inputs_on_one_way(sender: str, receiver: str, what: object) -> bool:
    return isinstance(what, Data) and not what.digest and (sender, receiver) == (THIRD, SECOND)


def test_an_owner_that_still_collects_inputs_over_a_slow_line_is_not_taken_for_silent() -> None:
    table = three(Settings(run="run", target_samples=16, chunks=3, round_s=60.0))
    table.hold = inputs_on_one_way
    table.train(a=8, b=8, c=8)
    table.flow()
    late = next(what for sender, receiver, what in table.held if receiver == SECOND)
    assert isinstance(late, Data)
    for _ in range(round(3 * SETTINGS.stall_s)):
        table.wait(1.0)
        table.peers[SECOND].heard(late.round, THIRD, table.now)  # a part of it arrives
    assert not table.applied[FIRST]
    table.release()
    (commit,) = {table.applied[name][0] for name in "abc"}
    assert commit.samples == 24
    assert table.notes() == []


def test_an_owner_whose_inputs_have_stopped_coming_says_nothing_and_who_gives_none_goes() -> None:
    table = three(Settings(run="run", target_samples=16, chunks=3, round_s=60.0))
    table.hold = inputs_on_one_way
    table.train(a=8, b=8, c=8)
    table.wait(2 * SETTINGS.stall_s)
    (commit,) = {table.applied[name][0] for name in (FIRST, SECOND)}
    assert {one.peer for one in commit.contributions} == {FIRST, SECOND}


def test_a_plan_is_said_once_and_again_only_to_who_has_an_older_one() -> None:
    table = three(Settings(run="run", target_samples=8, chunks=3, round_s=60.0))
    begun: list[tuple[str, int]] = []

    def letters(sender: str, receiver: str, what: object) -> bool:
        if isinstance(what, Begin):
            begun.append((receiver, what.plan.version))
            return begun.count((receiver, 1)) == 1 and begun[-1] == (SECOND, 1)  # its newer plan gets lost, once
        return isinstance(what, Data) and not what.digest and sender == THIRD != receiver

    table.hold = letters
    table.train(a=8, b=8, c=8)
    table.wait(4.0)
    assert begun == [(name, 0) for name in sorted([SECOND, THIRD])]  # what one says to oneself is no letter
    table.kill(THIRD)
    table.wait(4.0)
    assert begun[2:] == [(SECOND, 1), (SECOND, 1)]
    assert [len(table.applied[name]) for name in (FIRST, SECOND)] == [1, 1]


def test_what_is_made_by_a_newer_plan_counts_at_who_hears_of_that_plan_later() -> None:
    """Else it would have to be asked for again, half a second later."""
    table = three()

    def hold(sender: str, to: str, what: object) -> bool:
        dies = sender == SECOND != to and isinstance(what, Data) and bool(what.digest)
        return dies or (to == THIRD and isinstance(what, Begin) and what.plan.version > 0)

    table.hold = hold
    table.train(a=8, b=8, c=8)
    table.flow()
    table.kill(SECOND)
    table.flow()
    assert [what for *_, what in table.held if isinstance(what, Begin)], "all but this one have heard of it"
    assert not table.applied[FIRST]
    table.held = [letter for letter in table.held if letter[0] != SECOND]
    table.release()
    (step,) = table.applied[FIRST]
    assert table.applied[THIRD] == [step]
    assert {one.peer for one in step.contributions} == {FIRST, THIRD}


def test_who_has_started_again_in_a_round_says_so_when_it_hears_of_it() -> None:
    table = three()
    table.hold = lambda sender, receiver, what: isinstance(what, Data) and not what.digest and sender == THIRD
    table.train(a=8, b=8, c=8)
    table.flow()
    head = table.peers[THIRD].head
    assert head is not None
    again = Peer(SETTINGS, THIRD, b"another life")
    again.adopt(head, (), table.now)
    table.peers[THIRD] = again
    table.wait(2.0)
    assert (THIRD, "it has left the round") in table.notes()
    assert [len(table.applied[name]) for name in (FIRST, SECOND)] == [1, 1]


def test_a_coordinator_that_has_started_again_so_quickly_that_nobody_noticed_is_asked_and_the_round_is_over() -> None:
    """(Simulated with seed 2053: it had been the only owner, so nobody had anything to tell it, for 20 seconds.)"""
    table = three()
    table.hold = lambda sender, receiver, what: isinstance(what, Data) and sender == FIRST
    table.train(a=8, b=8, c=8)
    table.flow()
    head = table.peers[FIRST].head
    assert head is not None
    table.peers[FIRST] = Peer(SETTINGS, FIRST, b"another life")
    table.peers[FIRST].adopt(head, (), table.now)
    table.hold = lambda _, __, what: isinstance(what, Progress)  # else it would call, and hear that they wait for it
    table.wait(6 * SETTINGS.resend_s)
    assert "the coordinator is lost, and nobody saw a commit" in [
        action.reason for _, action in table.done if isinstance(action, GiveUp)
    ]
    table.hold = lambda *_: False
    table.wait(2 * SETTINGS.resend_s)
    assert [len(table.applied[name]) for name in (FIRST, SECOND, THIRD)] == [1, 1, 1]


def test_who_was_taken_out_and_has_not_heard_of_it_hears_when_it_asks() -> None:
    """Whether its coordinator, which says nothing more of the round, lives."""
    table = three()
    ended = lambda sender, receiver, what: isinstance(what, Ended) and receiver == THIRD  # noqa: E731
    slow = lambda sender, receiver, what: isinstance(what, Data) and receiver == FIRST and sender == SECOND  # noqa: E731
    table.hold = lambda *letter: ended(*letter) or slow(*letter)
    table.train(a=8, b=8, c=8)
    table.flow()
    table.peers[FIRST].lost(THIRD, table.now)
    table.wait(1.0)
    assert not [action for _, action in table.done if isinstance(action, GiveUp)]
    table.held.clear()
    table.hold = slow
    table.wait(4 * SETTINGS.resend_s + 1.0)
    assert [(name, action.reason) for name, action in table.done if isinstance(action, GiveUp)] == [
        (THIRD, "it went on without this peer")
    ]


@pytest.mark.parametrize("wrong", ["owners", "since", "sender", "usurper", "stranger"])
def test_a_plan_that_cannot_be_one_changes_nothing(wrong: str) -> None:
    """Fewer owners than chunks, or from somebody else than the coordinator; also as a newer version."""
    table = three()
    table.hold = lambda _, __, what: isinstance(what, Data)
    table.train(a=8, b=8, c=8)
    table.flow()
    (plan,) = {peer._rounds._member.plan for peer in table.peers.values()}
    newer = replace(plan, version=plan.version + 1, contributions=plan.contributions[:1])
    for receiver in (SECOND, THIRD):
        (other,) = {SECOND, THIRD} - {receiver}
        changes = {
            "sender": {},
            "usurper": {"coordinator": other},
            "stranger": {"owners": ("nobody",) * SETTINGS.chunks},
        }.get(wrong, {wrong: ()})
        sender = other if wrong in ("sender", "usurper") else FIRST
        table.read(sender, receiver, Begin(plan=replace(newer, **changes)))
    table.release()
    (commit,) = {applied[0] for applied in table.applied.values()}
    assert commit.samples == 24


def test_members_that_have_other_bytes_make_no_step() -> None:
    table = three()
    table.hold = lambda sender, _, what: sender == THIRD and isinstance(what, Done)
    table.train(a=8, b=8, c=8)
    table.flow()
    ((_, receiver, done),) = table.held
    assert isinstance(done, Done)
    table.held.clear()
    table.hold = lambda *_: False
    table.read(THIRD, receiver, replace(done, digest=b"x" * 16))
    table.flow()
    assert not any(table.applied.values())
    reasons = [action.reason for _, action in table.done if isinstance(action, GiveUp)]
    assert len(reasons) == 3, "all give up"
    table.wait(3.0)
    assert {len(applied) for applied in table.applied.values()} == {1}
    assert {applied[0].samples for applied in table.applied.values()} == {24}, "nothing is lost"


@pytest.mark.parametrize("silent", [Call, Join, Begin, Done, Committed], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("who", [FIRST, THIRD], ids=["coordinator", "member"])
def test_a_peer_that_lives_and_says_something_no_more_does_not_stop_the_others(who: str, silent: type) -> None:
    """Nobody loses its connection: only the limits in time help."""
    table = three(replace(SETTINGS, matchmaking_s=1.0, stall_s=1.0, round_s=3.0))
    table.hold = lambda sender, receiver, what: sender == who != receiver and isinstance(what, silent)
    table.train(a=8, b=8, c=8)
    table.flow()
    head = Head.root(SETTINGS.run, "a")
    for _ in range(20):
        table.wait(1.0)
        for name, peer in table.peers.items():  # what all publish in the DHT
            for other in {"a", "b", "c"} - {name}:
                if not table.applied[other]:
                    peer.saw(other, Place(head=head, samples=8, stamp=table.now), table.now)
    others = [name for name in (FIRST, SECOND, THIRD) if name != who]
    assert all(table.applied[name] for name in others), "no step"
    assert table.applied[others[0]][0] == table.applied[others[1]][0]


@pytest.mark.parametrize("stood", [True, False])
def test_who_stood_still_hears_of_the_others_before_it_leads_wherever_it_stands_then(stood: bool) -> None:
    """Else it would commit alone beside a round that they have under way."""
    one, root = Peer(SETTINGS, "a", b"life"), Head.root("run", "a")
    one.adopt(root, (), 0.0)
    one.saw("b", Place(head=root, samples=0, stamp=1.0), 0.1)
    if stood:
        one.suspended(1.0)
    one.lost("b", 1.01)
    one.adopt(Head(epoch=3, lineage=b"x" * 16, samples=48), (), 1.02)
    one.contributed(20, 1.03)
    assert any(isinstance(action, Called) for action in one.take()) is not stood
    one.tick(1.0 + SETTINGS.resend_s)
    assert any(isinstance(action, Called) for action in one.take()) is stood


@pytest.mark.parametrize("moves", [True, False])
def test_who_let_others_lead_since_they_are_ahead_leads_again_once_it_is_where_they_are(moves: bool) -> None:
    """Else all wait for it, after a partition say, for as long as matchmaking takes."""
    one, root = Peer(SETTINGS, FIRST, b"life"), Head.root("run", "a")
    ahead = Head(epoch=3, lineage=b"x" * 16, samples=480)
    one.adopt(root, (), 0.0)
    one.saw(SECOND, Place(head=root, samples=0, stamp=1.0), 0.0)
    one.contributed(16, 0.0)
    (called,) = [action for action in one.take() if isinstance(action, Called)]
    one.receive(SECOND, Decline(round=called.round, head=ahead), 0.1)
    if moves:
        one.adopt(ahead, (), 0.2)
        one.contributed(16, 0.2)
    one.tick(0.3)
    assert any(isinstance(action, Called) for action in one.take()) is moves


def test_a_record_of_before_its_death_does_not_bring_a_peer_back_but_one_more_shows_that_it_lives() -> None:
    """Records are seconds late: the others would wait for it in their next round."""
    one, root = Peer(SETTINGS, "a", b"life"), Head.root("run", "a")
    one.adopt(root, (), 0.0)
    for stamp in (1.0, 2.0, 3.0):
        one.saw("b", Place(head=root, samples=4, stamp=stamp), stamp)
        assert one.living == (("b",) if stamp == 1.0 else ())
        assert one.cut == (("b",) if stamp == 3.0 else ())
        asked = [action.message for action in one.take() if isinstance(action, Send) and action.to == "b"]
        assert (Probe(asks=True, cuts=0) in asked) is (stamp > 1.0)
        one.lost("b", stamp + 0.1)
    one.receive("b", Probe(asks=False, cuts=0), 3.5)
    assert (one.living, one.cut) == (("b",), ())


def test_who_calls_again_and_again_and_begins_nothing_is_followed_for_a_bounded_time() -> None:
    """Each of its calls takes the place of the one before, and none of them ever gets a plan."""
    settings = replace(SETTINGS, matchmaking_s=1.0)
    table, waited, waits = three(settings), 0.0, []
    table.gone.add(FIRST)  # what it says is said here
    for tenth in range(600):
        for peer in (SECOND, THIRD) if tenth % 5 == 0 else ():
            head = table.peers[peer].head
            assert head is not None
            table.read(FIRST, peer, Call(round=tenth.to_bytes(16, "big"), head=head))
        before = len(table.applied[SECOND])
        table.train(**{SECOND: 8, THIRD: 8})
        table.wait(0.1)
        waited += 0.1
        if len(table.applied[SECOND]) > before:
            waits, waited = [*waits, waited], 0.0
    patience_s = 1.25 * settings.matchmaking_s + 2 * settings.resend_s
    # a pause after failures follows, and rounds in which it is called itself, and says nothing
    assert max(waits) < patience_s + settings.max_backoff_s + 2 * settings.matchmaking_s + 0.2
    assert sum(waits) > 50.0
    assert len(waits) > 25, "most of the time it is not followed (a round takes 1.1 s here)"
    assert table.applied[SECOND] == table.applied[THIRD]


@pytest.mark.parametrize("frozen", [FIRST, SECOND])
def test_who_stood_still_while_it_followed_a_call_follows_the_next_one(frozen: str) -> None:
    """Its own, too, if it was the coordinator: it did not wait in vain, and would shun it for four times as long."""
    peers, now = {name: Peer(SETTINGS, name, b"life") for name in (FIRST, SECOND)}, 0.0
    root = Head.root("run", "a")
    for name, peer in peers.items():
        peer.adopt(root, (), now)
        peer.saw(SECOND if name == FIRST else FIRST, Place(head=root, samples=0, stamp=1.0), now)
    one = peers[frozen]
    if frozen == FIRST:
        one.contributed(16, now)
    else:
        one.receive(FIRST, Call(round=b"1" * 16, head=root), now)
    assert any(isinstance(action, Called) for action in one.take())
    one.tick(20.0)
    assert any(isinstance(action, GiveUp) for action in one.take())
    if frozen == FIRST:
        for tenth in range(1, 30):
            one.contributed(16, 20.0 + tenth / 10)
    else:
        one.receive(FIRST, Call(round=b"2" * 16, head=root), 21.0)
    assert any(isinstance(action, Called) for action in one.take())
