"""Finds nodes of the DHT again that were taken for dead.

hivemind's DHT forgets a node when one request is not answered in time, and never looks for it again. After a pause of
one peer (a laptop that slept, a machine that swapped) two peers may have forgotten one another: each is alone in its
half of the run for good, though their daemons are still connected. Seen after one freeze in eight of 8 s each.

Runs in the DHT process. Can go when hivemind pings peers that are connected and not in its routing table.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import hivemind
from hivemind.dht.node import DHTNode

log = logging.getLogger("lightning_hivemind")

LOOK_EVERY_S = 1.0
#: after this many pings in vain a peer is forgotten; the pauses between them double, up to 64 s
PINGS = 10
MOST_KNOWN = 256


@dataclass(slots=True)
class _Missing:
    """A peer that was, or should be, in the routing table: how often it was pinged in vain, and when it is again."""

    failures: int = 0
    due: float = 0.0


@dataclass(slots=True)
class Neighbours:
    """Pings peers that are connected, or were known, and are not in the routing table."""

    node: Any
    _missing: dict[Any, _Missing] = field(default_factory=dict)
    _known: set[Any] = field(default_factory=set)

    async def keep(self) -> None:
        """Until the process ends."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.look(asyncio.get_running_loop().time())
            except Exception as error:  # the daemon may be busy, or ending: nothing that this could do
                log.debug("looking for lost nodes of the DHT failed: %r", error)

    async def look(self, now: float) -> None:
        """Once: remember who is there, ping who is not."""
        node = self.node
        here = set(node.protocol.routing_table.peer_id_to_uid)
        connected = {info.peer_id for info in await node.p2p.list_peers()}
        self._known |= here
        wanted = (self._known | connected) - here - {node.peer_id}
        self._missing = {peer: one for peer, one in self._missing.items() if peer in wanted}
        asked = [(peer, self._missing.setdefault(peer, _Missing())) for peer in list(wanted)[:MOST_KNOWN]]
        await asyncio.gather(*(self._ping(peer, one, now) for peer, one in asked if now >= one.due))

    async def _ping(self, peer: Any, one: _Missing, now: float) -> None:
        if await self.node.protocol.call_ping(peer) is not None:  # puts it back into the routing table
            self.node.blacklist.register_success(peer)
            return
        one.failures += 1
        one.due = now + LOOK_EVERY_S * 2 ** min(one.failures, 6)
        if one.failures >= PINGS:
            self._known.discard(peer)


async def keep_neighbours(dht: hivemind.DHT, node: DHTNode) -> None:
    """Start it, in the DHT process."""
    asyncio.get_running_loop().create_task(Neighbours(node).keep())


async def connected(dht: hivemind.DHT, node: DHTNode) -> set[str]:
    """Ids of the peers that the daemon has a connection to; runs in the DHT process."""
    return {info.peer_id.to_base58() for info in await node.p2p.list_peers()}
