"""The steps by which this peer came to where it stands, so that it can tell which ones another lineage undoes (I4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.lineage import Commit, Head

#: of the last steps all are remembered; the further back, the fewer; bytes of a lineage that tell it from others
REMEMBERED, MARK_BYTES = 4096, 8


@dataclass(frozen=True, slots=True)
class Undone:
    """Steps from ``first`` to ``last``, in which there were so many ``samples`` of this peer."""

    first: int
    last: int
    samples: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A step that the rounds have decided, with so many samples of this peer (``mine``); perhaps not made here yet."""

    commit: Commit
    mine: int

    @property
    def epoch(self) -> int:
        return self.commit.head.epoch


class Trail:
    """See the module. ``head`` is where this peer stands."""

    def __init__(self, head: Head) -> None:
        self.head = head
        #: at each epoch that is remembered, in order: whose lineage it was, and the samples of this peer in the steps
        #: since the one before; None: no step led there
        self._way: dict[int, tuple[bytes, int | None]] = {head.epoch: (_mark(head), None)}
        #: further steps with samples of this peer, in order of their epochs
        self._ahead: list[Decided] = []

    @property
    def marks(self) -> bytes:
        """For whoever takes this peer's state: the head's, then those before it, as :func:`remembered`."""
        found = []
        for epoch in remembered(self.head.epoch):
            if epoch not in self._way:
                break  # the trail begins after that
            found.append(self._way[epoch][0])
        return b"".join(found)

    def step(self, head: Head, mine: int) -> None:
        """One step on, to ``head``, with so many samples of this peer."""
        self.head = head
        self._way[head.epoch] = _mark(head), mine
        self._ahead = [one for one in self._ahead if one.epoch > head.epoch]
        if not head.epoch % REMEMBERED:
            self._way = _thinned(self._way, set(remembered(head.epoch)))

    def take(self, head: Head, marks: bytes, decided: Iterable[Decided] = ()) -> Undone | None:
        """This peer goes to ``head`` by the way of these ``marks``. None if that undoes no step, as far as is known.

        ``decided``: those steps since the last call.
        """
        parts = [marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)]
        theirs = dict(zip(remembered(head.epoch), parts, strict=False))
        shared = max((epoch for epoch, (mark, _) in self._way.items() if theirs.get(epoch) == mark), default=-1)
        parted = any(theirs.get(epoch, mark) != mark for epoch, (mark, _) in self._way.items())
        undone = {epoch: mine for epoch, (_, mine) in self._way.items() if epoch > shared and mine is not None}
        undone = undone if parted else {}  # else it is behind, or it goes a step back on the same way
        told = (*self._ahead, *(one for one in decided if one.epoch > self.head.epoch))
        ahead = list({one.commit.head: one for one in told}.values())  # whoever follows twice decides twice
        lost, self._ahead = _parted_from(head, theirs, ahead, {self._way[epoch][0] for epoch in undone})
        common = {epoch: one for epoch, one in self._way.items() if epoch <= shared}
        own = {one.epoch: one.mine for one in ahead if one not in lost}
        rest = {epoch: (theirs[epoch], own.get(epoch, 0)) for epoch in reversed(theirs) if epoch not in common}
        self.head, self._way = head, _thinned(dict(sorted((common | rest).items())), set(theirs))
        epochs = [*undone, *(one.epoch for one in lost)]
        samples = sum(undone.values()) + sum(one.mine for one in lost)
        return Undone(min(epochs), max(epochs), samples) if epochs else None


def remembered(last: int) -> Iterator[int]:
    """Epochs that are remembered at epoch ``last``, newest first: all of the last :data:`REMEMBERED`, then every second
    one of as many, every fourth of twice as many, and so on. One step later they are among these and the new one.
    """
    epoch = last
    while epoch >= 0:
        spacing = 1 << ((last - epoch) // REMEMBERED).bit_length()
        if epoch % spacing:
            epoch -= epoch % spacing
            continue  # the spacing may be wider there
        yield epoch
        epoch -= 1


def sound_marks(head: Head, marks: object) -> bool:
    """Whether these can be the marks of a trail to ``head``."""
    if not isinstance(marks, bytes) or len(marks) % MARK_BYTES or marks[:MARK_BYTES] != _mark(head):
        return False
    return sum(1 for _ in zip(remembered(head.epoch), range(len(marks) // MARK_BYTES), strict=False)) == (
        len(marks) // MARK_BYTES
    )


def _parted_from(
    head: Head, theirs: dict[int, bytes], ahead: list[Decided], undone: set[bytes]
) -> tuple[list[Decided], list[Decided]]:
    """Of these steps: those that are not on the way to ``head``, nor lead on from it; and those that lead on."""
    lost, further = [], []
    for one in sorted(ahead, key=lambda one: one.epoch):
        ends, begins = _mark(one.commit.head), _mark(one.commit.parent)
        if (
            begins in undone
            or theirs.get(one.epoch, ends) != ends
            or (one.epoch == head.epoch + 1 and begins != _mark(head))
        ):
            lost.append(one)
            undone.add(ends)
        elif one.epoch > head.epoch:
            further.append(one)
    return lost, further


def _thinned(way: dict[int, tuple[bytes, int | None]], kept: set[int]) -> dict[int, tuple[bytes, int | None]]:
    """Only these epochs; the samples of the others count at the next one that is left, or are forgotten at the end."""
    found: dict[int, tuple[bytes, int | None]] = {}
    before: int | None = None
    for epoch, (mark, mine) in way.items():
        total = None if mine is None and before is None else (mine or 0) + (before or 0)
        if epoch in kept:
            found[epoch], before = (mark, total), None
        else:
            before = total
    return found


def _mark(head: Head) -> bytes:
    return head.lineage[:MARK_BYTES]
