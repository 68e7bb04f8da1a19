"""A helper without a state of its own passes on that of a peer which whoever asks cannot reach.

Two peers behind NAT, both without a port that could be forwarded, train with one helper between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId
from lightning_hivemind.engine.native.state.content import Content
from lightning_hivemind.engine.native.state.download import Downloads, Reader
from lightning_hivemind.engine.native.state.snapshot import Description, Snapshot

#: who asks may know of a peer that this one has still to hear of: records are some seconds late
HEARS_S, LOOK_S = 5.0, 0.1


class Relay:
    """See the module. For a :class:`.Donor`, in whose thread it downloads.

    Args:
        trainers: who can be asked for a state now.
        head: where the swarm is.
        read: checks a description against this peer's model.
        timeout_s: for a whole state; who waits for it asks again.
    """

    def __init__(
        self,
        downloads: Downloads,
        trainers: Callable[[], Sequence[PeerId]],
        head: Callable[[], Head | None],
        read: Reader,
        should_abort: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._downloads, self._trainers, self._head, self._read = downloads, trainers, head, read
        self._should_abort = should_abort

    def copy(self, known: Snapshot | None) -> Snapshot | None:
        """A state of the swarm as it is now; None if nobody has one. Raises StateError."""
        if known is not None and known.head == self._head():
            return known
        deadline = time.monotonic() + HEARS_S
        while True:
            found = self._fetch()
            if found is not None or time.monotonic() >= deadline or self._should_abort():
                return found
            time.sleep(LOOK_S)

    def _fetch(self) -> Snapshot | None:
        wanted = self._head()
        described: dict[tuple[Head, bytes], bytes] = {}

        def read(data: memoryview) -> Description:
            description = self._read(data)
            described[description.head, description.key] = bytes(data)
            return description

        # whoever asks has the averages that lead on from there: where the swarm goes meanwhile does not matter
        fetch = self._downloads.fetch
        found = fetch(self._trainers, read, self._timeout_s, self._should_abort, enough=lambda head: head == wanted)
        if found is None:
            return None
        description, memory = found
        head, key = description.head, description.key
        return Snapshot(head, described[head, key], Content.of(memory), description.spans, description.digest, key)
