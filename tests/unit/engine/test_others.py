"""A peer that trains and is connected, but of whose progress the DHT knows nothing, is looked for; once."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from hivemind.p2p import PeerID

from lightning_hivemind.engine.stock import others as module
from lightning_hivemind.engine.stock.others import Others
from lightning_hivemind.events import EventBus

OTHER = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"


class Scene:
    """A DHT that gives the other's report with the look number ``heard_at``."""

    def __init__(self, *, heard_at: int, trains: bool = True, linked: bool = True) -> None:
        self.looks, self.heard_at, self.linked = 0, heard_at, linked
        tracker = SimpleNamespace(refresh=self.refresh, others_since=self.others_since, dht=self)
        records: Any = SimpleNamespace(trainers={OTHER} if trains else set())
        parts: Any = SimpleNamespace(tracker=tracker)
        self.others = Others(SimpleNamespace(), parts, records, EventBus(), lambda: False)  # type: ignore[arg-type]

    def refresh(self, timeout_s: float, should_abort: object) -> None:
        self.looks += 1

    def others_since(self, epoch: int) -> set[bytes]:
        return {PeerID.from_base58(OTHER).to_bytes()} if self.looks >= self.heard_at else set()

    def run_coroutine(self, function: object, return_future: bool) -> Future[set[str]]:
        future: Future[set[str]] = Future()
        future.set_result({OTHER} if self.linked else set())
        return future


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAPSE_S", 0.2)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


def test_who_is_heard_at_once_costs_one_look() -> None:
    scene = Scene(heard_at=1)
    scene.others.look()
    assert scene.looks == 1


def test_who_was_forgotten_for_a_moment_is_found() -> None:
    scene = Scene(heard_at=4)
    scene.others.look()
    assert scene.looks == 4


def test_who_is_not_found_in_all_that_time_is_not_looked_for_again() -> None:
    scene = Scene(heard_at=10**9)
    began = time.monotonic()
    scene.others.look()
    assert time.monotonic() - began > 0.2
    looks = scene.looks
    for _ in range(3):
        scene.others.look()
    assert scene.looks == looks + 3
    scene.heard_at = 0  # it is back, and would be looked for again
    scene.others.look()
    scene.heard_at = scene.looks + 3
    scene.others.look()
    assert scene.looks == scene.heard_at


@pytest.mark.parametrize("state", [{"trains": False}, {"linked": False}])
def test_who_has_left_is_not_looked_for(state: dict[str, bool]) -> None:
    scene = Scene(heard_at=10**9, **state)
    scene.others.look()
    assert scene.looks == 1
