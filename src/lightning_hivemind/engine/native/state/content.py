"""The bytes of a state that is given: the model's own while it stays as it is, then a copy.

Most are fetched before the next step. To copy them first would take as much memory as the model has, and fresh memory
takes longer to get than to send its bytes.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.memory import Memory, populate
from lightning_hivemind.engine.native.state.ranges import RANGE_BYTES, digest_of

log = logging.getLogger("lightning_hivemind")

#: of ranges that are being sent
_KEPT_RANGES = 4
#: how often all of it is read before it is copied
_MOST_READ = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, and where its bytes begin."""

    source: Tensor
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.source.nbytes


class Content:
    """See the module. Thread-safe.

    Args:
        pieces: in order; between them are zeros. CPU and contiguous, if it is not copied at once.

    Attributes:
        size: bytes of all of it.
        wanted: somebody fetches it, so it must outlive a step.
        was_changed: somebody else than a step has changed the model meanwhile (a hook that clamps weights, say): such
            a model's state must be copied at once.
    """

    def __init__(self, pieces: Sequence[Piece], size: int) -> None:
        self.size, self.wanted, self.was_changed = size, True, False
        self._lock = threading.Lock()
        self._pieces: Sequence[Piece] = pieces
        self._offsets = [piece.offset for piece in pieces]
        #: where the copy is, or will be
        self._room: Tensor | None = None
        self._copy: Tensor | None = None
        self._gone = False
        #: of ranges that were described, by where they begin
        self._digests: dict[int, bytes] = {}
        self._read_bytes = 0
        self._ranges = Memory(kept_bytes=_KEPT_RANGES * RANGE_BYTES)

    @classmethod
    def of(cls, memory: Tensor) -> Content:
        """uint8 CPU (bytes,), which stays as it is."""
        content = cls((), memory.numel())
        content._copy = memory
        return content

    @property
    def gone(self) -> bool:
        """The model has another state now, and nobody wanted this one."""
        return self._gone

    @property
    def is_at_risk(self) -> bool:
        """It would have to be copied before a step."""
        return self.wanted and self._copy is None and not self._gone

    def read(self, place: slice) -> memoryview | None:
        """These bytes; None if they are :attr:`gone`. What is handed out stays as it is."""
        with self._lock:
            if self._copy is None and self._read_bytes >= _MOST_READ * self.size:
                self._copy_or_give_up()  # whoever asks for more must not make this peer hold more
            if self._gone:
                return None
            if self._copy is not None:
                return memory_of(self._copy)[place]
            piece = self._ranges.bytes(place.stop - place.start)
            self._write(piece, place.start)
            data = memory_of(piece)
            if self._digests:
                self._read_bytes += len(data)
                if digest_of(data) != self._digests.get(place.start):
                    self._end(was_changed=True)
                    return None
            return data

    def describe(self, places: Sequence[slice]) -> tuple[bytes, ...] | None:
        """Digests of its ranges; None if one is :attr:`gone`. Only these ranges are read from then on."""
        found = []
        for place in places:
            data = self.read(place)
            if data is None:
                return None
            found.append(digest_of(data))
        with self._lock:
            self._digests = {place.start: digest for place, digest in zip(places, found, strict=True)}
        return tuple(found)

    def copy(self, memory: Tensor | None = None) -> Tensor | None:
        """All of it, uint8 CPU (size,), in memory of its own; None if it is :attr:`gone`. Raises MemoryError.

        ``memory``: for that, ready to be used; of another size it is not used.
        """
        with self._lock:
            room = None
            if memory is not None and memory.numel() == self.size:
                self._room = memory
            elif self._copy is None and not self._gone and self._room is None:
                room = self._room = Memory().bytes(self.size)
        if room is not None:
            populate(room)  # meanwhile whoever must may write there
        with self._lock:
            return self._make_copy()

    def change(self) -> None:
        """The model is about to have another state."""
        with self._lock:
            if self.wanted:
                self._copy_or_give_up()
            elif self._copy is None:
                self._end()

    # ------------------------------------------------------------------ with the lock

    def _copy_or_give_up(self) -> None:
        try:
            self._make_copy()
        except Exception:  # training goes on
            log.warning("a peer that fetches this one's state has to begin anew: no copy can be made", exc_info=True)
            self._end()

    def _end(self, *, was_changed: bool = False) -> None:
        self._gone = True
        self.was_changed |= was_changed  # still so when the next step comes
        self._pieces, self._room = (), None

    def _make_copy(self) -> Tensor | None:
        if self._copy is None and not self._gone:
            copy = self._room if self._room is not None else Memory().bytes(self.size)
            self._write(copy, 0)
            self._copy, self._room, self._pieces = copy, None, ()
        return self._copy

    @torch.no_grad()
    def _write(self, target: Tensor, start: int) -> None:
        """The bytes from ``start`` on."""
        stop, written = start + target.numel(), start
        for piece in self._pieces[max(0, bisect.bisect_right(self._offsets, start) - 1) :]:
            begin, end = max(start, piece.offset), min(stop, piece.end)
            if piece.offset >= stop:
                break
            if begin < end:
                target[written - start : begin - start].zero_()
                source = piece.source.detach().reshape(-1).view(torch.uint8)
                target[begin - start : end - start].copy_(source[begin - piece.offset : end - piece.offset])
                written = end
        target[written - start :].zero_()
