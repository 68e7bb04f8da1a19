"""Where peers stand, in the DHT: how those that have never spoken learn of one another."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.swarm_records import SwarmRecords

FIELD = "native"
#: between two looks at the records that are here anyway, and between two changes of this peer's own
LOOK_S, PUBLISH_S = 0.5, 2.0


class Whereabouts:
    """Publishes this peer's head now and then, and tells the driver of the others'; a thread of its own."""

    def __init__(self, records: SwarmRecords, driver: Driver, samples: Callable[[], int], *, reduces: bool) -> None:
        self._records, self._driver, self._samples, self._reduces = records, driver, samples, reduces
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="whereabouts", daemon=True)

    def start(self) -> None:
        """Publish now, then whenever something changes."""
        self.publish()
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(LOOK_S)

    def look(self) -> list[Head]:
        """Tell the driver what the records say; returns where the others stand."""
        heads = []
        for peer, value in self._records.field(FIELD).items():
            found = _read(value)
            if found is not None:
                head, samples, reduces, stamp = found
                self._driver.saw(peer, head, samples, reduces, stamp)
                heads.append(head)
        return heads

    def publish(self) -> None:
        """Put this peer's head on record."""
        head = self._driver.status.head
        if head is not None:
            place = [head.epoch, head.lineage, head.samples, self._samples(), self._reduces, time.time()]
            self._records.publish(**{FIELD: place})

    def _run(self) -> None:
        published: tuple[float, Head | None] = (0.0, None)
        while not self._stopped.wait(LOOK_S):
            self.look()
            if self._driver.status.head != published[1] and time.monotonic() - published[0] > PUBLISH_S:
                published = (time.monotonic(), self._driver.status.head)
                self.publish()


def _read(value: Any) -> tuple[Head, int, bool, float] | None:
    """What another peer has published; None if it is no such thing."""
    if not isinstance(value, list) or len(value) != 6:
        return None
    epoch, lineage, total, samples, reduces, stamp = value
    counts = all(type(one) is int and 0 <= one < 2**63 for one in (epoch, total, samples))
    if not counts or not isinstance(lineage, bytes) or len(lineage) > 64:
        return None
    if not isinstance(reduces, bool) or not isinstance(stamp, float) or not math.isfinite(stamp):
        return None
    return Head(epoch=epoch, lineage=lineage, samples=total), samples, reduces, stamp
