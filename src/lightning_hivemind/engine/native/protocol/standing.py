"""Where this peer stands in the lineage, and what is said to those who stand elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hivemind.engine.native.protocol.actions import Action, Send
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, History, PeerId
from lightning_hivemind.engine.native.protocol.messages import Committed, Ended, News, RoundId
from lightning_hivemind.engine.native.protocol.roster import Roster

#: contributions that are told at once: some two megabytes
MOST_TOLD = 30_000
#: seconds after which who stood at a head without its state may have got it from somebody; twice that the next time
WITHOUT_S = 30.0


class Standing:
    """``head`` is None until the first state is adopted; ``catching_up_to`` is set while another one is fetched."""

    def __init__(self, roster: Roster, emit: Callable[[Action], None]) -> None:
        self._roster, self._emit = roster, emit
        self.head: Head | None = None
        self.catching_up_to: Head | None = None
        #: heads whose state nobody had any more; of each those who lived then, until when they are not followed, and
        #: for how long that was
        self._given_up: dict[Head, tuple[frozenset[PeerId], float, float]] = {}
        self.history = History()

    @property
    def settled(self) -> Head | None:
        """The head, if this peer can take part in a round there."""
        return self.head if self.catching_up_to is None else None

    @property
    def heads(self) -> tuple[Head, ...]:
        """The head, and the one before it, as far as they are known."""
        return tuple(head for head in (self.head, self.history.before) if head is not None)

    def give_up(self, head: Head, now: float) -> None:
        """Nobody that lives has the state of it."""
        *_, before_s = self._given_up.get(head, (WITHOUT_S / 2,))
        without = frozenset((*self._roster.living(), *self._roster.cut))
        self._given_up[head] = without, now + 2 * before_s, 2 * before_s

    def is_given_up(self, head: Head, sender: PeerId, now: float) -> bool:
        """Whether ``sender``, which stands there, was lately one of those without it. Who comes later may have it."""
        without, until, _ = self._given_up.get(head, (frozenset(), 0.0, 0.0))
        return sender in without and now < until

    def knows(self, head: Head) -> bool:
        """Whether this peer's lineage is or was there lately."""
        return head == self.head or self.outdated(head)

    def adopt(self, head: Head, commits: tuple[Commit, ...]) -> None:
        self.catching_up_to = None
        if not commits or commits[0].parent != self.head:
            self.history = History()
        for commit in commits:
            self.history.add(commit)
        self.head = head

    def advance(self, commit: Commit) -> None:
        self.history.add(commit)
        self.head = commit.head

    def tell_outcome(self, peer: PeerId, round_id: RoundId) -> None:
        """What became of a round that is over here."""
        commit = self.history.of_round(round_id)
        if commit is not None:
            self._emit(Send(to=peer, message=Committed(commit=commit)))
        else:
            over = Ended(round=round_id, reason="the round is over", aborted=False)
            self._emit(Send(to=peer, message=over))

    def outdated(self, head: Head) -> bool:
        """Whether this peer's lineage has been there and gone on."""
        return bool(self.history.since(head))

    def same(self, peer: PeerId, head: Head) -> bool:
        """Whether ``peer``, at ``head``, stands where this one does.

        If not, one of the two must hear of it: who is behind, or of a lineage that is outweighed, gets the news.
        """
        if self.head is None or head == self.head:
            return head == self.head
        if self.head.outweighs(head):
            commits = self.history.since(head)
            if sum(len(commit.contributions) for commit in commits) > MOST_TOLD:
                commits = ()  # it takes a state without them
            self._emit(Send(to=peer, message=News(head=self.head, commits=commits)))
        else:
            self._emit(Send(to=peer, message=self._roster.progress(self.head)))  # it will answer with news
        return False
