"""Where peers stand, in the DHT: how those that have never spoken learn of one another."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_hivemind.engine.native.agreement import Agreement
from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.introductions import Introductions
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.protocol.settings import AGAIN_S, PUBLISH_S
from lightning_hivemind.network.daemon import PeerNetwork
from lightning_hivemind.network.records import PeerRecords

log = logging.getLogger("lightning_hivemind")

#: between two looks at the records that are here anyway; until this peer has said where it stands
LOOK_S, JOINS_S = 0.5, 0.02
REFRESH_S, FIRST_LOOK_S, FIRST_LOOKS, STOP_S = 3.0, 5.0, 3, 1.0
#: of addresses in a record, which is small
MOST_ADDRESSES, MAX_ADDRESS = 6, 200


class Whereabouts:
    """Publishes where this peer stands and how libp2p reaches it, and tells driver and introductions of the others.

    (libp2p's own routing does not know peers that have just joined through a third one.)
    """

    def __init__(
        self,
        network: PeerNetwork,
        run: str,
        driver: Driver,
        introductions: Introductions,
        owes: Callable[[], bool],
        agreement: Agreement | None,
        *,
        reduces: bool,
    ) -> None:
        #: others that, as they say, have not the state of where this peer stands
        self.without: frozenset[str] = frozenset()
        self._owes = owes
        self._network, self._driver, self._introductions = network, driver, introductions
        self._agreement, self._reduces = agreement, reduces
        self._records = PeerRecords(network.dht, f"{run}.native", network.peer_id, refresh_s=REFRESH_S)
        self._stopped = threading.Event()
        self._stamp = 0.0
        #: of the others' records that were read
        self._stamps: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="whereabouts", daemon=True)

    def first_look(self) -> list[Head]:
        """Ask the DHT now; returns where the others stand."""
        addresses = [one for one in self._network.visible_addresses() if len(one) <= MAX_ADDRESS]
        self._records.publish(addresses=addresses[:MOST_ADDRESSES])
        if not any(self._records.refresh(FIRST_LOOK_S) for _ in range(FIRST_LOOKS)):
            log.warning("the DHT has not answered for %.0f s: who trains is not known here", FIRST_LOOKS * FIRST_LOOK_S)
        return self._look()

    def start(self) -> None:
        """Publish now, then whenever something changes."""
        self._publish()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(LOOK_S)
        self._records.close(STOP_S)

    def _look(self) -> list[Head]:
        heads = []
        records = self._records.read()
        without, mine = set(), self._driver.status.head
        if self._agreement is not None:
            self._agreement.present(records)
        self._stamps = {peer: stamp for peer, stamp in self._stamps.items() if peer in records}
        for peer, record in records.items():
            if peer == self._network.peer_id:
                continue
            self._introductions.know(peer, _read_addresses(record.get("addresses")))
            if self._agreement is not None:
                self._agreement.heard(peer, record.get("parameters"))
            found = _read(record.get("place"))
            if found is not None:
                if self._stamps.get(peer) != found.stamp:  # (others say nothing new)
                    self._stamps[peer] = found.stamp
                    self._driver.saw(peer, found)
                heads.append(found.head)
                if record.get("owes") is True or (mine is not None and mine.outweighs(found.head)):
                    without.add(peer)
        self.without = frozenset(without)
        return heads

    def _publish(self) -> None:
        status = self._driver.status
        head = status.head
        if head is not None:
            place = [head.epoch, head.lineage, head.samples, status.samples, self._reduces, status.cuts]
            self._stamp = max(time.time(), self._stamp + 1e-3)  # grows, whatever is done to the clock
            self._records.publish(
                place=[*place, self._stamp],
                owes=self._owes() or None,
                parameters=self._agreement and self._agreement.record(),
            )

    def _run(self) -> None:
        published: tuple[float, Head | None, int, bool] = (0.0, None, 0, False)
        while not self._stopped.wait(LOOK_S if published[0] else JOINS_S):
            try:
                self._look()
                status, now = self._driver.status, time.monotonic()
                what = (status.head, status.cuts, self._owes())
                if status.head is not None and now - published[0] > (PUBLISH_S if what != published[1:] else AGAIN_S):
                    published = (now, *what)
                    self._publish()
            except Exception:  # memory, say. Without this thread nobody would be found any more, nor this peer
                log.exception("records of peers were not read or published, and will be in a moment")
                self._stopped.wait(PUBLISH_S)


def _read_addresses(value: Any) -> list[str]:
    """What another peer says of its addresses: such as could be some."""
    if not isinstance(value, list):
        return []
    return [one for one in value[:MOST_ADDRESSES] if isinstance(one, str) and len(one) <= MAX_ADDRESS]


def _read(value: Any) -> Place | None:
    """What another peer has published; None if it is no such thing."""
    if not isinstance(value, list) or len(value) != 7:
        return None
    epoch, lineage, total, samples, reduces, cuts, stamp = value
    counts = all(type(one) is int and 0 <= one < 2**63 for one in (epoch, total, samples, cuts))
    if not counts or not isinstance(lineage, bytes) or len(lineage) > 64:
        return None
    if not isinstance(reduces, bool) or not isinstance(stamp, float) or not math.isfinite(stamp):
        return None
    head = Head(epoch=epoch, lineage=lineage, samples=total)
    return Place(head=head, samples=samples, stamp=stamp, reduces=reduces, cuts=cuts) if head.can_be else None
