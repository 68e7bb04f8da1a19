"""Events in order; a peer that floods waits for itself, and nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lightning_hivemind.engine.native.inbox import EVENT_BYTES, LATE_S, Inbox
from swarm.town import wait_for

LIMIT = 3 * EVENT_BYTES


def note(said: list[object], what: object) -> Callable[[float], None]:
    return lambda now: said.append(what)


def see_to(inbox: Inbox, count: int) -> None:
    for _ in range(count):
        event = inbox.take(time.monotonic() + 10.0)
        assert event is not None
        event(0.0)


def test_events_come_in_order_and_an_empty_one_says_so() -> None:
    inbox, said = Inbox(LIMIT), list[object]()
    for number in range(3):
        inbox.put(note(said, number))
        inbox.put_from("a", 10, note(said, f"a{number}"))
    see_to(inbox, 6)
    assert said == [0, "a0", 1, "a1", 2, "a2"]
    assert inbox.take(time.monotonic() + 0.01) is None


def test_what_comes_later_does_not_hold_up_what_is_due() -> None:
    """Else whoever floods would stop the clock of all limits."""
    inbox, said = Inbox(LIMIT), list[object]()
    inbox.put_from("a", 10, note(said, "early"))
    due = time.monotonic()
    time.sleep(LATE_S + 0.001)
    inbox.put_from("a", 10, note(said, "late"))
    early = inbox.take(due)
    assert early is not None
    early(0.0)
    assert inbox.take(due) is None
    see_to(inbox, 1)
    assert said == ["early", "late"]


@pytest.mark.parametrize("size", [1, EVENT_BYTES])
def test_who_floods_waits_and_nobody_else(size: int) -> None:
    inbox, said, sent = Inbox(LIMIT), list[object](), list[int]()

    def flood() -> None:
        for number in range(50):
            inbox.put_from("a", size, note(said, number))
            sent.append(number)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    wait_for(lambda: len(sent) == 3, "as much as there is room for")
    inbox.put_from("b", 3 * size, note(said, "b"))
    inbox.put(note(said, "own"))
    thread.join(0.2)
    assert len(sent) == 3, "more than there is room for waits"
    see_to(inbox, 52)
    thread.join(10.0)
    assert said[:5] == [0, 1, 2, "b", "own"]
    assert [one for one in said if isinstance(one, int)] == list(range(50))


def test_what_is_larger_than_the_room_waits_alone() -> None:
    inbox, said = Inbox(LIMIT), list[object]()
    inbox.put_from("a", 10 * LIMIT, note(said, "large"))
    see_to(inbox, 1)
    assert said == ["large"]


def test_when_nobody_takes_any_more_nobody_waits() -> None:
    inbox = Inbox(LIMIT)
    inbox.put_from("a", LIMIT, lambda now: None)
    thread = threading.Thread(target=inbox.put_from, args=("a", 1, lambda now: None), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    inbox.close()
    thread.join(10.0)
    assert not thread.is_alive()
