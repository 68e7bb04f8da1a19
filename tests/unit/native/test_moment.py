"""A state is copied when no step is about to be made that whoever asks would lack."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state import moment
from lightning_hivemind.engine.native.state.moment import await_step

SIZE = 50_000_000  # a second's worth


def head(epoch: int) -> Head:
    return Head(epoch=epoch, lineage=b"x" * 16, samples=64 * epoch)


class Scene:
    """A donor at ``made``, in a round or not; for ``joiner`` it copies. ``call_s``: until the next round calls."""

    def __init__(self, call_s: float = math.inf) -> None:
        self.made, self.decided, self.members, self.runs = head(1), head(1), frozenset[str](), True
        self.call_s = call_s
        self.handover = SimpleNamespace(
            changed=threading.Condition(),
            owes=False,
            under_way=False,
            is_at=lambda one: one == self.decided,
            pace=SimpleNamespace(calls_within=lambda duration_s, now: self.call_s <= duration_s),
        )
        self._donor = SimpleNamespace(askers=frozenset({"joiner"}))
        self._found: list[bool] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        driver = SimpleNamespace(status=SimpleNamespace(members=frozenset()))
        self._driver = driver
        parts = (self._donor, driver, self.handover)
        self._found.append(await_step(*parts, lambda: self.made, lambda: self.runs, SIZE))  # type: ignore[arg-type]

    def begin(self) -> None:
        self._thread.start()

    def tell(self, members: frozenset[str]) -> None:
        self._driver.status = SimpleNamespace(members=members)

    def found(self, timeout_s: float = 10.0) -> bool | None:
        """What it said; None if it waits."""
        self._thread.join(timeout_s)
        return self._found[0] if self._found else None


def test_between_two_rounds_a_copy_is_made_at_once() -> None:
    scene = Scene()
    scene.begin()
    assert scene.found() is True


def test_a_round_without_those_that_ask_is_waited_for_and_the_step_that_it_makes() -> None:
    scene = Scene()
    scene.handover.under_way = True
    scene.begin()
    scene.tell(frozenset({"me", "another"}))
    assert scene.found(0.3) is None
    scene.handover.under_way, scene.decided = False, head(2)
    assert scene.found(0.3) is None, "the step is still to be made"
    scene.made = head(2)
    assert scene.found() is True


def test_a_round_in_which_they_are_is_not_waited_for() -> None:
    scene = Scene()
    scene.handover.under_way = True
    scene.begin()
    assert scene.found(0.3) is None
    scene.tell(frozenset({"me", "joiner"}))
    assert scene.found() is True


def test_a_round_that_is_called_before_a_state_can_be_sent_is_waited_for_but_not_another_one() -> None:
    scene = Scene(call_s=0.9)
    scene.begin()
    assert scene.found(0.3) is None
    scene.handover.under_way = True
    scene.tell(frozenset({"me", "another"}))
    assert scene.found(0.3) is None
    scene.made = scene.decided = head(2)
    scene.handover.under_way = False
    assert scene.found() is True, "though the next one is called as soon"


def test_a_round_that_is_called_later_or_does_not_come_is_not_waited_for() -> None:
    scene = Scene(call_s=1.1)
    scene.begin()
    assert scene.found() is True
    scene = Scene(call_s=0.9)
    scene.begin()
    assert scene.found(0.3) is None
    scene.call_s = math.inf  # it should have come by now
    assert scene.found() is True


@pytest.mark.parametrize("how", ["it owes a state", "it ends"])
def test_who_has_nothing_to_give_says_so(how: str) -> None:
    scene = Scene()
    scene.handover.under_way = True
    scene.begin()
    scene.handover.owes, scene.runs = how == "it owes a state", how != "it ends"
    assert scene.found() is False


def test_it_is_not_waited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment, "PATIENCE_S", 0.1)
    scene = Scene()
    scene.handover.under_way = True
    scene.begin()
    assert scene.found() is True
