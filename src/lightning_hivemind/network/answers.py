"""A late answer must not deafen a peer.

A call over libp2p that is given up cancels its future; hivemind forgets the future a moment later. An answer that comes
in between (a process that was paused finds both in its queue) makes the one task that reads from the daemon fail:
nothing that this process asks is answered any more, and it answers nobody, for good. Seen after 5 of 12 pauses of a DHT
process on a busy machine.
Can go when hivemind's ``ControlClient`` looks whether a future is done before it sets a result.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient

log = logging.getLogger("lightning_hivemind")
Read = Callable[[ControlClient, asyncio.StreamReader], Awaitable[None]]


def survive_late_answers() -> None:
    """Mend it in this process and in those that it forks from now on. Safe to call twice."""
    read: Read = ControlClient._read_from_persistent_conn
    if not hasattr(read, "__wrapped__"):
        ControlClient._read_from_persistent_conn = _undeterred(read)


def _undeterred(read: Read) -> Read:
    @functools.wraps(read)
    async def read_on(client: ControlClient, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                return await read(client, reader)
            except asyncio.InvalidStateError:  # this message was read whole, and the next one is whole, too
                log.debug("an answer came after its call was given up")

    return read_on
