"""The peers that this one knows of: where they stand, who is gone, who calls the next round."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId, rank
from lightning_hivemind.engine.native.protocol.messages import Progress
from lightning_hivemind.engine.native.protocol.settings import Settings

NEVER = float("-inf")


@dataclass(kw_only=True, slots=True)
class Seen:
    """What is known of another peer. ``stamp`` orders its records."""

    head: Head
    samples: int
    reduces: bool = True
    stamp: float = NEVER


class Roster:
    """See the module. ``samples`` are this peer's own for the next commit."""

    def __init__(self, settings: Settings, me: PeerId, reduces: bool) -> None:
        self._run, self._target, self._me, self._reduces = settings.run, settings.target_samples, me, reduces
        self.samples = 0
        self._seen: dict[PeerId, Seen] = {}
        #: lost ones, and the stamp of the last record before that: older records do not bring them back
        self._gone: dict[PeerId, float] = {}
        #: candidates that let a round pass at this epoch
        self._idle: set[PeerId] = set()
        #: what others say that the swarm has
        self._told = 0

    # ------------------------------------------------------------------ what is heard of others

    def record(self, peer: PeerId, head: Head, samples: int, reduces: bool, stamp: float, *, outdated: bool) -> bool:
        """Take a record in; False if it is older than what is known. ``outdated``: see :meth:`note`."""
        known = self._seen.get(peer)
        last = max(self._gone.get(peer, NEVER), known.stamp if known is not None else NEVER)
        if peer == self._me or stamp <= last:
            return False
        self._gone.pop(peer, None)
        self.note(peer, head, samples, outdated=outdated)
        self._seen[peer].reduces, self._seen[peer].stamp = reduces, stamp
        return True

    def note(self, peer: PeerId, head: Head, samples: int, *, outdated: bool) -> None:
        """Remember where a peer says that it stands.

        ``outdated``: it names a head that this peer's lineage has left behind. If it is known to have left it, too,
        this was said before and arrives late.
        """
        known = self._seen.get(peer)
        if peer == self._me:
            return
        if known is None:
            self._seen[peer] = Seen(head=head, samples=samples)
        elif not outdated or known.head.epoch <= head.epoch:
            known.head, known.samples = head, samples

    def told(self, swarm_samples: int) -> None:
        """Another peer knows of so many samples in the swarm."""
        self._told = max(self._told, swarm_samples)

    def lost(self, peer: PeerId) -> None:
        known = self._seen.get(peer)
        self._gone[peer] = known.stamp if known is not None else NEVER

    def alive(self, peer: PeerId) -> None:
        """It has just said something."""
        self._gone.pop(peer, None)

    def moved(self, peers: set[PeerId], parent: Head, head: Head) -> None:
        """A commit leads from ``parent`` to ``head``, and these were in its round. Whose turn it is begins anew."""
        for peer in peers & set(self._seen):
            if self._seen[peer].head == parent:
                self._seen[peer].head, self._seen[peer].samples = head, 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what held only for the round that has just ended."""
        self._told = 0
        self._idle.clear()

    def let_pass(self, peer: PeerId) -> None:
        """It should have called a round, and did not."""
        self._idle.add(peer)

    # ------------------------------------------------------------------ what follows from it

    def knows(self, peer: PeerId) -> bool:
        return peer in self._seen

    def reduces(self, peer: PeerId) -> bool:
        """Whether all others can reach it."""
        return self._seen[peer].reduces

    def living(self) -> list[PeerId]:
        """All others that are not lost, in a fixed order."""
        return sorted(peer for peer in self._seen if peer not in self._gone)

    def reachable(self, peers: set[PeerId]) -> set[PeerId]:
        return {peer for peer in peers if peer not in self._gone}

    def candidate(self, head: Head) -> PeerId:
        """Who calls the next round: the first by rank of those at ``head`` that can be reached."""
        here = [(not self._reduces, rank(self._run, head.epoch, self._me), self._me)]
        for peer in self.living():
            if self._seen[peer].head == head and peer not in self._idle:
                here.append((not self._seen[peer].reduces, rank(self._run, head.epoch, peer), peer))
        return min(here)[2]

    def outranks(self, one: PeerId, other: PeerId, epoch: int) -> bool:
        return rank(self._run, epoch, one) < rank(self._run, epoch, other)

    def enough(self, head: Head) -> bool:
        """Whether a round is due."""
        return self.swarm_samples(head) >= self._target

    def swarm_samples(self, head: Head) -> int:
        """For the next commit after ``head``: this peer's, and what is known of the others'."""
        return max(self._counted(head), self._told)

    def progress(self, head: Head) -> Progress:
        return Progress(head=head, samples=self.samples, swarm_samples=self._counted(head))

    def _counted(self, head: Head) -> int:
        here = (one.samples for peer, one in self._seen.items() if one.head == head and peer not in self._gone)
        return self.samples + sum(here)
