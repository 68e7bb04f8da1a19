"""What other threads want done in the training thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from lightning_hivemind.engine.native.errands import Errands

SOON_S = 20.0


@contextlib.contextmanager
def asked(do: Callable[[], Any]) -> Iterator[tuple[Errands, Future[Any]]]:
    """Errands of which another thread has asked one, and what it gets."""
    errands = Errands()
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(errands.ask, do, SOON_S)
        while not errands._waiting:
            threading.Event().wait(0.005)
        yield errands, answer


def test_it_is_done_in_the_thread_that_runs_them_and_answered() -> None:
    with asked(threading.get_ident) as (errands, answer):
        errands.run()
        assert answer.result(SOON_S) == threading.get_ident()


def test_what_is_raised_is_raised_where_it_was_asked_for() -> None:
    with asked(lambda: 1 // 0) as (errands, answer):
        errands.run()
        with pytest.raises(ZeroDivisionError):
            answer.result(SOON_S)


def test_who_has_waited_long_enough_gets_nothing_and_nothing_is_done_for_it_later() -> None:
    errands, done = Errands(), list[int]()
    assert errands.ask(lambda: done.append(1), 0.01) is None
    errands.run()
    assert not done


def test_once_closed_nobody_waits() -> None:
    with asked(threading.get_ident) as (errands, answer):
        errands.close()
        assert answer.result(SOON_S) is None
    assert errands.ask(threading.get_ident, SOON_S) is None
