"""The rounds' thread hears of samples at once where a round may depend on it, else now and then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hivemind.engine.native import telling as telling_module
from lightning_hivemind.engine.native.telling import LATEST_S, Telling

TARGET = 100


class Told:
    """A peer, its driver, and a clock; what the driver was told, and whether that was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 1000.0, list[bool]()
        self.status = SimpleNamespace(swarm_samples=0)
        self.handover = SimpleNamespace(waits=False, owes=False, samples=0, pace=SimpleNamespace(is_called=False))
        monkeypatch.setattr(telling_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        given: Any = self, self.handover
        self.telling = Telling(*given, TARGET)

    def contributed(self, *, wait: bool = True) -> None:
        self.waited.append(wait)

    def tell(self, after_s: float = 0.001) -> list[bool]:
        self.now += after_s
        self.waited.clear()
        self.telling.tell()
        return list(self.waited)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_while_no_round_can_be_due_it_hears_of_them_now_and_then_and_is_not_waited_for(told: Told) -> None:
    found = [told.tell(LATEST_S / 10) for _ in range(40)]
    assert found.count([False]) in (3, 4, 5)
    assert found.count([]) + found.count([False]) == 40


@pytest.mark.parametrize("whose", ["its own", "the swarm's"])
def test_with_half_of_what_a_step_needs_it_hears_of_each_batch_and_is_waited_for(told: Told, whose: str) -> None:
    def has(samples: int) -> list[bool]:
        of: Any = told.handover if whose == "its own" else told.status
        setattr(of, "samples" if whose == "its own" else "swarm_samples", samples)
        return told.tell()

    told.tell()
    assert has(49) == []
    assert [has(50), has(51), has(120)] == [[True]] * 3


@pytest.mark.parametrize("why", ["waits", "owes", "is_called"])
def test_who_is_awaited_by_a_round_is_waited_for(told: Told, why: str) -> None:
    told.tell()
    assert told.tell() == []
    setattr(told.handover.pace if why == "is_called" else told.handover, why, True)
    assert told.tell() == [True]


def test_before_a_pause_it_hears_of_all(told: Told) -> None:
    told.tell()
    told.waited.clear()
    told.telling.tell_at_once()
    assert told.waited == [True]
