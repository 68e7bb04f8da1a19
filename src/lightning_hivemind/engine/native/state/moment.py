"""When to give a state: not just before a step that whoever asks would lack, for it would have to ask again; nor
while a round sends as much, which all wait for.
"""

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
#: bytes per second of a quick line: a round that calls before a state is sent there is waited for, if it is so near
QUICK, SOON_S = 50e6, 1.0


def await_step(
    donor: Donor,
    driver: Driver,
    handover: Handover,
    made: Callable[[], Head],
    running: Callable[[], bool],
    size_bytes: int,
) -> bool:
    """Wait until all steps are made that are decided, or soon will be without those for whom ``donor`` copies.

    For one step at most that is only expected.

    Returns whether there is a state to be given.

    Args:
        made: whose state there is to copy.
        size_bytes: of it; 0 for what others fetch already.
    """
    deadline, first, quick_s = time.monotonic() + PATIENCE_S, made(), min(size_bytes / QUICK, SOON_S)
    with handover.changed:
        while running() and not handover.owes:
            now = time.monotonic()
            without_them = handover.under_way and not donor.askers <= driver.status.members
            soon = not handover.under_way and made() == first and handover.pace.calls_within(quick_s, now)
            if now > deadline or (handover.is_at(made()) and not without_them and not soon):
                return True
            handover.changed.wait(LOOK_S)
    return False
