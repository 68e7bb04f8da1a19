"""What other threads want done in the training thread, between two batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as TookTooLong
from typing import Any, TypeVar

T = TypeVar("T")


class Errands:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    def ask(self, do: Callable[[], T], timeout_s: float) -> T | None:
        """From another thread: what ``do`` returns; None if the training thread does not come to it in time."""
        done: Future[T] = Future()
        self._waiting.append((done, do))
        if self._closed:
            self.close()
        try:
            return done.result(timeout_s)
        except TookTooLong:
            return None if done.cancel() else done.result()  # else it is being done
        except CancelledError:
            return None

    def run(self) -> None:
        """In the training thread: all that is asked for. (What is raised there is raised where it was asked for.)"""
        while self._waiting:
            done, do = self._waiting.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(do())
            except Exception as error:
                done.set_exception(error)

    def close(self) -> None:
        """Nothing will be done any more."""
        self._closed = True
        while self._waiting:
            self._waiting.popleft()[0].cancel()
