"""Commits, and the chain that they form: one lineage per run (invariants I3 and I4)."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PeerId = str
#: of one peer, for one step: who says that it has more has made a mistake, or lies
MOST_SAMPLES = 1 << 40
#: of a head: no run gets there, and what follows on it can still be said
MOST_EPOCHS = MOST_TOTAL = 1 << 62
#: commits that a peer remembers, to tell late peers what became of their contributions
REMEMBERED = 64


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Contribution:
    """What one peer brings to one round: the gradient of ``samples`` samples.

    ``number`` grows with each contribution of this peer, also over its restarts; with the peer it is what a commit
    lists, so that none counts twice.
    """

    peer: PeerId
    number: int
    samples: int


def can_be_summed(contributions: Sequence[Contribution]) -> bool:
    """Whether there can be a step of these: of somebody, of each peer one, each of some samples."""
    counts = all(0 < one.samples <= MOST_SAMPLES for one in contributions)
    return counts and 0 < len(contributions) == len({one.peer for one in contributions})


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Where a peer stands: after ``epoch`` commits of ``lineage``, which hold ``samples`` samples altogether."""

    epoch: int
    lineage: bytes
    samples: int

    @property
    def can_be(self) -> bool:
        """Whether a run can have got there."""
        return 0 <= self.epoch <= MOST_EPOCHS and 0 <= self.samples <= MOST_TOTAL

    @classmethod
    def root(cls, run: str, founder: PeerId) -> Head:
        """Before the first commit: the founder's initial state."""
        return cls(epoch=0, lineage=_digest(b"root", run.encode(), founder.encode()), samples=0)

    @classmethod
    def nowhere(cls) -> Head:
        """Of a peer that has no state: every other head outweighs it."""
        return cls(epoch=0, lineage=b"\xff" * 16, samples=0)

    def outweighs(self, other: Head) -> bool:
        """Which of two lineages survives: the one with more samples; between equals the smaller digest."""
        return (self.samples, other.lineage) > (other.samples, self.lineage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One global step, as every peer applies it.

    Attributes:
        round: in which it was agreed.
        parent: the head that it extends.
        contributions: whose gradients are in the average, in the order in which they were summed.
        digest: of the average's bytes.
        stop: after this step the run ends.
    """

    round: bytes
    parent: Head
    contributions: tuple[Contribution, ...]
    digest: bytes
    stop: bool = False

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.contributions)

    @property
    def head(self) -> Head:
        """Where this commit leads."""
        parts = [f"{one.peer} {one.number} {one.samples}".encode() for one in self.contributions]
        lineage = _digest(self.parent.lineage, self.digest, *parts)
        return Head(epoch=self.parent.epoch + 1, lineage=lineage, samples=self.parent.samples + self.samples)


class History:
    """The last commits of this peer's lineage."""

    def __init__(self) -> None:
        self._commits: deque[Commit] = deque(maxlen=REMEMBERED)

    def add(self, commit: Commit) -> None:
        self._commits.append(commit)

    @property
    def before(self) -> Head | None:
        """Where the last of them led on from."""
        return self._commits[-1].parent if self._commits else None

    def of_round(self, round_id: bytes) -> Commit | None:
        return next((one for one in self._commits if one.round == round_id), None)

    def since(self, head: Head) -> tuple[Commit, ...]:
        """The commits that lead on from ``head``; empty if it is not (or no longer) known to be of this lineage."""
        return following(head, tuple(self._commits))


def following(head: Head, commits: Sequence[Commit]) -> tuple[Commit, ...]:
    """Those of a chain of commits that lead on from ``head``; empty if none does, or if it is no chain."""
    start = next((index for index, commit in enumerate(commits) if commit.parent == head), len(commits))
    chain = tuple(commits[start:])
    unbroken = all(after.parent == before.head for before, after in pairwise(chain))
    return chain if unbroken else ()


def rank(run: str, epoch: int, peer: PeerId) -> bytes:
    """Order of the candidates for coordinator of an epoch (rendezvous hashing: no election, and the load rotates)."""
    return _digest(b"rank", run.encode(), str(epoch).encode(), peer.encode())


def _digest(*parts: bytes) -> bytes:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(4, "big"))
        state.update(part)
    return state.digest()[:16]
