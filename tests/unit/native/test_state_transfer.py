"""A state on its way from several donors to a peer that joins, over a post office of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state import download, ranges
from lightning_hivemind.engine.native.state import relay as relay_module
from lightning_hivemind.engine.native.state.download import MOST_AT_ONCE, MOST_DONORS, WINDOW
from lightning_hivemind.engine.native.state.questions import Question, WantsDescription, WantsRange
from lightning_hivemind.engine.native.state.relay import Relay
from lightning_hivemind.engine.native.state.snapshot import (
    MAX_DESCRIPTION_BYTES,
    Description,
    Snapshot,
    read_description,
    take_state,
)
from lightning_hivemind.engine.native.trail import Trail
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.errors import StateError
from swarm.post_office import (
    RANGE_BYTES,
    RANGES,
    SILENCE_S,
    STATE_BYTES,
    Office,
    honest,
    mute,
    optimizer,
    read,
    snapshot,
)
from swarm.town import wait_for


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", RANGE_BYTES)


@pytest.fixture
def office() -> Iterator[Office]:
    before = set(threading.enumerate())
    place = Office()
    yield place
    place.close()
    wait_for(lambda: set(threading.enumerate()) <= before, "the threads have ended")


# ---------------------------------------------------------------------- all is well


def test_a_state_arrives_whole_and_is_the_donors(office: Office) -> None:
    source = snapshot(1)
    office.add("a", source)
    found = office.fetch()
    assert found is not None
    description, memory = found
    assert torch.equal(memory, source.content.copy())
    assert (description.head, description.size) == (source.head, STATE_BYTES)
    assert office.ranges_of() == {"a": RANGES}


def test_a_state_that_is_here_is_not_sent_again(office: Office) -> None:
    source = snapshot(1)
    office.add("a", source)
    found = office.fetch(known=(source.head, source.digest))
    assert found is not None
    assert (found[0].head, found[1].numel()) == (source.head, 0)
    assert not office.ranges_of()
    another = replace(source.head, epoch=source.head.epoch + 1)  # after a step that changed no parameter
    found = office.fetch(known=(another, source.digest))
    assert found is not None
    assert torch.equal(found[1], source.content.copy())


def test_where_one_is_quick_enough_nobody_else_is_asked(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "STAGGER_S", 60.0)
    for name in "abc":
        office.add(name, snapshot(1))
    assert office.fetch() is not None
    assert {name for name, _ in office.asked} == {"a"}


def test_where_one_will_soon_have_sent_everything_nobody_else_is_asked(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To describe its state costs a peer time, on the processors of which it computes."""
    monkeypatch.setattr(download, "STAGGER_S", 1.5)
    monkeypatch.setattr(download, "WORTH_S", 60.0)
    office.downloads._silence_s = 60.0
    for name in "abc":
        office.add_rogue(name, honest(name, snapshot(1), instead=lambda _: time.sleep(0.1)))
    assert office.fetch("a", "b", "c", timeout_s=30.0) is not None
    assert set(office.ranges_of()) == {"a"}


def test_where_one_that_was_quick_is_slow_now_another_is_asked(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "STAGGER_S", 0.5)
    office.downloads._silence_s = 60.0
    stuck = threading.Event()

    def is_slow(number: int) -> None:
        if number < RANGES // 2:  # they are asked for from the end
            stuck.wait(60)

    office.add_rogue("a", honest("a", snapshot(1), instead=is_slow))
    office.add("b", snapshot(1))
    found: list[tuple[Description, torch.Tensor] | None] = []
    thread = threading.Thread(target=lambda: found.append(office.fetch("a", "b", timeout_s=30.0)))
    thread.start()
    wait_for(lambda: office.ranges_of()["b"] > 0, "another is asked")
    stuck.set()
    thread.join()
    assert found[0] is not None
    assert torch.equal(found[0][1], snapshot(1).content.copy())


def slowly(number: int) -> None:
    time.sleep(0.03)


def test_donors_that_have_the_same_bytes_share_the_work(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "STAGGER_S", 0.0)
    monkeypatch.setattr(download, "WORTH_S", 0.0)
    for name in "abc":
        office.add_rogue(name, honest(name, snapshot(1), instead=slowly))
    found = office.fetch()
    assert found is not None
    assert torch.equal(found[1], snapshot(1).content.copy())
    shares = office.ranges_of()
    assert sum(shares.values()) == RANGES, "a range was asked for twice"
    assert all(shares[name] >= WINDOW for name in "abc")


@pytest.mark.parametrize(("soon_s", "most"), [(60.0, MOST_AT_ONCE), (0.0, WINDOW)], ids=["quick", "slow"])
def test_who_is_quick_is_asked_for_more_at_a_time(
    office: Office, monkeypatch: pytest.MonkeyPatch, soon_s: float, most: int
) -> None:
    """A slow one would still be sending them when all others have nothing left to send."""
    monkeypatch.setattr(download, "SOON_S", soon_s)
    at_once: list[int] = []

    def count(number: int) -> None:
        time.sleep(0.01)  # it is being asked
        at_once.append(office.ranges_of()["a"] - len(at_once))

    office.add_rogue("a", honest("a", snapshot(1), instead=count))
    assert office.fetch() is not None
    assert max(at_once) == most


def test_one_after_the_other(office: Office) -> None:
    states = [snapshot(1), snapshot(2)]
    office.add("a", lambda known: states.pop(0))
    for seed in (1, 2):
        found = office.fetch()
        assert found is not None
        assert torch.equal(found[1], snapshot(seed).content.copy())


def test_a_state_that_is_not_enough_is_not_taken_where_another_is(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PATIENCE_S", 10.0)
    office.add("a", snapshot(1, samples=100))
    office.add("b", snapshot(1, samples=100))
    office.add("c", snapshot(2, samples=101))
    found = office.fetch(enough=lambda head: head.samples > 100)
    assert found is not None
    assert torch.equal(found[1], snapshot(2).content.copy())
    assert set(office.ranges_of()) == {"c"}


def test_where_none_is_enough_the_one_of_most_samples_is_taken(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PATIENCE_S", 10.0)
    for name, samples in zip("abc", (100, 102, 101), strict=True):
        office.add(name, snapshot(samples, samples=samples))
    found = office.fetch(enough=lambda head: head.samples > 200)
    assert found is not None
    assert torch.equal(found[1], snapshot(102).content.copy())
    assert set(office.ranges_of()) == {"b"}


def test_a_state_from_which_the_swarm_has_gone_on_is_not_fetched_to_the_end(office: Office) -> None:
    """It would be of no use: this peer has not been in the step that leads on from it."""
    now = [snapshot(1, samples=100)]
    served: list[int] = []

    def goes_on(office: Office, download: bytes, question: Question) -> None:
        if isinstance(question, WantsRange):
            served.append(question.number)
            if len(served) == WINDOW:
                now[0] = snapshot(2, samples=200)
        source = now[0] if isinstance(question, WantsDescription) else found_in[question.digest]
        honest("a", source, instead=slowly)(office, download, question)

    found_in = {one.digest: one for one in (snapshot(1, samples=100), snapshot(2, samples=200))}
    office.add_rogue("a", goes_on)
    found = office.fetch(enough=lambda head: head == now[0].head)
    assert found is not None
    assert torch.equal(found[1], snapshot(2).content.copy())
    assert WINDOW <= len(served) - RANGES < RANGES


def test_one_that_is_enough_and_comes_late_is_taken_instead_of_one_that_is_not(office: Office) -> None:
    """To copy a large state takes longer than others are waited for."""
    go_on = threading.Event()

    def late(known: Snapshot | None) -> Snapshot:
        assert go_on.wait(10)
        return snapshot(2, samples=101)

    def first(number: int) -> None:
        go_on.set()
        time.sleep(0.05)

    office.add_rogue("a", honest("a", snapshot(1, samples=100), instead=first))
    office.add("b", late)
    found = office.fetch(enough=lambda head: head.samples > 100)
    assert found is not None
    assert torch.equal(found[1], snapshot(2).content.copy())


def test_what_is_a_donor_s_own_comes_from_it_alone(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two donors with other masks: a mask must not be put together of both."""
    monkeypatch.setattr(download, "STAGGER_S", 0.0)
    monkeypatch.setattr(download, "WORTH_S", 0.0)
    plain, elements = optimizer(0), 8 * RANGE_BYTES // 4
    states = {
        name: take_state(plain, [], [torch.full((elements,), value)], Trail(snapshot(1).head)).described()
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    for name, state in states.items():
        office.add_rogue(name, honest(name, state, instead=slowly))

    def reader(data: memoryview) -> Description:
        return read_description(data, plain, [], [torch.zeros(elements)])

    found = office.downloads.fetch(lambda: ["a", "b"], reader, 10.0, lambda: False, enough=lambda head: True)
    assert found is not None
    assert any(torch.equal(found[1], state.content.copy()) for state in states.values())
    assert min(office.ranges_of().values()) >= WINDOW, "both have what is shared"


def is_silent(office: Office, download: bytes, question: Question) -> None:
    """It is frozen, or as good as dead."""


def test_while_those_that_were_known_first_say_nothing_another_is_asked_that_is_known_by_then(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of the dead live on for a while, and where all but one are dead that one must not wait to be asked."""
    monkeypatch.setattr(download, "STAGGER_S", 0.02)
    gone = [f"gone {number}" for number in range(2 * MOST_DONORS)]
    for name in gone:
        office.add_rogue(name, is_silent)
    office.add("z", snapshot(1))
    known = iter([gone] * 30)
    fetch = office.downloads.fetch
    assert fetch(lambda: next(known, [*gone, "z"]), read, 60.0, lambda: False, enough=lambda head: True) is not None
    assert [name for name, question in office.asked if isinstance(question, WantsDescription)] == [*gone, "z"]


def test_who_had_nothing_yet_is_asked_again_while_another_one_is_silent(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was catching up itself."""
    monkeypatch.setattr(download, "STAGGER_S", 0.05)
    states = iter([None, None, snapshot(1)])
    office.add("late", lambda known: next(states))
    office.add_rogue("frozen", is_silent)
    assert office.fetch("late", "frozen", timeout_s=60.0) is not None
    assert [name for name, _ in office.asked].count("frozen") <= 2  # asked, and told at the end


def test_a_slow_download_has_not_everybody_describe_another_state(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing in common with this one, so more were asked, and all made a copy of no use."""
    monkeypatch.setattr(download, "STAGGER_S", 0.0)
    monkeypatch.setattr(download, "WORTH_S", 0.0)
    office.add_rogue("slow", honest("slow", snapshot(1), instead=slowly))
    others = [f"other {number}" for number in range(3 * MOST_DONORS)]
    for number, name in enumerate(others):
        office.add(name, snapshot(2 + number, samples=200))
    fetched = office.fetch("slow", *others)
    assert fetched is not None
    assert len({name for name, _ in office.asked}) <= 2 * MOST_DONORS


def test_one_that_would_do_is_fetched_though_another_has_more_samples(office: Office) -> None:
    """On another lineage. It began anew without end."""
    office.add("fork", snapshot(1, samples=200))
    office.add("good", snapshot(2, samples=100))
    found = office.fetch(enough=lambda head: head.samples == 100)
    assert found is not None
    assert found[0].head.samples == 100
    assert len([one for _, one in office.asked if isinstance(one, WantsDescription)]) == 2


def test_no_more_donors_than_are_of_use_make_a_copy(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none has what is wanted, as when all of many are asked at once just after a step."""
    monkeypatch.setattr(download, "STAGGER_S", 0.02)
    monkeypatch.setattr(download, "PATIENCE_S", 0.3)
    for number in range(3 * MOST_DONORS):
        office.add(f"{number}", snapshot(1, samples=100))
    assert office.fetch(enough=lambda head: head.samples > 100) is not None
    assert len({name for name, _ in office.asked}) == MOST_DONORS


# ---------------------------------------------------------------------- donors that have nothing, or something else


def test_nobody_has_a_state(office: Office) -> None:
    office.add("a", None)
    office.add("b", None)
    start = time.monotonic()
    assert office.fetch(timeout_s=60.0) is None
    assert time.monotonic() - start < 30.0


def test_one_has_none_and_another_has(office: Office) -> None:
    office.add("a", None)
    office.add("b", snapshot(1))
    assert office.fetch() is not None
    assert set(office.ranges_of()) == {"b"}


def test_a_state_that_cannot_be_copied_is_none(office: Office) -> None:
    def fails(known: Snapshot | None) -> Snapshot | None:
        raise StateError("this optimizer keeps strange things")

    office.add("a", fails)
    assert office.fetch() is None
    assert office.fetch() is None, "the donor has ended"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_that_fails_otherwise_is_none_and_the_next_one_is_given(office: Office) -> None:
    failures = [RuntimeError("out of memory")]

    def fails_once(known: Snapshot | None) -> Snapshot | None:
        if failures:
            raise failures.pop()
        return snapshot(1)

    office.add("a", fails_once)
    assert office.fetch() is None
    assert office.fetch() is not None


def test_a_state_that_does_not_fit_is_passed_over(office: Office) -> None:
    office.add("a", snapshot(1, samples=999, elements=7))
    office.add("b", snapshot(1))
    found = office.fetch()
    assert found is not None
    assert set(office.ranges_of()) == {"b"}


def test_only_states_that_do_not_fit(office: Office) -> None:
    office.add("a", snapshot(1, elements=7))
    start = time.monotonic()
    with pytest.raises(StateError, match="must train the same model"):
        office.fetch(timeout_s=60.0)
    assert time.monotonic() - start < 30.0


def test_bytes_that_are_not_those_of_the_description(office: Office) -> None:
    office.add_rogue("a", honest("a", snapshot(1), instead=lambda n: bytes(RANGE_BYTES) if n == 3 else None))
    with pytest.raises(StateError, match="not the one that they described"):
        office.fetch()
    office.add("b", snapshot(1))
    found = office.fetch("a", "b")
    assert found is not None
    assert torch.equal(found[1], snapshot(1).content.copy())


def test_an_answer_of_another_length_is_refused_and_the_range_comes_from_another(office: Office) -> None:
    office.add_rogue("a", honest("a", snapshot(1), instead=lambda n: bytes(RANGE_BYTES + 1)))
    office.add("b", snapshot(1))
    found = office.fetch()
    assert found is not None
    assert torch.equal(found[1], snapshot(1).content.copy())
    sizes = [STATE_BYTES % RANGE_BYTES, *[RANGE_BYTES] * (WINDOW - 1)]  # the last range is asked for first
    assert office.refused == [f"{RANGE_BYTES + 1} bytes of a state, {size} were asked for" for size in sizes]


def test_ranges_that_nobody_asked_for_pass_by(office: Office) -> None:
    good = honest("a", snapshot(1))
    unasked = (RANGES - 1, RANGES, 2**32 - 2)

    def pushy(office: Office, download: bytes, question: Question) -> None:
        good(office, download, question)
        if question == WantsDescription() or question == WantsRange(snapshot(1).digest, 0):
            for number in unasked:
                office.answer("a", download, 1 + number, b"?" * RANGE_BYTES)

    office.add_rogue("a", pushy)
    found = office.fetch()
    assert found is not None
    assert torch.equal(found[1], snapshot(1).content.copy())
    assert office.passed_by == 2 * len(unasked)


def test_who_was_not_asked_is_not_heard(office: Office) -> None:
    def speaks_for_another(office: Office, download: bytes, question: Question) -> None:
        office.answer("b", download, 0, snapshot(2, samples=999).description)

    office.add_rogue("a", speaks_for_another)
    office.add("b", snapshot(2))
    assert office.fetch("a", timeout_s=0.5) is None
    assert office.passed_by == 1


def test_a_description_that_is_too_long_is_refused_before_it_is_read(office: Office) -> None:
    length = MAX_DESCRIPTION_BYTES + 1

    def endless(office: Office, download: bytes, question: Question) -> None:
        office.bring("a", Header(kind=Kind.STATE, round=download, length=length), b"it begins")

    office.add_rogue("a", endless)
    office.add("b", snapshot(1))
    assert office.fetch() is not None
    assert office.refused == [f"a description of {length} bytes; at most {MAX_DESCRIPTION_BYTES} are read"]


# ---------------------------------------------------------------------- donors that go


@pytest.mark.parametrize("how", ["dies", "falls silent"])
def test_a_donor_that_goes_half_way_is_replaced_by_the_others(office: Office, how: str) -> None:
    served: list[int] = []

    def goes(number: int) -> bytes | None:
        served.append(number)
        if len(served) < WINDOW:
            return None
        if how == "dies":
            office.kill("a")
        return b""

    office.add_rogue("a", honest("a", snapshot(1), instead=goes))
    office.add("b", snapshot(1))
    found = office.fetch()
    assert found is not None
    assert torch.equal(found[1], snapshot(1).content.copy())
    assert sum(office.ranges_of().values()) > RANGES, "nothing had to be asked for again"


def test_a_range_that_is_lost_with_its_connection_is_asked_for_again_while_rounds_go_on(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its donor is not silent: chunks of rounds come from it."""
    monkeypatch.setattr(download, "ASK_AGAIN_S", 0.3)
    lost: list[int] = []

    def loses_one(number: int) -> bytes | None:
        if lost:
            return None
        lost.append(number)
        return b""

    over = threading.Event()

    def rounds() -> None:
        while not over.wait(0.02):
            office.downloads.moved("a", Header(kind=Kind.RESULT, round=b"r" * 16, length=1))

    office.add_rogue("a", honest("a", snapshot(1), instead=loses_one))
    busy = threading.Thread(target=rounds)
    busy.start()
    try:
        found = office.fetch(timeout_s=20.0)
    finally:
        over.set()
        busy.join()
    assert found is not None
    assert torch.equal(found[1], snapshot(1).content.copy())
    assert lost


@pytest.mark.parametrize("how", ["dies", "falls silent"])
def test_the_only_donor_goes_half_way(office: Office, how: str) -> None:
    def goes(number: int) -> bytes | None:
        if number == 5 and how == "dies":
            office.kill("a")
        return b"" if number >= 5 else None

    office.add_rogue("a", honest("a", snapshot(1), instead=goes))
    start = time.monotonic()
    with pytest.raises(StateError, match="went on, or left"):
        office.fetch(timeout_s=60.0)
    assert time.monotonic() - start < 30.0


def test_a_donor_that_dies_before_it_has_said_anything(office: Office) -> None:
    office.add_rogue("a", lambda office, download, question: office.kill("a"))
    assert office.fetch() is None


def test_who_does_not_describe_its_state_is_not_waited_for_when_another_has(office: Office) -> None:
    office.add_rogue("a", mute)
    office.add("b", snapshot(1))
    assert office.fetch() is not None
    assert set(office.ranges_of()) == {"b"}


def test_a_donor_that_says_nothing_at_all_is_not_waited_for(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "DESCRIPTION_S", 0.3)
    office.add_rogue("a", mute)
    start = time.monotonic()
    assert office.fetch(timeout_s=60.0) is None
    assert time.monotonic() - start < 30.0


def test_time_is_up(office: Office) -> None:
    office.add_rogue("a", mute)
    start = time.monotonic()
    assert office.fetch(timeout_s=0.2) is None
    assert time.monotonic() - start < 30.0


def test_a_donor_that_only_trickles_is_waited_for_no_longer_than_any(office: Office) -> None:
    """It is never silent, and never done."""
    over = threading.Event()

    def trickles(office: Office, download: bytes, question: Question) -> None:
        if isinstance(question, WantsDescription):
            office.answer("a", download, 0, snapshot(1).description)
            return
        while not over.wait(SILENCE_S / 10):
            office.downloads.moved("a", Header(kind=Kind.STATE, round=download, chunk=1, length=RANGE_BYTES))

    office.add_rogue("a", trickles)
    start = time.monotonic()
    with pytest.raises(StateError, match="before it was here"):
        office.fetch(timeout_s=4 * SILENCE_S)
    over.set()
    assert 4 * SILENCE_S <= time.monotonic() - start < 30.0, "it was taken for a silent one"


@pytest.mark.parametrize("described", [True, False])
def test_who_is_to_stop_stops_waiting(office: Office, described: bool) -> None:
    stop = threading.Event()

    def interrupts(office: Office, download: bytes, question: Question) -> None:
        if described and isinstance(question, WantsDescription):
            office.answer("a", download, 0, snapshot(1).description)
        else:
            stop.set()

    office.add_rogue("a", interrupts)
    start = time.monotonic()
    if described:
        with pytest.raises(StateError):
            office.downloads.fetch(lambda: ["a"], read, 60.0, stop.is_set, enough=lambda head: True)
    else:
        assert office.downloads.fetch(lambda: ["a"], read, 60.0, stop.is_set, enough=lambda head: True) is None
    assert time.monotonic() - start < 30.0


# ---------------------------------------------------------------------- states that go on


def test_a_state_that_has_moved_on_is_fetched_anew(office: Office) -> None:
    """Between the description and the ranges somebody else asks, and the donor copies its state of now."""
    moved: list[Snapshot] = [snapshot(1), snapshot(2, samples=200)]
    current: list[Snapshot | None] = [None]

    def moves(office: Office, download: bytes, question: Question) -> None:
        if isinstance(question, WantsDescription):
            current[0] = moved.pop(0) if moved else current[0]
        elif question.digest == snapshot(1).digest and question.number == 1:
            current[0] = moved.pop(0)
        source = current[0]
        assert source is not None
        if isinstance(question, WantsRange) and question.digest != source.digest:
            office.answer("a", download, 0, b"")
        else:
            honest("a", source)(office, download, question)

    office.add_rogue("a", moves)
    with pytest.raises(StateError, match="went on, or left"):
        office.fetch()
    found = office.fetch()
    assert found is not None
    assert torch.equal(found[1], snapshot(2).content.copy())
    assert found[0].head.samples == 200


def test_late_frames_of_the_download_before_change_nothing(office: Office) -> None:
    first: list[bytes] = []

    def late(office: Office, download: bytes, question: Question) -> None:
        if not first:
            first.append(download)
        if download == first[0]:
            return  # later
        if isinstance(question, WantsRange):
            office.answer("a", first[0], 1 + question.number, b"?" * RANGE_BYTES)
            office.answer("a", first[0], 0, b"")
        else:
            office.answer("a", first[0], 0, snapshot(3, samples=999).description)
        honest("a", snapshot(1))(office, download, question)

    office.add_rogue("a", late)
    assert office.fetch(timeout_s=0.05) is None
    found = office.fetch()
    assert found is not None
    assert torch.equal(found[1], snapshot(1).content.copy())
    assert office.passed_by == 1 + 2 * RANGES


def test_when_nothing_is_downloaded_nothing_is_taken(office: Office) -> None:
    assert office.downloads.room("a", Header(kind=Kind.STATE, chunk=1, length=10)) is None
    assert office.downloads.room("a", Header(kind=Kind.STATE, length=MAX_DESCRIPTION_BYTES + 1)) is None
    office.downloads.moved("a", Header(kind=Kind.STATE))
    office.downloads.arrived("a", Header(kind=Kind.STATE), memoryview(b""))
    office.downloads.lost("a")


# ---------------------------------------------------------------------- passed on by a helper


def test_a_helper_passes_on_the_state_of_a_peer_that_it_has_still_to_hear_of(office: Office) -> None:
    source, heard = snapshot(1), list[str]()
    office.add("a", source)
    relay = Relay(office.downloads, lambda: heard, lambda: source.head, read, lambda: False, 600.0)
    threading.Timer(0.3, lambda: heard.append("a")).start()
    copy = relay.copy(None)
    assert copy is not None
    assert (copy.head, copy.digest, bytes(copy.description)) == (source.head, source.digest, bytes(source.description))
    assert torch.equal(copy.content.copy(), source.content.copy())
    assert relay.copy(copy) is copy
    assert office.ranges_of() == {"a": RANGES}


def test_a_helper_passes_on_a_state_though_the_swarm_makes_steps_meanwhile(office: Office) -> None:
    """Whoever asked takes part in them, and needs the state from which they lead on."""
    source, epochs = snapshot(1), iter(range(1, 1000))
    office.add_rogue("a", honest("a", source, instead=slowly))

    def goes_on() -> Head:
        return replace(source.head, epoch=next(epochs))

    relay = Relay(office.downloads, lambda: ["a"], goes_on, read, lambda: False, 600.0)
    copy = relay.copy(None)
    assert copy is not None
    assert torch.equal(copy.content.copy(), source.content.copy())
    assert office.ranges_of() == {"a": RANGES}


@pytest.mark.parametrize("stops", [False, True])
def test_a_helper_in_a_swarm_without_a_state_says_so(
    office: Office, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(relay_module, "HEARS_S", 100.0 if stops else 0.2)
    relay = Relay(office.downloads, list, lambda: None, read, lambda: stops, 600.0)
    assert relay.copy(None) is None
