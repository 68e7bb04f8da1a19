"""The steps by which this peer came to where it stands, so that it can tell which ones another lineage undoes (I4)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.lineage import Head

#: steps that are remembered, and told with a state; bytes of a lineage that tell it from others
REMEMBERED, MARK_BYTES = 4096, 8


@dataclass(frozen=True, slots=True)
class Undone:
    """Steps from ``first`` to ``last``, in which there were so many ``samples`` of this peer."""

    first: int
    last: int
    samples: int


class Trail:
    """See the module. ``head`` is where this peer stands."""

    def __init__(self, head: Head) -> None:
        self.head = head
        #: at each of the last epochs: whose lineage it was, and the samples of this peer in the step there; None: no
        #: step led there
        self._way: dict[int, tuple[bytes, int | None]] = {head.epoch: (_mark(head), None)}

    @property
    def marks(self) -> bytes:
        """For whoever takes this peer's state: one for each of the last epochs, the head's at the end."""
        return b"".join(mark for mark, _ in self._way.values())

    def step(self, head: Head, mine: int) -> None:
        """One step on, to ``head``, with so many samples of this peer."""
        self.head = head
        self._way[head.epoch] = _mark(head), mine
        if len(self._way) > REMEMBERED:
            del self._way[next(iter(self._way))]

    def take(self, head: Head, marks: bytes) -> Undone | None:
        """This peer goes to ``head`` by the way of these ``marks``. None if that undoes no step, as far as is known."""
        first = head.epoch + 1 - len(marks) // MARK_BYTES
        theirs = {first + at // MARK_BYTES: marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)}
        undone: dict[int, int] = {}
        way: dict[int, tuple[bytes, int | None]] = {epoch: (mark, 0) for epoch, mark in theirs.items()}
        for epoch, (mark, mine) in self._way.items():
            if theirs.get(epoch) == mark:
                way[epoch] = mark, mine
            elif epoch >= first and mine is not None:
                undone[epoch] = mine
        self.head, self._way = head, way
        return Undone(min(undone), max(undone), sum(undone.values())) if undone else None


def sound_marks(head: Head, marks: object) -> bool:
    """Whether these can be the marks of a trail to ``head``."""
    fits = isinstance(marks, bytes) and 0 < len(marks) <= MARK_BYTES * min(REMEMBERED, head.epoch + 1)
    return fits and len(marks) % MARK_BYTES == 0 and marks[-MARK_BYTES:] == _mark(head)  # type: ignore[arg-type, index]


def _mark(head: Head) -> bytes:
    return head.lineage[:MARK_BYTES]
