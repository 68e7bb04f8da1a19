"""Waiting for an answer that may never come."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from lightning_hivemind.engine.stock.rounds import answered


def never() -> bool:
    return False


def test_an_answer_that_is_there_is_seen_whatever_it_is() -> None:
    good: Future[int] = Future()
    good.set_result(1)
    assert answered(good, 0.0, never)
    bad: Future[int] = Future()
    bad.set_exception(TimeoutError("of its own"))
    assert answered(bad, 0.0, never)


def test_no_answer_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"no answer in 0\.1 s"):
        answered(Future(), 0.1, never)


def test_a_peer_that_is_to_stop_does_not_wait() -> None:
    looks = iter([False, True])
    assert not answered(Future(), 60.0, lambda: next(looks))
