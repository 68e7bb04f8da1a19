"""Makes Lightning's loops count global steps of the swarm.

Lightning asks ``_should_accumulate()`` before a step and counts the step itself if the answer is no. Whether a
micro-batch completes a global step is known only afterwards, so the loop is told "accumulate" before, and its counters
are set from the swarm's epoch after. ``trainer.global_step``, ``max_steps``, loggers' x-axis and callbacks that count
steps are then right, also when this peer jumps forward because it took over the swarm's state.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning_utilities.core import rank_zero


class LoopProgress:
    """Owns the few counters of one Trainer's fit loop that depend on the swarm."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._stepped = False
        self._bar: Any = None

    def attach(self) -> None:
        """Answer in the loop's place. Upstream has no public seam for it; a test fails should the method go."""
        if not callable(getattr(type(self._loop), "_should_accumulate", None)):
            raise RuntimeError("this Lightning has no _TrainingEpochLoop._should_accumulate: use lightning>=2.5,<2.7")
        self._loop._should_accumulate = self._should_accumulate

        self._bar = self._trainer.progress_bar_callback
        if self._bar is not None:
            self._bar.__class__ = _of_passes(type(self._bar))

    def detach(self) -> None:
        self._loop.__dict__.pop("_should_accumulate", None)
        if self._bar is not None:
            self._bar.__class__ = type(self._bar).__base__
            self._bar = None

    def follow(self, epoch: int, *, committed: bool) -> None:
        """``epoch`` global steps are made; ``committed``, after a batch: it completed the last of them."""
        steps = self._loop.automatic_optimization.optim_progress.optimizer.step
        steps.current.ready += max(0, epoch - steps.total.completed)
        steps.current.completed = steps.current.ready
        steps.total.ready = steps.total.completed = epoch
        # the loop itself adds one after a batch that stepped
        self._loop._batches_that_stepped = epoch - 1 if committed else epoch
        self._stepped = committed

    def _should_accumulate(self) -> bool:
        return not self._stepped


def _of_passes(bar: type) -> type:
    """Like it, with the batches of a pass as its total. With ``max_epochs=-1`` Lightning's may be the steps left."""
    total = property(lambda self: self.trainer.num_training_batches)
    return type(bar.__name__, (bar,), {"total_train_batches": total, "__module__": bar.__module__})


class StopTogether:
    """``trainer.should_stop`` set by one peer (EarlyStopping, say) stops the whole run, all at the same epoch.

    While other peers are there, the loop is told that it may not stop before the next global step; the wish travels
    with the next rounds, and takes effect for everybody at the epoch that carried it. A :class:`Timer` that ran out is
    this peer's own business: only this peer leaves. So is, with ``alone``, every wish: that of a peer that only helps.
    """

    def __init__(self, trainer: Any, *, alone: bool = False) -> None:
        self._trainer, self._alone = trainer, alone
        self._loop = trainer.fit_loop.epoch_loop
        self._min_steps, self._min_epochs = self._loop.min_steps, trainer.fit_loop.min_epochs
        self._asked = False
        #: whether the time of this peer (of one of its ranks) is up; whether what one rank wishes all ranks know
        self.time_is_up, self.known = False, True

    def wants_to_stop(self) -> bool:
        """True once, when this peer has a wish to stop the run that the swarm does not know yet."""
        if self._asked or not self._trainer.should_stop or not self._may_stop():
            return False
        if self._is_its_own():
            self.release()
            return False
        self._asked = True
        return True

    def hold(self, epoch: int, *, alone: bool) -> None:
        """After a batch: with others around, a wish to stop must wait for the next global step."""
        if (alone and self.known) or self._is_its_own():
            self.release()
        else:
            self._loop.min_steps = max(self._min_steps or 0, epoch + 1)
            rank_zero.log.addFilter(self._is_of_the_user)

    def stop(self) -> None:
        """The swarm agreed: stop now, whatever ``min_steps`` and ``min_epochs`` are here. It makes no further step."""
        self._loop.min_steps = self._trainer.fit_loop.min_epochs = None
        self._trainer.should_stop = True

    def release(self) -> None:
        """Give the loops their own limits back."""
        rank_zero.log.removeFilter(self._is_of_the_user)
        self._loop.min_steps, self._trainer.fit_loop.min_epochs = self._min_steps, self._min_epochs

    def _is_of_the_user(self, record: logging.LogRecord) -> bool:
        """Not that Lightning trains on for the sake of ``min_steps``, if these are not what the Trainer was given."""
        return self._loop.min_steps == self._min_steps or "was signaled to stop but" not in record.getMessage()

    def _may_stop(self) -> bool:
        """Whether this peer has what it was told to train at least."""
        passes = self._trainer.fit_loop.epoch_progress.current.processed
        return bool(self._loop.global_step >= (self._min_steps or 0) and passes >= (self._min_epochs or 0))

    def timer_has_run_out(self) -> bool:
        """Here, now. The ranks of a peer find that at unlike moments: see :attr:`time_is_up`."""
        return any(
            type(callback).__name__ == "Timer" and (left := callback.time_remaining()) is not None and left <= 0
            for callback in self._trainer.callbacks
        )

    def _is_its_own(self) -> bool:
        return self._alone or self.time_is_up
