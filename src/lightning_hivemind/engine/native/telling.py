"""When the rounds' thread hears how many samples are here: at once if a round may depend on it, else now and then."""

from __future__ import annotations

import time

from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.handover import Handover

#: after which it hears of more of them in any case
LATEST_S = 0.1
#: of a round's samples, with which one may soon be due
NEAR = 0.5


class Telling:
    """See the module. From the training thread, between two batches.

    To wake that thread, and to wait for it, takes a third of what a swarm costs a small batch.

    Args:
        target: samples of a step.
    """

    def __init__(self, driver: Driver, handover: Handover, target: int) -> None:
        self._driver, self._handover, self._near = driver, handover, NEAR * target
        self._told = 0.0

    def tell(self) -> None:
        """There are others than before, or a batch has ended for which a round may wait."""
        handover, now = self._handover, time.monotonic()
        awaited = handover.waits or handover.owes or handover.pace.is_called
        if awaited or max(handover.samples, self._driver.status.swarm_samples) >= self._near:
            self.tell_at_once()
        elif now - self._told >= LATEST_S:
            self._told = now
            self._driver.contributed(wait=False)

    def tell_at_once(self) -> None:
        """And wait until it has counted them."""
        self._told = time.monotonic()
        self._driver.contributed()
