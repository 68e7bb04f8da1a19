"""What passes between the thread of the rounds and the training thread: steps in order, debts, and what is lost."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_hivemind.engine.native import handover as handover_module
from lightning_hivemind.engine.native import spill as spill_module
from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.handover import Handover
from lightning_hivemind.engine.native.pace import Pace
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.protocol.plan import Offer, reducers_of, shares
from lightning_hivemind.engine.native.seam import Outcome, Parcel
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.steps import Handed, Received
from lightning_hivemind.errors import SwarmError

ROOT = Head.root("run", "founder")
AVERAGE = torch.ones(3)


class Desk:
    """A handover with its gradients, and the chain of commits that a test makes."""

    def __init__(self, *, gives: bool = True, reduces: bool = True) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.gradients = Gradients("me", [self.weight], Statistics([]), max_staleness=1)
        self.pace = Pace(64, longest_s=10.0)
        self.handover = Handover("me", self.gradients, self.pace, reduces=reduces, gives=gives)
        self.tip = ROOT
        self.handover.adopted(ROOT)

    def add(self, samples: int, epoch: int | None = None) -> int:
        self.weight.grad = torch.ones(3)
        return self.gradients.add(samples, self.tip.epoch if epoch is None else epoch)

    def commit(self, *contributions: Contribution, average: Tensor | None = AVERAGE) -> Commit:
        """The next of the chain, decided."""
        made = commit_on(self.tip, *contributions)
        self.handover.committed(made, average, None)
        self.tip = made.head
        return made

    def give(self) -> Contribution:
        contribution = self.handover.give().offer.contribution
        assert contribution is not None
        return contribution


def commit_on(parent: Head, *contributions: Contribution, digest: bytes = b"d") -> Commit:
    others = Contribution(peer="other", number=1, samples=32)
    return Commit(round=bytes(16), parent=parent, contributions=(*contributions, others), digest=digest)


@pytest.fixture
def desk() -> Desk:
    return Desk()


# ---------------------------------------------------------------------- steps


@pytest.mark.parametrize("how", ["committed", "without its average", "learned later"])
def test_the_wish_to_stop_is_known_however_the_step_was_learned(desk: Desk, how: str) -> None:
    others = Contribution(peer="other", number=1, samples=32)
    stopping = Commit(round=bytes(16), parent=ROOT, contributions=(others,), digest=b"d", stop=True)
    if how == "learned later":
        later = commit_on(stopping.head)
        desk.handover.behind(later.head, (stopping, later))
    else:
        desk.handover.committed(stopping, AVERAGE if how == "committed" else None, None)
    assert desk.handover.stops_at == stopping.head.epoch


def test_a_step_that_does_not_follow_is_a_debt(desk: Desk) -> None:
    """One was lost in between: without a state every step from here on would be of no use."""
    lost = commit_on(ROOT)
    desk.handover.committed(commit_on(lost.head), AVERAGE, None)
    assert desk.handover.owes


def test_an_error_of_the_rounds_thread_is_a_debt_and_what_was_given_comes_back(desk: Desk) -> None:
    desk.add(8)
    desk.give()
    desk.handover.failed("MemoryError: ")
    assert desk.handover.owes
    assert not desk.handover.under_way
    assert desk.gradients.samples == 8
    assert desk.handover.take_untold() == {0: "MemoryError: "}


def test_what_others_refuse_is_told_once_and_not_given_again(desk: Desk) -> None:
    desk.add(8)
    desk.give()
    desk.handover.refused()
    desk.commit()
    assert (desk.handover.take_lost(), desk.handover.take_lost()) == ((0, 8), (0, 0))
    assert desk.gradients.samples == 0


def test_who_fails_in_round_after_round_ends_with_the_reason(desk: Desk) -> None:
    for _ in range(2):
        desk.add(8)
        desk.handover.failed("ValueError: a codec's")
        desk.commit()  # of the others
        desk.handover.adopted(desk.tip)
        desk.handover.check()
    desk.add(8)
    desk.commit(desk.give())
    for _ in range(3):
        desk.handover.check()
        desk.handover.failed("ValueError: a codec's")
    with pytest.raises(SwarmError, match=r"3 times in a row.*ValueError: a codec's"):
        desk.handover.check()


def test_who_fails_with_every_average_ends_with_the_reason_though_it_gives_to_every_step(desk: Desk) -> None:
    for _ in range(3):
        desk.handover.check()
        desk.add(8)
        desk.commit(desk.give(), average=None)
        desk.handover.failed("MemoryError: no more")
        desk.handover.adopted(desk.tip)
    with pytest.raises(SwarmError, match="3 times in a row"):
        desk.handover.check()


def test_an_average_that_was_coming_does_not_after_this_peers_part_has_failed(desk: Desk) -> None:
    """Training would wait for it for ever."""
    desk.handover.committed(commit_on(ROOT), None, None, coming=True)
    assert desk.handover.expects(ROOT)
    desk.handover.failed("MemoryError: no more")
    assert not desk.handover.expects(ROOT)
    assert desk.handover.owes


def test_samples_of_a_state_that_was_replaced_are_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.gradients, "replaced", lambda: 8)
    monkeypatch.setattr(desk.gradients, "returned", lambda: 4)
    desk.handover.replaced()
    desk.handover.returned("too few", begun=False)
    assert desk.handover.take_lost() == (12, 0)


def test_a_step_says_what_is_averaged_and_how_much_of_it_is_this_peers(desk: Desk) -> None:
    desk.add(8)
    commit = desk.commit(desk.give())
    step = desk.handover.next_step(ROOT)
    assert step is not None
    assert (step.commit, step.mine) == (commit, 8)
    assert step.average is AVERAGE
    assert step.began <= time.monotonic()
    assert desk.handover.next_step(commit.head) is None


def test_steps_come_in_order_and_only_onto_their_parent(desk: Desk) -> None:
    first, second = desk.commit(), desk.commit()
    made = desk.handover.next_step(ROOT)
    assert made is not None
    assert made.commit == first
    assert desk.handover.next_step(ROOT) is None, "the second does not lead on from the root"
    made = desk.handover.next_step(first.head)
    assert made is not None
    assert made.commit == second


def test_a_step_of_another_lineage_is_not_made(desk: Desk) -> None:
    desk.commit()
    stranger = Head(epoch=ROOT.epoch, lineage=b"?" * 16, samples=ROOT.samples)
    assert desk.handover.next_step(stranger) is None
    assert not desk.handover.ready(stranger)


def test_steps_that_a_fetched_state_has_are_left_out(desk: Desk) -> None:
    commits = [desk.commit() for _ in range(3)]
    made = desk.handover.next_step(commits[1].head)
    assert made is not None
    assert made.commit == commits[2]


def test_there_is_something_to_do_when_a_step_leads_on(desk: Desk) -> None:
    assert not desk.handover.ready(ROOT)
    commit = desk.commit()
    assert desk.handover.ready(ROOT)
    assert not desk.handover.ready(commit.head)


# ---------------------------------------------------------------------- debts


def test_a_step_without_its_average_makes_the_peer_owe_a_state(desk: Desk) -> None:
    desk.commit()
    desk.commit(average=None)
    assert desk.handover.owes
    assert desk.handover.ready(desk.tip)
    assert desk.handover.next_step(ROOT) is None, "where it leads is not where the swarm is"


def test_who_owes_a_state_gives_nothing_and_is_not_waited_for_and_keeps_what_rounds_bring(desk: Desk) -> None:
    desk.add(8)
    assert desk.handover.samples == 8
    owing = desk.commit(average=None)
    assert desk.handover.samples == 0
    assert desk.handover.ready_at(5.0) == 5.0
    given = desk.handover.give()
    assert (given.offer.contribution, given.values) == (None, None)
    desk.commit()
    made = desk.handover.next_step(owing.head)
    assert made is not None


def test_a_debt_is_settled_where_the_swarm_is_and_not_before(desk: Desk) -> None:
    owing = desk.commit(average=None)
    later = desk.commit()
    assert not desk.handover.settle(owing.head)
    assert desk.handover.owes
    assert desk.handover.next_step(owing.head) is not None
    assert desk.handover.settle(later.head)
    assert not desk.handover.owes


def test_which_states_lead_to_where_the_swarm_is(desk: Desk) -> None:
    """Of where it is, of before a step that is kept here, or from further on; not of before a step that was missed."""
    missed, met = commit_on(ROOT), commit_on(commit_on(ROOT).head)
    desk.handover.behind(missed.head, ())
    assert not desk.handover.leads_on(ROOT)
    assert desk.handover.leads_on(missed.head)
    assert desk.handover.leads_on(met.head), "this peer has still to hear of it"
    desk.handover.committed(met, AVERAGE, None)
    assert [desk.handover.leads_on(one) for one in (ROOT, missed.head, met.head)] == [False, True, True]
    another = commit_on(missed.head, digest=b"another")
    assert not desk.handover.leads_on(Head(epoch=2, lineage=another.head.lineage, samples=met.head.samples - 1))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """With memory for five steps, and room for three more on disk."""
    monkeypatch.setattr(handover_module, "WAITING_BYTES", 4 * 4 * 5)
    monkeypatch.setattr(spill_module, "MOST_ON_DISK", 8)
    return Desk()


def test_more_steps_than_there_is_memory_for_wait_on_disk(few: Desk) -> None:
    """A state may take as long to come as the swarm for dozens of steps."""
    averages = [torch.full((3,), float(number)) for number in range(8)]
    commits = [few.commit(average=average) for average in averages]
    assert not few.handover.owes
    head = ROOT
    for commit, average in zip(commits, averages, strict=True):
        step = few.handover.next_step(head)
        assert step is not None
        assert torch.equal(step.average, average)
        head = commit.head


def test_averages_on_disk_leave_three_of_four_files_that_may_be_open_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a validation could not save its checkpoint, or start the workers of a loader."""
    found = []
    for soft in (256, 1 << 20, spill_module.resource.RLIM_INFINITY):
        monkeypatch.setattr(spill_module.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        found.append(spill_module.most_on_disk())
    assert found == [64, 1000, 1000]


IN_MEMORY = "/dev/shm"


@pytest.mark.skipif(not os.path.isdir(IN_MEMORY), reason="no folder that is known to be memory")
def test_no_step_waits_in_a_folder_that_is_memory(
    few: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As /tmp is on many systems: they would take the memory that there is not."""
    monkeypatch.setattr(tempfile, "tempdir", IN_MEMORY)
    monkeypatch.setattr("lightning_hivemind.engine.native.spill.ELSEWHERE", str(tmp_path))
    for _ in range(6):
        few.commit()
    assert not few.handover.owes
    assert f"{tmp_path}/" in Path("/proc/self/maps").read_text(), "the sixth waits elsewhere"
    monkeypatch.setattr("lightning_hivemind.engine.native.spill.ELSEWHERE", IN_MEMORY)
    few.commit()
    assert few.handover.owes
    assert "set TMPDIR" in caplog.text


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("full", ["", "nearly", "since it was asked", "of files", "gone"])
def test_more_than_there_is_room_for_are_a_debt(
    few: Desk, full: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    room = 5 if full else 8
    if full == "nearly":
        monkeypatch.setattr("lightning_hivemind.engine.native.spill.LEFT_BYTES", 1 << 60)
    elif full == "gone":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        monkeypatch.setattr("lightning_hivemind.engine.native.spill.ELSEWHERE", str(tmp_path / "gone"))
    elif full:
        monkeypatch.setattr(*((os, "posix_fallocate") if "since" in full else (tempfile, "TemporaryFile")), no_space)
    commits = [few.commit() for _ in range(room)]
    assert not few.handover.owes
    commits.append(few.commit())
    assert few.handover.owes
    assert ("no room for an average" in caplog.text) == bool(full), "a full disk is told"
    assert few.handover.next_step(ROOT) is None
    made = few.handover.next_step(commits[0].head)
    assert made is not None
    assert made.commit == commits[1]


def test_who_looks_what_comes_while_another_thread_changes_it_does_not_fail(desk: Desk) -> None:
    """The training thread looks without the lock."""
    over, interval = threading.Event(), sys.getswitchinterval()
    for _ in range(3):
        desk.commit()

    def rounds() -> None:
        while not over.is_set():
            desk.commit()
            with desk.handover.changed:
                desk.handover._steps.popleft()

    thread = threading.Thread(target=rounds)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            assert desk.handover.waits_since is None
            desk.handover.ready(ROOT)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()


def test_who_follows_others_owes_their_state_and_forgets_the_steps_of_before(desk: Desk) -> None:
    desk.commit()
    desk.handover.behind(Head(epoch=9, lineage=b"y" * 16, samples=900), ())
    assert desk.handover.owes
    assert desk.handover.next_step(ROOT) is None


@pytest.mark.parametrize("how", ["heard", "learned later"])
def test_steps_that_are_not_made_yet_are_known_until_they_are(desk: Desk, how: str) -> None:
    desk.add(8)
    if how == "heard":
        commit = desk.commit(desk.give())
    else:
        commit = commit_on(ROOT, desk.give())
        desk.handover.behind(commit.head, (commit,))
    desk.handover.behind(Head(epoch=9, lineage=b"y" * 16, samples=900), ())
    assert [(one.commit, one.mine) for one in desk.handover.take_decided()] == [(commit, 8)]
    assert not desk.handover.take_decided()


def test_steps_that_were_made_are_not_told_as_waiting(desk: Desk) -> None:
    desk.add(8)
    commit = desk.commit(desk.give())
    assert desk.handover.next_step(ROOT) is not None
    desk.handover.next_step(commit.head)
    assert not desk.handover.take_decided()


def test_who_adopts_a_head_owes_nothing(desk: Desk) -> None:
    desk.handover.behind(Head(epoch=9, lineage=b"y" * 16, samples=900), ())
    desk.handover.adopted(ROOT)
    assert not desk.handover.owes
    assert desk.handover.settle(ROOT)


def test_who_goes_on_from_its_own_state_after_all_counts_its_batches(desk: Desk) -> None:
    """It followed peers that are 9 steps ahead; they are gone; all its batches would be too old, for ever."""
    desk.handover.behind(Head(epoch=9, lineage=b"y" * 16, samples=900), ())
    desk.handover.adopted(ROOT)
    assert desk.add(8) == 0
    assert desk.handover.samples == 8


# ---------------------------------------------------------------------- what is lost


def test_what_is_lost_is_counted_once(desk: Desk) -> None:
    desk.add(8)
    desk.commit()
    assert desk.handover.take_lost() == (0, 0), "one step behind is not too old"
    desk.commit()
    desk.add(5, epoch=1)
    assert desk.handover.take_lost() == (8, 0)
    assert desk.handover.take_lost() == (0, 0)


def test_what_is_lost_adds_up(desk: Desk) -> None:
    desk.add(8)
    desk.commit()
    desk.add(5)
    desk.commit()
    desk.commit()
    lost, _ = desk.handover.take_lost()
    assert lost + desk.gradients.samples == 13


def test_who_follows_on_an_unknown_way_loses_everything(desk: Desk) -> None:
    desk.add(8)
    desk.give()
    desk.add(3)
    desk.handover.behind(Head(epoch=1, lineage=b"y" * 16, samples=900), ())
    assert desk.handover.take_lost() == (11, 0)
    assert desk.gradients.samples == 0


def test_who_follows_by_commits_loses_nothing_that_they_have(desk: Desk) -> None:
    desk.add(8)
    given = desk.give()
    desk.add(3)
    commit = commit_on(ROOT, given)
    desk.handover.behind(commit.head, (commit,))
    assert desk.handover.take_lost() == (0, 0)
    assert desk.gradients.samples == 3


# ---------------------------------------------------------------------- rounds


def test_what_is_given_says_what_this_peer_can_and_wants() -> None:
    desk = Desk(reduces=False)
    desk.handover.stop_wanted = True
    desk.add(8)
    given = desk.handover.give()
    assert (given.offer.reduces, given.offer.stop) == (False, True)
    assert given.values is not None
    assert given.values.tolist() == [1.0, 1.0, 1.0, 1.0], "the gradient, and that there is one"


def test_who_fetches_a_state_reduces_only_where_nobody_else_can(desk: Desk) -> None:
    """Its line and its processor have enough to do."""
    assert desk.handover.give().offer.bandwidth == 1.0
    desk.handover.returned("nobody came", begun=False)
    desk.handover.owe()
    offer = desk.handover.give().offer
    assert offer.reduces
    offers = {"me": offer, "a": Offer(contribution=None), "b": Offer(contribution=None)}
    assert shares(reducers_of(offers), 3)["me"] == 0.0
    clients = {"me": offer, "a": Offer(contribution=None, reduces=False), "b": Offer(contribution=None, reduces=False)}
    assert shares(reducers_of(clients), 3)["me"] > 0.0


@pytest.mark.parametrize("trains", [True, False])
def test_who_joined_reduces_only_where_nobody_else_can_until_its_first_batch_is_done(trains: bool) -> None:
    """It is the longest: the gradients' memory is fresh. (Who does not train has no batch.)"""
    desk = Desk(gives=trains)
    desk.handover.owe()
    assert desk.handover.settle(desk.tip)
    desk.pace.begin_batch(1.0)
    assert (desk.handover.give().offer.bandwidth < 1.0) is trains
    desk.handover.returned("nobody came", begun=False)
    desk.pace.end_batch(2.0)
    assert desk.handover.give().offer.bandwidth == 1.0


def test_who_does_not_train_gives_nothing() -> None:
    desk = Desk(gives=False)
    desk.add(8)
    assert desk.handover.samples == 0
    assert desk.handover.give().offer.contribution is None


@pytest.mark.parametrize(
    "end",
    [
        lambda desk: desk.handover.returned("why", begun=True),
        lambda desk: desk.commit(),
        lambda desk: desk.handover.behind(ROOT, ()),
        lambda desk: desk.handover.adopted(ROOT),
    ],
    ids=["returned", "committed", "behind", "adopted"],
)
def test_a_round_is_under_way_until_it_ends_and_whoever_waits_is_woken(end: Callable[[Desk], object]) -> None:
    desk, woken = Desk(), threading.Event()
    desk.handover.give()
    assert desk.handover.under_way

    def waits() -> None:
        with desk.handover.changed:
            assert desk.handover.changed.wait_for(lambda: not desk.handover.under_way, 10.0)
        woken.set()

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    end(desk)
    assert woken.wait(5.0)
    thread.join()


def test_a_round_that_came_to_nothing_is_told_once_and_what_was_given_is_given_again(desk: Desk) -> None:
    desk.add(8)
    first = desk.give()
    desk.handover.returned("the coordinator is gone", begun=True)
    assert desk.handover.take_untold() == {0: "the coordinator is gone"}
    assert desk.handover.take_untold() == {}
    again = desk.give()
    assert (again.samples, again.number > first.number) == (8, True)


def test_a_round_that_came_to_nothing_is_told_though_the_next_attempt_was_quick(desk: Desk) -> None:
    """The training thread looks every 0.05 s, and less often on a busy machine."""
    desk.handover.give()
    desk.handover.returned("why", begun=True)
    desk.commit()
    assert desk.handover.take_untold() == {0: "why"}


def test_a_batch_under_way_is_waited_for_and_none_is_not(desk: Desk) -> None:
    now = time.monotonic()
    assert desk.handover.ready_at(now) == now
    desk.handover.returned("", begun=False)
    assert desk.handover.begin_batch(ROOT, 60.0)
    assert desk.handover.ready_at(time.monotonic()) > time.monotonic()
    assert not desk.handover.under_way, "it is the batch that is waited for, and no round yet"
    desk.handover.end_batch()
    now = time.monotonic()
    assert desk.handover.ready_at(now) == now
    assert desk.handover.under_way


@pytest.mark.parametrize("limit_s", [60.0, 0.0])
def test_no_batch_begins_while_there_is_something_to_do(desk: Desk, limit_s: float) -> None:
    assert desk.handover.begin_batch(ROOT, limit_s)
    desk.handover.end_batch()
    step = desk.commit()
    assert not desk.handover.begin_batch(ROOT, limit_s)
    assert desk.handover.next_step(ROOT) is not None
    assert desk.handover.begin_batch(step.head, limit_s)
    desk.handover.end_batch()
    desk.commit(average=None)
    assert not desk.handover.begin_batch(desk.tip, limit_s)


def test_no_batch_begins_in_a_round_but_of_a_peer_that_does_not_wait(desk: Desk) -> None:
    desk.handover.give()
    assert not desk.handover.begin_batch(ROOT, 60.0)
    assert desk.handover.begin_batch(ROOT, 0.0)
    desk.handover.returned("", begun=False)
    assert desk.handover.begin_batch(ROOT, 60.0)


def test_a_round_of_which_nothing_is_heard_is_waited_for_no_longer_than_promised(desk: Desk) -> None:
    """Its coordinator may be mute: connected, and saying nothing."""
    long_ago = time.monotonic() - 40.0
    desk.handover.ready_at(long_ago)
    desk.handover.give()
    assert not desk.handover.begin_batch(ROOT, 60.0)
    assert desk.handover.begin_batch(ROOT, 35.0)
    assert desk.handover.under_way, "it may still end well"
    assert not desk.handover.begin_batch(ROOT, 35.0), "the next batch waits as long"


def test_how_long_a_round_was_waited_for_is_known(desk: Desk) -> None:
    assert desk.handover.waits_since is None
    now = time.monotonic()
    desk.handover.ready_at(now)
    desk.handover.returned("too few", begun=True)
    assert desk.handover.waits_since is None, "there is none now"
    desk.handover.ready_at(now + 1.0)
    assert desk.handover.waits_since == now


def test_rounds_that_come_to_nothing_one_after_another_are_waited_for_as_one(desk: Desk) -> None:
    for ago_s in (40.0, 20.0, 0.0):
        desk.handover.ready_at(time.monotonic() - ago_s)
        desk.handover.returned("too few", begun=True)
    desk.handover.ready_at(time.monotonic())
    assert desk.handover.begin_batch(ROOT, 35.0)
    desk.handover.end_batch()
    desk.commit()
    desk.handover.next_step(ROOT)
    desk.handover.ready_at(time.monotonic())
    assert not desk.handover.begin_batch(desk.tip, 35.0)


def test_who_is_alone_does_not_hold(desk: Desk) -> None:
    for _ in range(3):
        assert desk.handover.begin_batch(desk.tip, 60.0)
        desk.handover.end_batch()
        desk.add(8)
        made = Commit(round=bytes(16), parent=desk.tip, contributions=(desk.give(),), digest=b"d")
        desk.handover.committed(made, AVERAGE, None)
        desk.tip = made.head
    desk.add(8)
    assert desk.handover.hold_until() <= time.monotonic()


# ---------------------------------------------------------------------- averages that come later


def late(desk: Desk, digest: bytes = b"d") -> Commit:
    desk.handover.give()
    made = commit_on(desk.tip, digest=digest)
    made = replace(made, round=digest * 16)
    desk.handover.committed(made, None, None, coming=True)
    desk.tip = made.head
    return made


def test_a_step_whose_average_is_coming_is_waited_for_and_made_once_it_is_here(desk: Desk) -> None:
    made = late(desk)
    assert desk.handover.waits
    assert desk.handover.expects(ROOT)
    assert not desk.handover.owes
    assert not desk.handover.ready(ROOT)
    assert desk.handover.next_step(ROOT) is None
    assert not desk.handover.begin_batch(ROOT, 10.0)
    assert desk.handover.begin_batch(ROOT, 0.0), "not any longer"
    desk.handover.arrived(made.round, AVERAGE)
    assert not desk.handover.waits
    step = desk.handover.next_step(ROOT)
    assert step is not None
    assert step.average is AVERAGE
    assert step.commit == made


def test_averages_may_arrive_in_another_order_than_they_were_decided(desk: Desk) -> None:
    first, second = late(desk, b"1"), late(desk, b"2")
    third = desk.commit()
    desk.handover.arrived(second.round, AVERAGE)
    assert desk.handover.next_step(ROOT) is None
    desk.handover.arrived(first.round, AVERAGE)
    for made in (first, second, third):
        step = desk.handover.next_step(made.parent)
        assert step is not None
        assert step.commit == made


def test_an_average_that_does_not_come_is_a_debt(desk: Desk) -> None:
    made = late(desk)
    desk.handover.arrived(made.round, None)
    assert desk.handover.owes
    assert not desk.handover.waits


def test_an_average_that_comes_after_a_state_was_taken_changes_nothing(desk: Desk) -> None:
    made = late(desk)
    desk.handover.adopted(made.head)
    desk.handover.arrived(made.round, AVERAGE)
    desk.handover.arrived(made.round, None)
    assert not desk.handover.owes
    assert not desk.handover.waits
    assert desk.handover.next_step(ROOT) is None


# ---------------------------------------------------------------------- gradients that go to another peer


def test_who_hands_over_gives_nothing_to_rounds_and_is_not_waited_for(desk: Desk) -> None:
    desk.add(8)
    assert desk.handover.samples == 8
    desk.handover.hands_over = True
    assert desk.handover.samples == 0
    assert not desk.handover.carries
    desk.pace.begin_batch(0.0)
    assert desk.handover.called(1.0) == 1.0
    assert desk.handover.give().offer.contribution is None
    parcel = desk.handover.hand_over(0.1)
    assert parcel is not None
    assert parcel.samples == 8
    desk.handover.handed_over("other", parcel, Outcome.TAKEN, 0.5)
    (handed,) = desk.handover.take_handed()
    assert (handed.to, handed.samples, handed.outcome, handed.duration_s) == ("other", 8, Outcome.TAKEN, 0.5)
    assert not desk.handover.take_handed()


def test_what_the_line_is_too_slow_for_is_dropped_at_once_and_told_once(desk: Desk) -> None:
    """As soon as it is known, so that what follows is young enough; and not batch by batch."""
    desk.commit()
    desk.pace.step(8, time.monotonic(), mine=0, others=1)
    desk.pace.step(8, time.monotonic() + 10.0, mine=0, others=1)
    desk.add(8)
    parcel = desk.handover.hand_over(0.0)
    assert parcel is not None
    for _ in range(3):
        desk.add(4)
        desk.handover.hands_over_in(10.0, 10.0)
    desk.add(2)
    desk.handover.hands_over_in(0.0, 1.0)
    assert desk.gradients.samples == 2
    assert not desk.handover.take_handed()
    desk.handover.handed_over("other", parcel, Outcome.TAKEN, 0.5)
    assert [(one.samples, one.outcome) for one in desk.handover.take_handed() if isinstance(one, Handed)] == [
        (12, Outcome.TOO_OLD),
        (8, Outcome.TAKEN),
    ]
    assert desk.handover.take_lost() == (0, 0)


def test_who_has_not_the_swarms_state_neither_hands_over_nor_carries(desk: Desk) -> None:
    desk.add(8)
    desk.pace.step(8, time.monotonic(), mine=8, others=1)
    desk.handover.owe()
    assert desk.handover.can_hand_over, "once it has it: its samples are not for rounds in between"
    assert desk.handover.hand_over(0.1) is None
    assert not desk.handover.carries
    assert not Desk(gives=False).handover.carries


def test_who_carries_anothers_gradient_tells_of_it(desk: Desk) -> None:
    desk.add(8)
    parcel = Parcel(torch.ones(desk.gradients.whole), 4, 0, 1)
    assert desk.handover.carry("slow", parcel)
    (received,) = desk.handover.take_handed()
    assert received == Received("slow", 4)
    assert not desk.handover.carry("slow", Parcel(parcel.values, 4, -100, -99))
    assert not desk.handover.take_handed(), "it is too old"
    assert desk.give().samples == 12


def test_what_comes_back_is_given_to_rounds_again(desk: Desk) -> None:
    desk.add(8)
    parcel = desk.handover.hand_over(0.1)
    assert parcel is not None
    desk.handover.handed_over("other", parcel, Outcome.BACK, 0.5)
    assert not desk.handover.take_handed()
    assert desk.give().samples == 8


@pytest.mark.parametrize(("last_step", "last"), [(-1, False), (1, True), (2, False)])
def test_the_last_step_of_a_run_is_one_for_which_all_wait(desk: Desk, last_step: int, last: bool) -> None:
    handover = Handover("me", desk.gradients, desk.pace, reduces=True, gives=True, last_step=lambda: last_step)
    handover.adopted(ROOT)
    assert handover.give().offer.last is last
