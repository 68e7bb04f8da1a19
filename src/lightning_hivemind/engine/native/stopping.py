"""When a peer makes no more steps: the run has agreed on it, or its own training ends there."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hivemind.events import EventBus, StopRequested


class Stopping:
    """See the module.

    Args:
        last_step: see :attr:`.PeerTraining.last_step`.

    Attributes:
        epoch: after which all stop; None until that is known.
    """

    def __init__(self, events: EventBus, last_step: Callable[[], int]) -> None:
        self._events, self._last_step = events, last_step
        self.epoch: int | None = None

    def agree(self, epoch: int, *, by_this_peer: bool) -> None:
        """All stop after ``epoch``, unless that was known before."""
        if self.epoch is None:
            self.epoch = epoch
            self._events.emit(StopRequested(epoch=epoch, by_this_peer=by_this_peer))

    def is_reached(self, epoch: int) -> bool:
        """Whether the step to ``epoch`` is the last one."""
        last = self._last_step()
        return (self.epoch is not None and epoch >= self.epoch) or 0 <= last <= epoch
