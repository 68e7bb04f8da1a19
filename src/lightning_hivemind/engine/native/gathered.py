"""Where ranks of this peer have the model in parts: which of it rank 0 has as it is now, for the swarm."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_hivemind.engine.base import Changed
from lightning_hivemind.errors import StateError

#: what a validation may wait for, in seconds
MOMENT_S = 2.0
#: what a step does
STEPS_CHANGE = Changed.PARAMETERS | Changed.OPTIMIZER


class Gathered:
    """See the module.

    Args:
        gather: brings it here (:attr:`.PeerTraining.refresh`). None: all of it always is.
        changes: within which it comes.

    Attributes:
        old: what is older here than at the ranks.
    """

    def __init__(
        self, gather: Callable[[Changed], None] | None, changes: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._gather, self._changes = gather, changes
        self.old = Changed(0)
        self._took_s = 0.0

    def stepped(self) -> None:
        """The ranks have made a step, or anything may have changed there."""
        if self._gather is not None:
            self.old = STEPS_CHANGE

    def known(self) -> None:
        """What is here the ranks will have."""
        self.old = Changed(0)

    def refresh(self, what: Changed) -> None:
        """Parameters, or the optimizer's state, too, are what the ranks have. Raises StateError: it has none."""
        what &= self.old
        if what and self._gather is not None:
            with self._changes():
                self._gather(what)
                self.old &= ~what

    def fetch(self) -> None:
        """All of it, for who joins before the next batch; he waits for that where this takes longer than a moment.

        If it cannot be, this peer trains on, and who joins must ask another one.
        """
        if self._took_s > MOMENT_S:
            return
        began = time.monotonic()
        try:
            self.refresh(STEPS_CHANGE)
        except StateError as error:
            warnings.warn(f"nobody that joins can have a state from this peer: {error}", stacklevel=2)
        self._took_s = time.monotonic() - began
