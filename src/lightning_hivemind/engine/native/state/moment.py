"""When to copy a state: not just before a step that whoever asks would lack, for it would have to ask again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_hivemind.engine.native.protocol.lineage import Head

if TYPE_CHECKING:
    from lightning_hivemind.engine.native.driver import Driver
    from lightning_hivemind.engine.native.handover import Handover
    from lightning_hivemind.engine.native.state.donor import Donor

#: for a round, and for the training thread to make its step, at most
PATIENCE_S = 30.0
LOOK_S = 0.05


def await_step(
    donor: Donor, driver: Driver, handover: Handover, made: Callable[[], Head], running: Callable[[], bool]
) -> bool:
    """Wait until all steps are made that are decided, or soon will be without those for whom ``donor`` copies.

    Returns whether there is a state to be given.

    Args:
        made: whose state there is to copy.
    """
    deadline = time.monotonic() + PATIENCE_S
    with handover.changed:
        while running() and not handover.owes:
            without_them = handover.under_way and not donor.askers <= driver.status.members
            if time.monotonic() > deadline or (handover.is_at(made()) and not without_them):
                return True
            handover.changed.wait(LOOK_S)
    return False
