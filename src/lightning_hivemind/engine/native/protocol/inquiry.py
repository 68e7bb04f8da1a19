"""What became of a round whose coordinator is lost: members ask one another.

Any commit that somebody saw decides. A member that answers that it saw none takes none from the coordinator afterwards,
so the round is over once all that can be reached have answered so. (If the only receiver of the commit cannot be
reached either, the lineage forks; at the next contact the heavier one wins.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_hivemind.engine.native.protocol.actions import Action, Send
from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId
from lightning_hivemind.engine.native.protocol.messages import Ask, RoundId
from lightning_hivemind.engine.native.protocol.settings import Settings


class Inquiry:
    """From the loss of the coordinator until every other member has answered or is lost, too."""

    def __init__(
        self,
        settings: Settings,
        round_id: RoundId,
        head: Head,
        others: Iterable[PeerId],
        emit: Callable[[Action], None],
        now: float,
    ) -> None:
        self._settings, self._emit = settings, emit
        self.round, self._head = round_id, head
        self._unanswered = set(others)
        #: those who are still with the coordinator, and will tell
        self._informants: set[PeerId] = set()
        self._resend_at, self._deadline = now + settings.resend_s, now + settings.round_s
        self._ask()

    def undecided(self, peer: PeerId) -> None:
        self._unanswered.discard(peer)
        self._informants.discard(peer)

    lost = undecided

    def still_on(self, peer: PeerId) -> None:
        if peer in self._unanswered:
            self._unanswered.discard(peer)
            self._informants.add(peer)

    @property
    def over(self) -> bool:
        """Nobody who can be reached saw a commit."""
        return not self._unanswered and not self._informants

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            self._unanswered.clear()
            self._informants.clear()
        elif now >= self._resend_at:
            self._resend_at = now + self._settings.resend_s
            self._ask()

    @property
    def deadline(self) -> float:
        return min(self._resend_at, self._deadline)

    def _ask(self) -> None:
        for peer in sorted(self._unanswered | self._informants):
            self._emit(Send(to=peer, message=Ask(round=self.round, head=self._head)))
