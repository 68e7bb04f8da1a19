"""Whom a peer asks for a state, which one it takes, and how long that may last. Everything around it is made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hivemind.engine.native import catching_up
from lightning_hivemind.engine.native.catching_up import CatchingUp
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.state.snapshot import MisfitError
from lightning_hivemind.engine.native.trail import Undone
from lightning_hivemind.errors import StateError
from lightning_hivemind.events import Event, EventBus, FallingBehind, StateUnavailable, StepsUndone, Waiting


def head(samples: int, lineage: bytes = b"x") -> Head:
    return Head(epoch=samples // 32, lineage=lineage * 16, samples=samples)


HERE, GOAL = head(1568), head(1600)
DECIDED: list[object] = []
UNDONE = Undone(first=48, last=49, samples=64)


class Scene:
    """A peer that stands at ``HERE`` and owes the state of ``GOAL``; ``offers``: what each of the others has."""

    def __init__(
        self,
        offers: dict[str, Head | None],
        without: frozenset[str] = frozenset(),
        *,
        auxiliary: bool = False,
        helpers: frozenset[str] = frozenset(),
    ) -> None:
        self.offers, self.asked, self.installed, self.events = offers, [], [], list[Event]()
        self.goal = GOAL
        self.connected: frozenset[str] = frozenset()
        #: heads that were followed, when each download began
        self.followed_before: list[int] = []
        self.status = SimpleNamespace(head=GOAL, living=tuple(sorted(offers)), cut=(), clients=frozenset())
        self.followed: list[Head] = []
        driver = SimpleNamespace(status=self.status, adopt=lambda *_, **__: None, follow=self.follow)
        handover = SimpleNamespace(
            replaced=lambda: None,
            owe=lambda: None,
            settle=lambda found: found == self.goal,
            leads_on=lambda head: True,
            take_decided=lambda: DECIDED,
        )
        self.downloads = downloads = SimpleNamespace(fetch=self.fetch, share=0.5, memory=StateMemory(), overtaken=0)
        arguments = SimpleNamespace(load_state_timeout=600.0, auxiliary=auxiliary, client_mode=False)
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.peer = CatchingUp(
            arguments,  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                driver=driver, handover=handover, downloads=downloads, connected=lambda: self.connected
            ),
            SimpleNamespace(auxiliaries=sorted(helpers), trainers=set(offers) - helpers),  # type: ignore[arg-type]
            SimpleNamespace(without=without),  # type: ignore[arg-type]
            SimpleNamespace(should_abort=lambda: False),  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                read=lambda offer: SimpleNamespace(head=offer, digest=b"d"),
                adopt=self.adopt,
            ),
            bus,
        )

    def join(self, goal: Head) -> None:
        self.status.head = None
        self.peer.join(goal)

    def follow(self, head: Head) -> None:
        self.followed.append(head)
        self.status.head = head

    def adopt(self, description: Any, memory: Any, decided: object) -> Undone:
        assert decided is DECIDED
        self.installed.append(description.head)
        return UNDONE

    def fetch(self, asks: Callable[[], list[str]], read: Callable[[Any], Any], _: float, stops: Any, **__: Any) -> Any:
        self.asked.append(donors := asks())
        self.followed_before.append(len(self.followed))
        stops()
        for donor in donors:
            if self.offers[donor] is not None:
                return read(self.offers[donor]), None
        return None


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "NO_NEWS_S", "REPORT_S", "LONG_S"):
        monkeypatch.setattr(catching_up, name, 0.0)


def test_the_state_of_the_goal_is_taken() -> None:
    scene = Scene({"a": GOAL})
    assert scene.peer.run(HERE) == GOAL
    assert scene.installed == [GOAL]
    undone = [event for event in scene.events if isinstance(event, StepsUndone)]
    assert undone == [StepsUndone(time=undone[0].time, epoch=50, first=48, last=49, samples=64)]


def test_a_state_of_fewer_samples_than_this_peer_s_own_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who had waited for the same state, and has given it up, offers what it had before: a fresh model, say."""
    monkeypatch.setattr(catching_up, "NOBODY_S", 0.2)
    scene = Scene({"a": head(0, b"y")}, without=frozenset("a"))
    assert scene.peer.run(HERE) == HERE
    assert not scene.installed
    reasons = [event.reason for event in scene.events if isinstance(event, StateUnavailable)]
    assert "its state, of 0 samples, is older than that of this peer" in reasons
    assert reasons[-1] == "who had it has gone, and nobody that lives has it"


def test_why_no_state_comes_is_said_once_and_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "NOBODY_S", 2.0)
    monkeypatch.setattr(catching_up, "PAUSE_S", 0.05)
    scene = Scene({"a": head(0, b"y")}, without=frozenset("a"))
    scene.peer.run(HERE)
    *told, _ = [event for event in scene.events if isinstance(event, StateUnavailable)]
    # 0.1 s after the first one, 0.2 s after the second ...: asked some forty times in two seconds
    assert 2 <= len(told) <= 6
    assert {event.action for event in told} == {"trying again"}
    before = len(scene.events)
    scene.peer.settled()
    scene.peer.run(HERE)
    *again, _ = [event for event in scene.events[before:] if isinstance(event, StateUnavailable)]
    assert len(again) >= 2, "of another state that it waits for it is said anew"


@pytest.mark.parametrize(("makes", "told"), [(0, [3, 6]), (2, [3, 6]), (3, [])])
def test_who_takes_one_state_after_another_is_told_that_its_line_is_too_slow(makes: int, told: list[int]) -> None:
    """``makes``: the steps that it makes between two states."""
    scene, here = Scene({"a": GOAL}), HERE
    for number in range(11):
        scene.offers["a"] = scene.goal = scene.status.head = head(1600 + 320 * number)
        scene.peer.run(here)
        here = head(scene.goal.samples + 32 * makes)
    assert [event.states for event in scene.events if isinstance(event, FallingBehind)] == told


def test_who_never_gets_a_state_because_the_swarm_goes_on_meanwhile_is_told_so_too() -> None:
    scene = Scene({"a": GOAL})

    def fetch(asks: Callable[[], list[str]], read: Callable[[Any], Any], _: float, stops: Any, **__: Any) -> Any:
        for _ in range(5):
            scene.downloads.overtaken += 1
            stops()
        return scene.fetch(asks, read, 0.0, stops)

    scene.downloads.fetch = fetch
    scene.peer.run(HERE)
    (told,) = [event for event in scene.events if isinstance(event, FallingBehind)]
    assert (told.states, told.epoch) == (3, HERE.epoch)


def test_a_state_that_is_taken_to_be_equal_again_says_nothing_of_the_line() -> None:
    scene = Scene({"a": GOAL, "b": GOAL})
    for _ in range(5):
        scene.peer.run(HERE, preferred={"a"})
    assert not [event for event in scene.events if isinstance(event, FallingBehind)]


def test_whoever_has_it_is_asked_in_the_end_however_many_have_not() -> None:
    scene = Scene({**dict.fromkeys("bcdefgh"), "z": GOAL})
    assert scene.peer.run(HERE) == GOAL
    assert set(scene.asked[0]) == set("bcdefghz")


def test_who_says_that_it_has_none_is_asked_last() -> None:
    scene = Scene({**dict.fromkeys("bcdefgh"), "z": GOAL}, without=frozenset("bcdefgh"))
    assert scene.peer.run(HERE) == GOAL
    assert [donors[0] for donors in scene.asked] == ["z"]


def test_who_is_connected_is_asked_before_who_may_be_dead_and_who_has_none_last() -> None:
    scene = Scene({"b": None, "c": None, "d": None, "z": GOAL}, without=frozenset("b"))
    scene.connected = frozenset("bcz")
    assert scene.peer.run(HERE) == GOAL
    first, second, *last = scene.asked[0]
    assert ({first, second}, last) == (set("cz"), ["d", "b"])


def test_who_has_what_most_have_is_asked_and_nobody_else() -> None:
    scene = Scene({**dict.fromkeys("bcdefgh"), "y": GOAL, "z": GOAL})
    assert scene.peer.run(HERE, preferred={"y", "z"}) == GOAL
    assert [sorted(donors) for donors in scene.asked] == [["y", "z"]]


def test_donors_that_never_have_anything_new_are_asked_no_longer_than_promised() -> None:
    """A donor that does not get on has the state of a step before what it has decided with the others."""
    scene = Scene({"a": HERE})
    assert scene.peer.run(HERE) == HERE
    for _ in range(3):
        scene.peer.run(HERE)
    said = [event for event in scene.events if isinstance(event, Waiting)]
    assert said
    assert "the swarm's state" in said[0].what
    assert scene.peer._since is not None
    scene.peer._since -= 600.0
    with pytest.raises(StateError, match="load_state_timeout"):
        scene.peer.run(HERE)


def test_who_has_got_in_step_by_a_step_and_needs_a_state_much_later_has_all_the_time_again() -> None:
    """The state was that of the step before, and that step was here."""
    scene = Scene({"a": HERE})
    for _ in range(2):
        assert scene.peer.run(HERE) == HERE
    assert scene.peer._since is not None
    scene.peer._since -= 600.0
    scene.peer.settled()
    scene.offers["a"] = GOAL
    assert scene.peer.run(HERE) == GOAL


FRESH = [head(0, b"a"), head(0, b"b")]


@pytest.mark.parametrize(("here", "goal"), [(HERE, GOAL), FRESH, FRESH[::-1]])
def test_who_starts_takes_part_in_rounds_from_when_a_state_is_described(here: Head, goal: Head) -> None:
    """Also where nobody has made a step: of two heads without samples either may outweigh the other."""
    scene = Scene({"a": goal})
    scene.goal = goal
    scene.join(goal)
    assert scene.followed == []
    assert scene.peer.run(here) == goal
    assert scene.followed == [goal]
    assert scene.followed_before == [0]
    assert not [event for event in scene.events if isinstance(event, StateUnavailable)]


def test_who_starts_takes_part_where_the_state_is_that_is_described() -> None:
    scene, described = Scene({"a": head(1632)}), head(1632)  # a step was made meanwhile
    scene.goal = described
    scene.join(GOAL)
    assert scene.peer.run(HERE) == described
    assert scene.followed == [described]


@pytest.mark.parametrize("offer", [None, head(0, b"y")], ids=["nothing", "too old"])
def test_who_starts_and_gets_none_described_takes_part_all_the_same(
    offer: Head | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catching_up, "NOBODY_S", 0.1)
    scene = Scene({"a": offer}, without=frozenset("a"))
    scene.join(GOAL)
    assert scene.peer.run(HERE) == HERE
    assert scene.followed == [GOAL]
    assert scene.followed_before[0] == 0
    assert set(scene.followed_before[1:]) == {1}


@pytest.mark.parametrize("trained", [False, True])
def test_who_could_not_use_the_state_of_those_who_have_gone_does_not_go_on_alone(trained: bool) -> None:
    """Else it would train alone from its fresh model, and end as if nothing had been."""
    scene = Scene({"a": GOAL})
    scene.join(GOAL)

    def misfits(offer: Head) -> Any:
        scene.status.living, scene.offers = (), {}
        scene.peer._records.trainers.clear()  # type: ignore[attr-defined]
        raise MisfitError("it is Adam's, here is SGD.")

    scene.peer._stepper.read = misfits  # type: ignore[method-assign,assignment]
    if trained:
        assert scene.peer.run(HERE) == HERE, "from what it has"
        return
    with pytest.raises(StateError, match=r"have gone, and their state does not fit here: it is Adam's, here is SGD\."):
        scene.peer.run(head(0, b"z"))


def test_who_starts_and_finds_nobody_takes_part_where_they_were() -> None:
    scene = Scene({})
    scene.join(GOAL)
    assert scene.peer.run(HERE) == HERE
    assert scene.followed == [GOAL]
    reasons = [event.reason for event in scene.events if isinstance(event, StateUnavailable)]
    assert reasons == ["nobody is there"]


def test_who_starts_takes_part_after_a_while_whatever_its_donors_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "NOWHERE_S", 0.0)
    scene = Scene({"a": GOAL})
    scene.join(GOAL)
    during: list[int] = []
    read = scene.peer._stepper.read
    scene.peer._stepper.read = lambda offer: (during.append(len(scene.followed)), read(offer))[1]  # type: ignore
    scene.peer.run(HERE)
    assert during == [1], "before anything was described"
    assert scene.followed == [GOAL]


def test_who_can_ask_helpers_only_takes_part_at_once() -> None:
    """They fetch the state first, and each step that is made meanwhile must be here."""
    scene = Scene({"h": GOAL}, helpers=frozenset("h"))
    scene.status.cut = ("t",)
    scene.status.living = ("h",)
    scene.join(GOAL)
    scene.peer.run(HERE)
    assert scene.followed_before == [1]


def test_a_helper_that_starts_takes_part_at_once() -> None:
    scene = Scene({"a": GOAL}, auxiliary=True)
    scene.join(GOAL)
    assert scene.followed == [GOAL]


class Patience:
    """Downloads that take long and bring nothing, while a test's clock goes on."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.began = 1000.0, 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.passes)
        monkeypatch.setattr(catching_up, "time", clock)
        self.given_up: list[float] = []
        scene.peer._parts.driver.adopt = lambda *_, gives_up=False: self.given_up.append(self.now - self.began)

    def passes(self, seconds: float) -> None:
        self.now += max(seconds, 0.1)


def test_a_download_that_fails_after_long_is_no_time_in_which_nobody_had_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who had it lived until its end; others' records that they have none are seconds late, too."""
    monkeypatch.setattr(catching_up, "NOBODY_S", 15.0)
    scene = Scene({"a": None, "b": None})
    patience = Patience(scene, monkeypatch)

    def fetch(_: Any, __: Any, ___: float, stops: Callable[[], bool], **____: Any) -> None:
        if scene.status.living == ("a", "b"):
            for _ in range(200):
                patience.passes(0.1)
                stops()
            scene.status.living = ("b",)
            scene.peer._whereabouts.without = frozenset("b")  # type: ignore[misc]

    scene.peer._parts.downloads.fetch = fetch  # type: ignore[method-assign,assignment]
    scene.peer.run(HERE)
    assert patience.given_up == [pytest.approx(20.0 + 15.0, abs=1.0)]


def test_time_that_a_process_stood_still_is_no_time_that_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fit ends, once a job that was suspended for an hour goes on."""
    scene = Scene({"a": None})
    patience = Patience(scene, monkeypatch)

    def fetch(_: Any, __: Any, ___: float, stops: Callable[[], bool], **____: Any) -> Any:
        if len(scene.asked) == 0:
            patience.now += 3600.0
        stops()
        scene.asked.append([])
        return (SimpleNamespace(head=GOAL, digest=b"d"), None) if len(scene.asked) == 3 else None

    scene.peer._parts.downloads.fetch = fetch  # type: ignore[method-assign,assignment]
    assert scene.peer.run(HERE) == GOAL


def test_who_comes_back_just_when_nobody_was_there_ends_no_fit() -> None:
    scene = Scene({"a": GOAL})
    scene.status.living, scene.peer._records.trainers = (), set()  # type: ignore[misc,assignment]

    def follow(goal: Head) -> None:
        scene.status.head, scene.status.living = goal, ("a",)

    scene.peer._parts.driver.follow = follow  # type: ignore[method-assign]
    scene.join(GOAL)
    assert scene.peer.run(HERE) == HERE


def test_all_that_set_the_same_seed_do_not_ask_the_same_peer() -> None:
    first = set()
    for _ in range(20):
        random.seed(42)
        scene = Scene(dict.fromkeys("abcdefghij", GOAL))
        scene.peer.run(HERE)
        first.add(scene.asked[0][0])
    assert len(first) > 1
