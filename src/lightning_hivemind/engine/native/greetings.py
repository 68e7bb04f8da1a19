"""Whom this peer has greeted, so that a connection is warm before the first round with it."""

from __future__ import annotations

from lightning_hivemind.engine.native.protocol.lineage import PeerId

#: so many in so long: each is a thread until it is known that nobody is there, and records of nobody cost nothing
MOST, WITHIN_S = 64, 10.0
#: of whom it is kept that they were greeted
MOST_KNOWN = 4096


class Greetings:
    """Each once. Who comes when there were too many is greeted at its next record, or connected to by a round."""

    def __init__(self) -> None:
        self._at: dict[PeerId, float] = {}

    def due(self, peer: PeerId, now: float) -> bool:
        """Whether to greet it now."""
        if peer in self._at or sum(now - at < WITHIN_S for at in self._at.values()) >= MOST:
            return False
        self._at[peer] = now
        if len(self._at) > MOST_KNOWN:
            del self._at[next(iter(self._at))]
        return True
