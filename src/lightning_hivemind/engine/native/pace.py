"""When to wait for one another: how long a batch takes here, how long the others need to reach the target.

Peers of like speed keep in step, so that every gradient is of the parameters of its own step: who is about to see the
target reached does not begin another batch, and who is called in the middle of one is waited for. A peer whose batch
takes longer than the others' whole step is not, nor one that gives much less than each of them: it gives what it has,
and what it computes counts for the next. Nor is the first batch of who has joined, which may have a model to compile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

#: weight of the newest value in the means
SMOOTHING = 0.3
#: so many batches and calls are remembered; a single one says little on a busy machine
REMEMBERED = 5
#: a batch is waited for if the quickest took at most so many times as long as the others needed for their slowest step
COMPARABLE = 2.0
#: and if this peer gives at least so large a part of what each of the others does: else they lose more by waiting
WORTH = 1 / 3
#: of a step, by which what is handed over should be there before it
MARGIN = 0.2
#: steps without one
STANDSTILL = 5
#: a batch is waited for until it has taken so many times as long as usual, and at least so many seconds
OVERTIME, LEAST_S = 3.0, 2.5
#: parts of who computes nothing are waited for so long
GATHER_S = 5.0


class Pace:
    """See the module. Times are of any one clock, in seconds.

    Args:
        target: samples of a step.
        longest_s: that anybody is waited for; ``gathers_s``: where what ranks of this peer have in parts is to be
            gathered before it can be given, which is at the end of a batch.
        is_stale: whether that is so now.

    Attributes:
        wanted: a round has called, and it is.
    """

    def __init__(
        self, target: int, *, longest_s: float, gathers_s: float = 0.0, is_stale: Callable[[], bool] = lambda: False
    ) -> None:
        self._target, self._longest_s, self._gathers_s, self._is_stale = target, longest_s, gathers_s, is_stale
        self.wanted = False
        self._batch_began: float | None = None
        self._batch_s: float | None = None
        self._batches: deque[float] = deque(maxlen=REMEMBERED)
        self._calls: deque[float] = deque(maxlen=REMEMBERED)
        self._target_s: float | None = None
        self._others: float | None = None
        #: samples of this peer in a step, and of each other one
        self._mine: float | None = None
        self._each: float | None = None
        self._last_step: float | None = None
        #: from one step to the next
        self._step_s: float | None = None
        self._first_call: float | None = None
        #: peers with samples in the last step
        self._givers = 0
        self._joined = False

    # ------------------------------------------------------------------ what happens

    def join(self) -> None:
        """Others have made steps already."""
        self._joined = True

    def begin_batch(self, now: float) -> None:
        self._batch_began = now

    def end_batch(self, now: float) -> None:
        if self._batch_began is not None:
            self._batches.append(now - self._batch_began)
            self._batch_s = _mean(self._batch_s, self._batches[-1])
        self._batch_began = None

    def called(self, now: float) -> None:
        """A round calls: so long did the others need since the last step, without waiting for this peer."""
        self._first_call = now if self._first_call is None else self._first_call
        if self._last_step is not None:
            self._calls.append(now - self._last_step)

    def step(self, others_samples: int, now: float, *, mine: int, others: int) -> None:
        """A step was decided, with so many samples of so many ``others``, and with ``mine``.

        They are as fast as they were until the target was reached: were the waiting that followed counted, too, then
        who began a batch too many once, and was waited for, would find the others slow and do so in every step.
        """
        if self._last_step is not None:
            reached = now if self._first_call is None else self._first_call  # from then on everybody waits
            self._target_s = _mean(self._target_s, max(0.0, reached - self._last_step))
            self._others = _mean(self._others, others_samples)
            self._step_s = _mean(self._step_s, now - self._last_step)
        if others:
            self._mine, self._each = _mean(self._mine, mine), _mean(self._each, others_samples / others)
        self._last_step, self._first_call, self._givers = now, None, others + bool(mine)

    # ------------------------------------------------------------------ what follows

    def share(self, peers: int) -> float:
        """Samples of a step that are this peer's part of the target, if it is as quick as before; at least an equal one
        among those who gave to the last step, or among so many ``peers``.
        """
        equal, mine, others = self._target / (self._givers or peers), self._mine, self._others
        return equal if mine is None or not others else max(equal, self._target * mine / (mine + others))

    @property
    def starts(self) -> bool:
        """Whether this peer joined others and has not done a batch, the first one, which takes longest."""
        return self._joined and not self._batches

    @property
    def is_called(self) -> bool:
        """Whether a round has called since the last step."""
        return self._first_call is not None

    def join_at(self, now: float) -> float:
        """Until when a round that calls now should wait for the batch that is being computed here."""
        began, batch_s, longest_s = self._batch_began, self._batch_s, self._longest_s
        if self._is_stale():
            self.wanted = True  # at the end of this batch, or at once
            longest_s = self._gathers_s
            if began is None:
                return now + min(GATHER_S, longest_s)
        if began is None or self.starts:
            return now
        if not self._is_worth_waiting:
            return now
        due = began + max(LEAST_S, OVERTIME * (batch_s or 0.0))
        return min(max(now, due), now + longest_s)

    def gathers_ahead(self, now: float) -> bool:
        """Whether, at the end of a batch, to gather for a round that will call within the next, and not wait for it."""
        batch_s = self._batch_s
        if batch_s is None or (self._is_worth_waiting and batch_s <= self._gathers_s):
            return False
        return self.calls_within(batch_s, now)

    @property
    def _is_worth_waiting(self) -> bool:
        if self._batches and self._calls and min(self._batches) > COMPARABLE * max(self._calls):
            return False
        return self._mine is None or self._each is None or self._mine >= WORTH * self._each

    def steps_within(self, duration_s: float, now: float) -> int:
        """How many steps will probably be decided until then: a little more than a mean one takes, to be sure."""
        if self._last_step is None or not self._step_s:
            return 0
        elapsed_s = min(now - self._last_step, self._step_s)
        return int((elapsed_s + duration_s) / self._step_s + MARGIN)

    def calls_within(self, duration_s: float, now: float) -> bool:
        """Whether a round will probably call until then; not if it should have done so as long ago."""
        if self._last_step is None or self._target_s is None:
            return False
        return abs(self._last_step + self._target_s - now) <= duration_s

    def stands_still(self, now: float) -> bool:
        """Whether no step was decided for so long that the next one may need this peer's own."""
        return self._last_step is None or now - self._last_step > STANDSTILL * max(LEAST_S, self._step_s or 0.0)

    def hold_until(self, samples: int, now: float) -> float:
        """Between two batches: how long not to begin another one, because the target will be reached before its end.

        ``samples`` are this peer's. The others' are guessed from the steps before.
        """
        batch_s, target_s, others, last = self._batch_s, self._target_s, self._others, self._last_step
        if batch_s is None or not target_s or not others or last is None or not samples:
            return now
        missing = self._target - samples - others / target_s * (now - last)
        wait_s = max(0.0, missing) * target_s / others
        return now + min(wait_s + batch_s, self._longest_s) if wait_s < batch_s / 2 else now


def _mean(before: float | None, value: float) -> float:
    return float(value) if before is None else before + SMOOTHING * (value - before)
