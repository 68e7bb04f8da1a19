"""Whether this peer's line is so slow that the others would wait for its gradient in every round."""

from __future__ import annotations

from lightning_hivemind.engine.native.protocol.lineage import PeerId
from lightning_hivemind.engine.native.protocol.plan import Plan

#: plans one after another that say so, or say otherwise: a single measurement says little
ROUNDS = 2
#: it is worth it if a round would be longer by so many seconds, and by so large a part of a step
LEAST_S, LEAST_PART = 0.1, 0.1


class Line:
    """See the module."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self.slow = False
        self._against = 0
        self._last: float | None = None

    def observe(self, plan: Plan, takes_s: float, now: float) -> None:
        """A round has begun, and so long does this peer take to send its gradient."""
        last, self._last = self._last, now
        if last is None:
            return
        slow = self._me in plan.slow and takes_s > max(LEAST_S, LEAST_PART * (now - last))
        self._against = self._against + 1 if slow != self.slow else 0
        if self._against >= ROUNDS:
            self.slow, self._against = slow, 0
