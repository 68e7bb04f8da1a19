"""One thread for calls that may hang, so that the training thread always comes back.

hivemind waits on locks and futures without a limit in several places. The training thread hands such a call to this
worker and waits for it with a deadline, says every few seconds what it is waiting for, and lets Ctrl+C and SIGTERM
through at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import torch

from lightning_hivemind.errors import EngineStuckError
from lightning_hivemind.events import EventBus, Waiting

T = TypeVar("T")

POLL_S = 0.2
REPORT_S = 5.0
GRACE_S = 5.0


class Worker:
    """Runs one call after another in a daemon thread; a stuck call never blocks the exit of the process.

    The thread's current CUDA device is that of the thread that makes the first call.
    """

    def __init__(self, name: str, events: EventBus, should_abort: Callable[[], bool]) -> None:
        self._name, self._events, self._should_abort = name, events, should_abort
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: str | None = None

    def call(self, function: Callable[[], T], *, what: str, limit_s: float, cancel: Callable[[], None]) -> T:
        """Run ``function`` in the worker and wait for it.

        Args:
            what: named in the events and in the error.
            limit_s: after this long (or when the process is asked to stop) ``cancel`` is called once.
            cancel: must make ``function`` return early; it has ``GRACE_S`` seconds to do so.

        Raises:
            EngineStuckError: it did not come back even after ``cancel``. The engine cannot be used any more.
        """
        if self._stuck is not None:
            raise EngineStuckError(
                f"{what}: the engine is still stuck in {self._stuck}; see the error before this one."
            )
        if self._thread is None:
            device = current_cuda_device()
            self._thread = threading.Thread(target=self._run, args=(device,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, function))
        start = time.monotonic()
        cancelled_at: float | None = None
        reported = start
        try:
            while not wait([future], POLL_S).done:
                now = time.monotonic()
                if cancelled_at is None and (now - start > limit_s or self._should_abort()):
                    cancelled_at = now
                    cancel()
                elif cancelled_at is not None and now - cancelled_at > GRACE_S:
                    self._stuck = what
                    raise EngineStuckError(
                        f"{what} did not return in {now - start:.1f} s (limit {limit_s:.1f} s), nor when cancelled."
                        " Parameters are those of the last global step. Restart this peer: it will take the swarm's"
                        " state. If it happens again, raise averaging_timeout or look at the other peers' connections."
                    )
                if now - reported >= REPORT_S:
                    reported = now
                    self._events.emit(Waiting(what=what, elapsed_s=now - start, limit_s=limit_s))
            return _result_of(future)
        except KeyboardInterrupt:
            cancel()
            raise

    @property
    def stuck(self) -> bool:
        """Whether a call never came back, so that no further one can be made."""
        return self._stuck is not None

    def close(self) -> None:
        """Let the thread end after the call that it is in."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    def _run(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own, and begins with device 0
        while (item := self._calls.get()) is not None:
            future, function = item
            try:
                future.set_result(function())
            except BaseException as error:  # handed to the training thread, which raises it
                future.set_exception(error)


def _result_of(future: Future[T]) -> T:
    """What a finished call returned or raised; a timeout of its own must not be taken for one of the wait."""
    try:
        return future.result()
    except (FutureTimeoutError, TimeoutError) as error:  # one class since Python 3.11
        raise EngineStuckError(f"the engine timed out inside: {error!r}") from error


def current_cuda_device() -> int | None:
    """The calling thread's; None before CUDA is used, or without it."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
