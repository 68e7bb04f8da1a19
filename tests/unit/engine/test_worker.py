"""The deadline around calls that may hang."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest
import torch

from lightning_hivemind.engine import worker as module
from lightning_hivemind.engine.worker import Worker
from lightning_hivemind.errors import EngineStuckError
from lightning_hivemind.events import Event, EventBus, Waiting


@pytest.fixture
def bus() -> EventBus:
    return EventBus()


def make(bus: EventBus, should_abort: bool = False) -> Worker:
    return Worker("test-worker", bus, lambda: should_abort)


def test_result_and_error_come_back_to_the_caller(bus: EventBus) -> None:
    worker = make(bus)

    def fail() -> None:
        raise KeyError("from the worker")

    assert (
        worker.call(lambda: threading.current_thread().name, what="x", limit_s=5, cancel=lambda: None) == "test-worker"
    )
    with pytest.raises(KeyError, match="from the worker"):
        worker.call(fail, what="x", limit_s=5, cancel=lambda: None)
    worker.close()


def test_a_call_over_its_limit_is_cancelled_and_its_result_still_counts(bus: EventBus) -> None:
    released = threading.Event()

    def blocks() -> str:
        assert released.wait(30)
        return "came back"

    assert make(bus).call(blocks, what="x", limit_s=0.1, cancel=released.set) == "came back"


def test_a_request_to_stop_cancels_at_once(bus: EventBus) -> None:
    released = threading.Event()
    assert make(bus, should_abort=True).call(lambda: released.wait(30), what="x", limit_s=60, cancel=released.set)


def test_a_call_that_cannot_be_cancelled_is_an_error_and_not_a_hang(
    bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    never = threading.Event()
    cancelled: list[bool] = []
    with pytest.raises(EngineStuckError, match="the test did not return"):
        make(bus).call(lambda: never.wait(30), what="the test", limit_s=0.1, cancel=lambda: cancelled.append(True))
    assert cancelled == [True]
    never.set()


def test_a_long_wait_is_reported(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.2)
    said: list[Event] = []
    enough = threading.Event()

    def listen(event: Event) -> None:
        said.append(event)
        if len(said) == 2:
            enough.set()

    bus.subscribe(listen)
    assert make(bus).call(lambda: enough.wait(30), what="the slow thing", limit_s=60, cancel=enough.set)
    assert all(isinstance(event, Waiting) and event.what == "the slow thing" for event in said)


def test_a_timeout_inside_the_call_is_not_taken_for_one_of_the_wait(bus: EventBus) -> None:
    def times_out(kind: type[Exception]) -> None:
        raise kind("inside")

    for kind in (TimeoutError, FutureTimeoutError):
        with pytest.raises(EngineStuckError, match="inside"):
            make(bus).call(lambda kind=kind: times_out(kind), what="x", limit_s=5, cancel=lambda: None)


def test_a_call_that_ends_just_as_the_wait_for_it_runs_out_has_its_own_outcome(
    bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            value = super().result()
            if timeout is not None:
                raise FutureTimeoutError  # the time was over just before
            return value

    monkeypatch.setattr(module, "Future", Late)
    assert make(bus).call(lambda: "success", what="x", limit_s=5, cancel=lambda: None) == "success"


def test_the_workers_cuda_device_is_that_of_its_caller(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several; without any, CUDA's three functions stand in."""
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    worker = make(bus)
    for _ in range(2):
        worker.call(lambda: None, what="x", limit_s=5, cancel=lambda: None)
    assert chosen == [("test-worker", 3)]
