"""The giving side alone: when it copies, whom it answers, and that what it sends stays as it is. And over sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_hivemind.engine.native.codecs import Exact
from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.handover import Handover
from lightning_hivemind.engine.native.layout import layout_of
from lightning_hivemind.engine.native.pace import Pace
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.state import donor as donor_module
from lightning_hivemind.engine.native.state import download
from lightning_hivemind.engine.native.state.donor import Donor
from lightning_hivemind.engine.native.state.download import Downloads
from lightning_hivemind.engine.native.state.questions import Done, WantsDescription, WantsRange
from lightning_hivemind.engine.native.state.ranges import RANGE_BYTES
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.state.snapshot import Snapshot, install, read_description, take_state
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.trail import Trail
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.sink import Payload
from swarm.town import Town, wait_for

FIRST, SECOND = b"1" * 16, b"2" * 16


def optimizer(seed: int, elements: int = 100) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    return torch.optim.SGD([torch.nn.Parameter(torch.randn(elements))], lr=0.1)


def snapshot(seed: int) -> Snapshot:
    return take_state(optimizer(seed), [], [], Trail(Head(epoch=seed, lineage=b"x" * 16, samples=100))).described()


class Giver:
    """A donor, and what it has sent. Its state is the next of ``states``; the last one stays."""

    def __init__(self, *states: Snapshot | None) -> None:
        self.states, self.sent = list(states), list[tuple[str, Header, bytes]]()
        self.known: list[Snapshot | None] = []
        self.forgotten = list[bytes]()
        self.donor = Donor(self._send, self._copy, self.forgotten.append)

    def _send(self, peer: str, header: Header, payload: Payload) -> None:
        self.sent.append((peer, header, b"".join(payload)))

    def _copy(self, known: Snapshot | None) -> Snapshot | None:
        self.known.append(known)
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def answers(self, count: int) -> list[tuple[str, bytes, int, bytes]]:
        """To whom, in which download, which number, what; once there are ``count``."""
        wait_for(lambda: len(self.sent) >= count, f"{count} answers")
        assert all(header.kind is Kind.STATE and header.length == len(data) for _, header, data in self.sent)
        return [(peer, header.round, header.chunk, data) for peer, header, data in self.sent]

    def hold(self) -> tuple[threading.Event, threading.Event]:
        """From now on a copy takes until the second of these is set; the first says that it has begun."""
        copying, go_on = threading.Event(), threading.Event()

        def slow(known: Snapshot | None) -> Snapshot | None:
            copying.set()
            assert go_on.wait(10)
            return self._copy(known)

        self.donor._make_copy = slow
        return copying, go_on


Give = Callable[..., Giver]


@pytest.fixture
def give() -> Iterator[Give]:
    before, givers = set(threading.enumerate()), list[Giver]()

    def make(*states: Snapshot | None) -> Giver:
        givers.append(Giver(*states))
        return givers[-1]

    yield make
    for giver in givers:
        giver.donor.stop()
    wait_for(lambda: set(threading.enumerate()) <= before, "the threads have ended")


def test_a_description_then_its_bytes(give: Give) -> None:
    state = snapshot(1)
    giver = give(state)
    giver.donor.asked("joiner", FIRST, WantsDescription())
    assert giver.answers(1) == [("joiner", FIRST, 0, state.description)]
    giver.donor.asked("joiner", FIRST, WantsRange(state.digest, 0))
    assert giver.answers(2)[1] == ("joiner", FIRST, 1, bytes(state.content.copy().numpy()))


def copies_of(state: Snapshot, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with each that is made."""
    made: list[object] = []
    make = state.content._make_copy
    monkeypatch.setattr(state.content, "_make_copy", lambda: made.append(None) or make())
    return made


def test_what_is_fetched_is_copied_when_a_step_is_due(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    state, due = snapshot(1), threading.Event()
    copies, giver = copies_of(state, monkeypatch), give(state)
    giver.donor._changes = due.is_set
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(1)
    assert state.content.is_at_risk
    due.set()
    wait_for(lambda: not state.content.is_at_risk, "a copy")
    state.content.change()
    giver.donor.asked("joiner", FIRST, WantsRange(state.key, 0))
    assert giver.answers(2)[1] == ("joiner", FIRST, 1, bytes(state.content.copy().numpy()))
    assert copies


def test_what_nobody_fetches_any_more_is_not_copied(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    state = snapshot(1)
    copies, looks, giver = copies_of(state, monkeypatch), list[None](), give(state)
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(1)
    giver.donor.asked("joiner", FIRST, Done())
    giver.donor._changes = lambda: looks.append(None) is None
    giver.donor.asked("another", SECOND, WantsRange(state.key, 9))  # which there is not: but the copy is wanted
    wait_for(lambda: bool(copies), "a copy for who has come back")
    assert looks
    made = len(copies)
    other = snapshot(2)
    more = copies_of(other, monkeypatch)
    giver.states[:] = [other]
    giver.donor._changes = lambda: False
    giver.donor.asked("another", SECOND, WantsDescription())
    giver.answers(3)
    giver.donor.asked("another", SECOND, Done())
    other.content.change()
    assert other.content.gone
    assert (len(copies), more) == (made, [])


def test_who_asks_for_what_is_gone_has_to_begin_anew(give: Give) -> None:
    state = snapshot(1)
    giver = give(state)
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(1)
    giver.donor.asked("joiner", FIRST, Done())
    state.content.change()
    giver.donor.asked("another", SECOND, WantsRange(state.key, 0))
    assert giver.answers(2)[1] == ("another", SECOND, 0, b"")


@pytest.mark.parametrize("number", [1, 2**64 - 1])
def test_a_range_that_is_not_there(give: Give, number: int) -> None:
    giver = give(snapshot(1))
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(1)
    giver.donor.asked("joiner", FIRST, WantsRange(snapshot(1).digest, number))
    assert giver.answers(2)[1] == ("joiner", FIRST, 0, b"")


def test_a_range_of_another_state_or_of_none(give: Give) -> None:
    giver = give(snapshot(1))
    giver.donor.asked("joiner", FIRST, WantsRange(snapshot(1).digest, 0))
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(2)
    giver.donor.asked("joiner", FIRST, WantsRange(snapshot(2).digest, 0))
    assert [answer[2:] for answer in giver.answers(3)] == [(0, b""), (0, snapshot(1).description), (0, b"")]


def test_who_has_no_state_says_so(give: Give) -> None:
    giver = give(None)
    giver.donor.asked("joiner", FIRST, WantsDescription())
    assert giver.answers(1) == [("joiner", FIRST, 0, b"")]


def test_the_copy_that_is_there_is_offered_again(give: Give) -> None:
    """Whether it is still right is for the one who copies to say."""
    first, second = snapshot(1), snapshot(2)
    giver = give(first, second)
    for number in (1, 2):
        giver.donor.asked("joiner", FIRST, WantsDescription())
        giver.answers(number)
    assert [one is state for one, state in zip(giver.known, (None, first), strict=True)] == [True, True]
    assert giver.sent[1][2] == second.description


def test_a_copy_that_nobody_asks_for_is_dropped(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_module, "KEPT_S", 0.05)
    giver = give(snapshot(1))
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(1)

    def gone() -> bool:
        count = len(giver.sent)
        giver.donor.asked("joiner", FIRST, WantsDescription())
        giver.answers(count + 1)
        threading.Event().wait(0.2)
        return giver.known[-1] is None and len(giver.known) > 1

    wait_for(gone, "the copy is dropped")


def test_of_two_downloads_of_one_peer_the_later_is_answered(give: Give) -> None:
    giver = give(snapshot(1))
    copying, go_on = giver.hold()
    giver.donor.asked("another", FIRST, WantsDescription())
    assert copying.wait(10)
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.donor.asked("joiner", SECOND, WantsDescription())
    giver.donor.asked("gone", FIRST, WantsDescription())
    giver.donor.lost("gone")
    go_on.set()
    assert [answer[:2] for answer in giver.answers(2)] == [("another", FIRST), ("joiner", SECOND)]


def test_who_joins_next_does_not_end_the_download_of_another(give: Give) -> None:
    """Where a download takes longer than a step, two that join at once would begin anew for ever."""
    giver = give(snapshot(1), snapshot(2))
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(1)
    giver.donor.asked("next", SECOND, WantsDescription())
    giver.answers(2)
    giver.donor.asked("joiner", FIRST, WantsRange(snapshot(1).digest, 0))
    assert giver.answers(3)[2] == ("joiner", FIRST, 1, bytes(snapshot(1).content.copy().numpy()))


def test_while_all_copies_are_read_who_asks_next_waits_and_then_the_one_that_nobody_reads_makes_room(
    give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_module, "IN_USE_S", 100.0)
    giver = give(snapshot(1), snapshot(2), snapshot(3))
    for count, peer in enumerate(("first", "second"), start=1):
        giver.donor.asked(peer, FIRST, WantsDescription())
        giver.answers(count)
    giver.donor.asked("third", SECOND, WantsDescription())
    giver.donor.asked("first", FIRST, WantsRange(snapshot(1).digest, 0))
    assert [answer[0] for answer in giver.answers(3)] == ["first", "second", "first"]
    assert len(giver.known) == 2, "no third copy yet"
    monkeypatch.setattr(donor_module, "IN_USE_S", 0.0)
    giver.donor.asked("third", SECOND, WantsDescription())
    assert giver.answers(4)[3] == ("third", SECOND, 0, snapshot(3).description)
    giver.donor.asked("first", FIRST, WantsRange(snapshot(1).digest, 0))
    assert giver.answers(5)[4] == ("first", FIRST, 1, bytes(snapshot(1).content.copy().numpy()))


def test_a_range_that_is_asked_for_while_a_third_copy_is_made_ends_nothing(
    give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader on a slow line that was taken for one that has gone."""
    monkeypatch.setattr(donor_module, "IN_USE_S", 0.0)
    giver = give(snapshot(1), snapshot(2), snapshot(3))
    plain = giver._copy

    def copy(known: Snapshot | None) -> Snapshot | None:
        if len(giver.known) == 2:
            monkeypatch.setattr(donor_module, "IN_USE_S", 100.0)
            for number, peer in enumerate(("first", "second"), start=1):
                giver.donor.asked(peer, FIRST, WantsRange(snapshot(number).digest, 0))
        return plain(known)

    giver.donor._make_copy = copy
    for count, peer in enumerate(("first", "second"), start=1):
        giver.donor.asked(peer, FIRST, WantsDescription())
        giver.answers(count)
    giver.donor.asked("third", FIRST, WantsDescription())
    assert giver.answers(5)[4] == ("third", FIRST, 0, snapshot(3).description)
    giver.donor.asked("second", FIRST, WantsRange(snapshot(2).digest, 0))
    giver.donor.asked("first", FIRST, WantsRange(snapshot(1).digest, 0))
    assert [answer[2] for answer in giver.answers(7)[5:]] == [1, 0], "the oldest copy has made room"
    giver.donor.asked("third", FIRST, Done())
    giver.donor.asked("first", SECOND, WantsDescription())
    assert giver.answers(8)[7][:2] == ("first", SECOND), "its thread lives"


def test_who_asks_again_while_its_copy_is_made_gets_that_copy(give: Give) -> None:
    """A copy may take longer than a question is waited for; the next copy would, too."""
    giver = give(snapshot(1), snapshot(2))
    copying, go_on = giver.hold()
    giver.donor.asked("joiner", FIRST, WantsDescription())
    assert copying.wait(10)
    giver.donor.asked("joiner", FIRST, WantsDescription())
    go_on.set()
    assert giver.answers(1) == [("joiner", FIRST, 0, snapshot(1).description)]


def test_done_is_said_of_one_download(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said on an old connection, it may come after the next download has begun on a new one."""
    giver = give(snapshot(1))
    copying, go_on = giver.hold()
    giver.donor.asked("another", FIRST, WantsDescription())
    assert copying.wait(10)
    giver.donor.asked("another", FIRST, Done())  # while its copy is made
    giver.donor.asked("joiner", SECOND, WantsDescription())
    giver.donor.asked("joiner", FIRST, Done())
    go_on.set()
    assert [answer[:2] for answer in giver.answers(1)] == [("joiner", SECOND)]
    assert [one[:2] for one in giver.donor._readers.values()] == [(snapshot(1).digest, SECOND)]


@pytest.mark.parametrize("how", ["done", "asks anew", "gone"])
def test_who_has_done_makes_room_at_once(give: Give, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Where steps take a fraction of a second, a peer that waited would be many behind when it has its state."""
    monkeypatch.setattr(donor_module, "IN_USE_S", 100.0)
    giver = give(snapshot(1), snapshot(2), snapshot(3))
    for count, peer in enumerate(("first", "second"), start=1):
        giver.donor.asked(peer, FIRST, WantsDescription())
        giver.answers(count)
    if how == "done":
        giver.donor.asked("first", FIRST, Done())
    elif how == "gone":
        giver.donor.lost("first")
    giver.donor.asked("first" if how == "asks anew" else "third", SECOND, WantsDescription())
    assert giver.answers(3)[2][1:] == (SECOND, 0, snapshot(3).description)
    giver.donor.asked("second", FIRST, WantsRange(snapshot(2).digest, 0))
    assert giver.answers(4)[3] == ("second", FIRST, 1, bytes(snapshot(2).content.copy().numpy()))


@pytest.mark.parametrize("how", ["done", "asks anew", "gone"])
def test_what_waits_to_be_sent_of_a_download_that_has_ended_is_forgotten(give: Give, how: str) -> None:
    """Else, on a slow line, it delays the next one until that is given up, too, and keeps the copy in memory."""
    giver = give(snapshot(1))
    giver.donor.asked("joiner", FIRST, WantsDescription())
    giver.answers(1)
    giver.donor.asked("joiner", FIRST, WantsRange(snapshot(1).key, 0))
    assert not giver.forgotten
    if how == "done":
        giver.donor.asked("joiner", FIRST, Done())
    elif how == "gone":
        giver.donor.lost("joiner")
    else:
        giver.donor.asked("joiner", SECOND, WantsDescription())
    assert giver.forgotten == [FIRST]


# ---------------------------------------------------------------------- over sockets


class Inhabitant:
    """A peer of a town, with everything that takes part in handing over a state; no round is ever due."""

    def __init__(self, name: str, town: Town, state: Snapshot | None) -> None:
        gradients = Gradients(name, [], Statistics([]), max_staleness=1)
        handover = Handover(name, gradients, Pace(64, longest_s=1.0), reduces=True, gives=True)
        settings = Settings(run="run", target_samples=64, chunks=1)
        self.driver = Driver(Peer(settings, name, b"life"), handover, layout_of(1), [Exact()])
        links = town.add(name, self.driver)
        self.ranges = 0

        def send(peer: str, header: Header, payload: Payload = ()) -> None:
            if header.kind is Kind.STATE and header.chunk:
                self.ranges += 1
                time.sleep(0.1)  # else one has sent all before the other has described it
            links.send(peer, header, payload)

        self.donor, self.downloads = Donor(send, lambda known: state), Downloads(links.send, 10.0, StateMemory())
        self.driver.start(links, self.donor, self.downloads)

    def close(self) -> None:
        self.donor.stop()
        self.driver.stop(5.0)


@pytest.mark.parametrize("leaves", [False, True], ids=["all stay", "one leaves"])
@pytest.mark.parametrize("secure", [True, False], ids=["TLS", "in the clear"])
def test_over_sockets_a_state_comes_from_two_donors(
    secure: bool, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STAGGER_S", 0.0)
    monkeypatch.setattr(download, "WORTH_S", 0.0)
    before, town = set(threading.enumerate()), Town(secure=secure)
    elements = 5 * RANGE_BYTES // 4 + 17
    state = take_state(optimizer(1, elements), [], [], Trail(Head(epoch=1, lineage=b"x" * 16, samples=100))).described()
    joiner = optimizer(2, elements)
    donors = [Inhabitant(name, town, state) for name in ("a", "b")]
    new = Inhabitant("joiner", town, None)

    def read(data: memoryview) -> object:
        if leaves:
            donors[0].close()
        return read_description(data, joiner, [], [])

    try:
        found = new.downloads.fetch(lambda: ["a", "b"], read, 20.0, lambda: False, enough=lambda head: True)  # type: ignore[arg-type]
        assert found is not None
        description, memory = found
        assert torch.equal(memory, state.content.copy())
        assert all(donor.ranges for donor in donors[leaves:]), "one has sent all of it"
        install(description, memory, joiner, [], [])
        assert torch.equal(joiner.param_groups[0]["params"][0], optimizer(1, elements).param_groups[0]["params"][0])
    finally:
        for one in (*donors, new):
            one.close()
    wait_for(lambda: set(threading.enumerate()) <= before, "the threads have ended")
