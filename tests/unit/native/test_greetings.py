"""Peers are greeted once, and so many as may be nobody at a time."""

from __future__ import annotations

from lightning_hivemind.engine.native.greetings import MOST, MOST_KNOWN, WITHIN_S, Greetings


def test_each_is_greeted_once_and_a_crowd_one_part_after_the_other() -> None:
    greetings = Greetings()
    names = [f"peer {number}" for number in range(2 * MOST + 1)]
    assert sum(greetings.due(name, 0.0) for name in names) == MOST
    assert not any(greetings.due(name, WITHIN_S - 0.1) for name in names)
    assert sum(greetings.due(name, WITHIN_S) for name in names) == MOST
    assert sum(greetings.due(name, 2 * WITHIN_S) for name in names) == 1
    assert not any(greetings.due(name, 3 * WITHIN_S) for name in names)


def test_memory_is_bounded() -> None:
    greetings = Greetings()
    for number in range(2 * MOST_KNOWN):
        assert greetings.due(f"peer {number}", number * WITHIN_S)
    assert len(greetings._at) == MOST_KNOWN
