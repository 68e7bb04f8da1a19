"""SIGTERM where a peer has several ranks: all of them end after the same batch.

Lightning tells the other ranks by a collective in the signal handler itself, in the midst of whatever collective goes
on, and asks by another one before each batch: ranks that are not at the same place wait there for good.
"""

from __future__ import annotations

from typing import Any


class Sigterm:
    """Between :meth:`attach` and :meth:`detach` in the place of Lightning's two collectives."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: whether it came to this rank
        self.came = False

    def attach(self) -> None:
        """Before Lightning sets its handlers. Upstream has no public seam for it."""
        self._trainer._signal_connector._sigterm_notifier_fn = self._note
        self._trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def detach(self) -> None:
        """Safe to call twice."""
        self._trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def take_effect(self) -> None:
        """It came to some rank: training ends after this batch."""
        self._trainer._signal_connector.received_sigterm = True

    def _note(self, number: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self.came and launcher is not None:
            launcher.kill(number)
        self.came = True  # which all ranks hear with the next batch, that after a validation
