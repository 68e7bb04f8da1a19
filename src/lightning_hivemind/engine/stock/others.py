"""Who else trains, at which epoch, and who will come to the next round."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

from hivemind.p2p import PeerID

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.stock.build import Parts
from lightning_hivemind.engine.stock.rounds import answered
from lightning_hivemind.engine.swarm_records import SwarmRecords
from lightning_hivemind.events import DhtSilent, EventBus
from lightning_hivemind.network.neighbours import connected

FRESH_S = 5.0  # how long the DHT may take for one look before a decision
#: a peer of whose progress the DHT knows nothing, though it trains and is connected, is looked for so long: the DHT
#: forgets a node that was late with one answer, and has it back a second or two later (network/neighbours.py)
LAPSE_S, AGAIN_S = 2.5, 0.25


class Others:
    """What one peer knows of the others. Call it only while the tracker is paused (``pause_updates``)."""

    def __init__(
        self,
        arguments: Arguments,
        parts: Parts,
        records: SwarmRecords,
        events: EventBus,
        should_abort: Callable[[], bool],
    ) -> None:
        self._a, self._parts, self._records, self._events = arguments, parts, records, events
        self._should_abort = should_abort
        self._group_size: int | None = None
        #: of whom nothing was heard in all that time: they are not waited for again until something is
        self._unheard: set[str] = set()

    def look(self) -> None:
        """Read the others' progress; if the DHT is silent, decide with what is known."""
        start = time.monotonic()
        try:
            self._parts.tracker.refresh(FRESH_S, self._should_abort)
            while missing := self._missing():
                if time.monotonic() - start > LAPSE_S or self._should_abort():
                    self._unheard |= missing
                    return
                time.sleep(AGAIN_S)
                self._parts.tracker.refresh(FRESH_S, self._should_abort)
        except (FutureTimeoutError, TimeoutError):
            self._events.emit(DhtSilent(what="the other peers' progress", duration_s=time.monotonic() - start))

    def _missing(self) -> set[str]:
        """Peers that train and are connected, of whose progress there is no report."""
        heard = {PeerID(peer).to_base58() for peer in self._parts.tracker.others_since(0)}
        self._unheard -= heard
        missing = self._records.trainers - heard - self._unheard
        if not missing:
            return missing
        future = self._parts.tracker.dht.run_coroutine(connected, return_future=True)
        return missing & future.result() if answered(future, FRESH_S, self._should_abort) else set()

    def lead(self, epoch: int) -> int:
        """How many epochs the swarm is ahead of ``epoch``."""
        return int(self._parts.tracker.global_epoch) - epoch

    def expected(self, epoch: int, tolerated_lag: int, last_members: frozenset[bytes]) -> set[bytes]:
        """Peers that will come to this round: those at our epoch, and those that are on their way to it.

        On their way are last round's members, and whoever was behind but alive a moment ago: it sees this peer's epoch,
        takes its state, and comes. Without waiting for it, a quick peer would leave it behind for ever.
        """
        tracker = self._parts.tracker
        here = tracker.others_at(*range(epoch, epoch + tolerated_lag + 1))
        members_on_their_way = tracker.others_at(epoch - 1) & last_members
        return here | members_on_their_way | tracker.others_heard_within(self._a.matchmaking_time)

    def resize_groups(self, trainers: int) -> None:
        """Let groups close as soon as ``trainers`` peers, and the auxiliary ones, are in."""
        options = self._a.averager_opts or {}
        size = max(trainers + len(self._records.auxiliaries), options.get("min_group_size", 2))
        if size == self._group_size or "target_group_size" in options:
            return
        self._group_size = size
        for averager in (self._parts.grads, self._parts.state):
            if averager is not None:
                averager.resize_group(size)
