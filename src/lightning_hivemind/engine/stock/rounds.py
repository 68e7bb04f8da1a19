"""Waiting for one averaging round of hivemind, with a limit of our own and an honest account of what came of it."""

from __future__ import annotations

import time
from asyncio import CancelledError as AsyncCancelledError
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from hivemind.averaging.control import AveragingStage, StepControl

POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """What came of a round. ``fraction`` is 0.0 when it failed, and then ``reason`` says why.

    ``notes`` are the other peers' (and this one's) :func:`note`, by peer id; stock peers have none.
    """

    fraction: float
    members: frozenset[bytes] = frozenset()
    notes: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    reason: str = ""
    #: nobody else was there, so nobody will come to the next phase either
    alone: bool = False

    @property
    def succeeded(self) -> bool:
        return self.fraction > 0.0

    @property
    def contributors(self) -> int:
        return max(0, len(self.members) - sum(note.get("aux") is True for note in self.notes.values()))

    @property
    def stop_requested(self) -> bool:
        return any(note.get("stop") is True for note in self.notes.values())


ALONE = RoundResult(fraction=1.0, members=frozenset({b""}), alone=True)
UNDER_WAY = RoundResult(fraction=0.0)


class Missed(Exception):
    """The other peers committed this epoch without us: our gradient is of no use any more."""


class NotNow(Exception):
    """Nothing was changed: this peer is stopping, or nobody has a gradient to step on."""


def note(*, stop: bool, auxiliary: bool) -> dict[str, Any]:
    """The small message that every member of a group gets from every other, before the values are exchanged."""
    return {"stop": stop, "aux": auxiliary}


def answered(future: Future[Any], timeout_s: float, should_abort: Callable[[], bool]) -> bool:
    """Wait until ``future`` is done; False if this peer is to stop first.

    Raises:
        TimeoutError: neither happened in time.
    """
    deadline = time.monotonic() + timeout_s
    while not should_abort():
        left_s = deadline - time.monotonic()
        try:
            future.exception(min(POLL_S, max(0.0, left_s)))
        except (FutureTimeoutError, TimeoutError):
            if left_s <= 0.0:
                raise TimeoutError(f"no answer in {timeout_s:.1f} s") from None
        else:
            return True
    return False


def cancel(control: StepControl | None) -> None:
    """Give a round up, wherever it is. Harmless if it is over."""
    if control is not None and not control.done():
        control.cancel()


def await_round(
    control: StepControl,
    received_fraction: Callable[[], float],
    *,
    patience_s: float,
    timeout_s: float,
    should_abort: Callable[[], bool],
) -> RoundResult:
    """Wait until the round is over; never longer than ``timeout_s``, nor than ``patience_s`` without a group.

    Never raises: a round that hivemind cancelled, timed out or broke is a result with ``fraction`` 0.0.
    """
    start = time.monotonic()
    while True:
        try:
            gathered = control.result(POLL_S)
        except (FutureTimeoutError, TimeoutError):
            elapsed = time.monotonic() - start
            reason = _reason_to_give_up(control, elapsed, patience_s, timeout_s, should_abort)
            if control.done():
                continue  # it ended just now: its own outcome is the true one
            if reason:
                cancel(control)
                return RoundResult(fraction=0.0, reason=reason)
        except (CancelledError, AsyncCancelledError):
            return RoundResult(fraction=0.0, reason="cancelled")
        except Exception as error:
            return RoundResult(fraction=0.0, reason=f"{type(error).__name__}: {error}")
        else:
            return _result(gathered, received_fraction())


def _reason_to_give_up(
    control: StepControl, elapsed: float, patience_s: float, timeout_s: float, should_abort: Callable[[], bool]
) -> str:
    if should_abort():
        return "this peer is stopping"
    if elapsed > timeout_s:
        return f"not finished in {timeout_s:.1f} s (averaging_timeout)"
    if elapsed > patience_s and control.stage in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP):
        return f"no group found in {patience_s:.1f} s"
    return ""


def _result(gathered: Any, fraction: float) -> RoundResult:
    if not isinstance(gathered, dict):
        return RoundResult(fraction=0.0, reason="no group found")
    notes = {peer.to_bytes(): value for peer, value in gathered.items() if isinstance(value, dict)}
    members = frozenset(peer.to_bytes() for peer in gathered)
    return RoundResult(fraction=fraction, members=members, notes=notes)
