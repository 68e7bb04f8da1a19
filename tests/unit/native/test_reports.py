"""What the user hears of gradients that are in no step: the reason, and what to do about it."""

from __future__ import annotations

import pytest

from lightning_hivemind.engine.native.reports import Reports
from lightning_hivemind.engine.native.seam import Outcome
from lightning_hivemind.engine.native.steps import Handed, Received
from lightning_hivemind.events import LEFT_BEHIND, Event, EventBus, GradientCarried, GradientHandedOver, RoundMissed


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def reports(told: list[Event]) -> Reports:
    events = EventBus()
    events.subscribe(told.append)
    return Reports(events, target_samples=64, max_staleness=3)


def test_a_gradient_that_is_not_finite_is_told_as_such(reports: Reports, told: list[Event]) -> None:
    reports.refused(7, 16)
    (one,) = told
    assert isinstance(one, RoundMissed)
    assert (one.epoch, one.samples_lost) == (7, 16)
    assert "is not finite" in one.reason


def test_what_is_too_old_is_told_with_what_made_it_so(reports: Reports, told: list[Event]) -> None:
    reports.lost(1, 8, left_behind=False, slow_line=False)
    reports.lost(2, 8, left_behind=False, slow_line=True)
    reports.lost(3, 8, left_behind=True, slow_line=True)
    reports.handed_over(4, Handed("other", 8, Outcome.TOO_OLD, 1.0))
    assert all(isinstance(one, RoundMissed) for one in told)
    batches, *line, behind, late = [one.reason for one in told if isinstance(one, RoundMissed)]
    assert batches == "they are older than max_staleness=3"
    assert line == ["this peer's line takes longer to send them than max_staleness=3 allows"] == [late]
    assert behind == LEFT_BEHIND


def test_what_was_handed_over_is_told_where_it_came_from_and_where_it_went(reports: Reports, told: list[Event]) -> None:
    reports.handed_over(1, Handed("other", 8, Outcome.TAKEN, 1.5))
    reports.handed_over(1, Received("third", 4))
    reports.handed_over(2, Handed("other", 8, Outcome.LOST, 1.5))
    there, here, unknown = told
    assert isinstance(there, GradientHandedOver)
    assert (there.peer, there.samples, there.duration_s) == ("other", 8, 1.5)
    assert isinstance(here, GradientCarried)
    assert (here.peer, here.samples) == ("third", 4)
    assert isinstance(unknown, RoundMissed)
    assert "peer other, to which they were handed over a slow line" in unknown.reason
