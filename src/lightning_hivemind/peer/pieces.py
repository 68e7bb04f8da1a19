"""Which rank has which piece of each parameter, and the way of pieces to whole tensors at rank 0 and back.

All goes through host memory, many small pieces in one message: no device ever has a whole parameter for this, nor does
any rank but rank 0, and there is at most one message of each rank on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hivemind.peer.ranks import Ranks

#: of one message, unless a single piece is larger
MESSAGE_BYTES = 32 << 20
#: where a piece begins in one, so that any dtype can be read where it lies
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """``box`` (first and behind the last index in each dimension) of a whole parameter in the shape ``view``."""

    view: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Where it lies in a whole, contiguous tensor."""
        return whole.view(self.view)[tuple(slice(*one) for one in self.box)]


def all_of(shape: Sequence[int]) -> Piece:
    """The whole parameter."""
    return Piece(tuple(shape), tuple((0, size) for size in shape))


def interval(numel: int, begin: int, end: int) -> Piece:
    """Those values of a parameter of so many, as they lie in memory."""
    begin, end = min(begin, numel), min(end, numel)
    return Piece((numel,), ((begin, max(begin, end)),))


class Pieces:
    """See the module.

    Args:
        mine: of each parameter, this rank's piece, which may be empty, or the same as another rank's.
        group: a process group that sends what lies in host memory.
    """

    def __init__(self, ranks: Ranks, mine: Sequence[Piece], group: Any) -> None:
        self._ranks, self._group = ranks, group
        told = ranks.share("pieces", [[one.view, one.box] for one in mine])
        self._of = [[_piece(*one) for one in pieces] for pieces in told]
        #: by rank: of each parameter, whether this rank's piece is the one that goes to rank 0
        self._speaks: list[list[bool]] = []
        known: list[set[Piece]] = [set() for _ in mine]
        for pieces in self._of:
            self._speaks.append([one.numel > 0 and one not in seen for one, seen in zip(pieces, known, strict=True)])
            for one, seen in zip(pieces, known, strict=True):
                seen.add(one)

    @property
    def speaks_for(self) -> list[bool]:
        """Of each parameter, whether this rank has a piece, and nobody before it the same one."""
        return self._speaks[self._ranks.rank]

    def gather(
        self,
        which: Sequence[int],
        mine: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype],
        whole: Sequence[Tensor],
    ) -> None:
        """Of the parameters ``which``: this rank's pieces into the ``whole`` of rank 0, in host memory (else empty).

        None: zeros.
        """
        if not self._ranks.leads:
            place = {number: at for at, number in enumerate(which)}
            for message in self._messages(self._ranks.rank, which, dtypes, every=False):
                buffer = message.buffer()
                for number, part, _ in message.parts(buffer):
                    _put(mine[place[number]], part)
                dist.send(buffer, 0, group=self._group)
            return
        targets = dict(zip(which, whole, strict=True))
        for number, one in zip(which, mine, strict=True):
            _put(one, self._of[0][number].of(targets[number]))
        for at_once in self._of_others(which, dtypes, every=False):
            under_way = [_under_way(dist.irecv(buffer, rank, group=self._group)) for rank, _, buffer in at_once]
            for work, (_, message, buffer) in zip(under_way, at_once, strict=True):
                work.wait()
                for number, part, piece in message.parts(buffer):
                    piece.of(targets[number]).copy_(part)

    def spread(
        self, which: Sequence[int], mine: Sequence[Tensor], dtypes: Sequence[torch.dtype], whole: Sequence[Tensor]
    ) -> None:
        """The way back: into ``mine``, at every rank."""
        if not self._ranks.leads:
            place = {number: at for at, number in enumerate(which)}
            for message in self._messages(self._ranks.rank, which, dtypes, every=True):
                buffer = message.buffer()
                dist.recv(buffer, 0, group=self._group)
                for number, part, piece in message.parts(buffer):
                    mine[place[number]].view(piece.shape).copy_(part)
            return
        sources = dict(zip(which, whole, strict=True))
        for at_once in self._of_others(which, dtypes, every=True):
            under_way = []
            for rank, message, buffer in at_once:
                for number, part, piece in message.parts(buffer):
                    part.copy_(piece.of(sources[number]))
                under_way.append(_under_way(dist.isend(buffer, rank, group=self._group)))
            for work in under_way:
                work.wait()
        for number, one in zip(which, mine, strict=True):
            piece = self._of[0][number]
            one.view(piece.shape).copy_(piece.of(sources[number]))

    def _of_others(
        self, which: Sequence[int], dtypes: Sequence[torch.dtype], *, every: bool
    ) -> Iterator[list[tuple[int, _Message, Tensor]]]:
        """At rank 0: with each other rank that has one left the next message, and memory for it."""
        ranks = range(1, self._ranks.size)
        for at_once in zip_longest(*(self._messages(rank, which, dtypes, every=every) for rank in ranks)):
            yield [(rank, one, one.buffer()) for rank, one in zip(ranks, at_once, strict=True) if one is not None]

    def _messages(
        self, rank: int, which: Sequence[int], dtypes: Sequence[torch.dtype], *, every: bool
    ) -> Iterator[_Message]:
        """To that rank with ``every`` piece that it has, or from it with those that it speaks for."""
        message = _Message([])
        for number, dtype in zip(which, dtypes, strict=True):
            piece = self._of[rank][number]
            if not piece.numel or not (every or self._speaks[rank][number]):
                continue
            size = -(-piece.numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            if message.contents and message.size + size > MESSAGE_BYTES:
                yield message
                message = _Message([])
            message.contents.append((number, piece, dtype, message.size))
            message.size += size
        if message.contents:
            yield message


@dataclass(slots=True)
class _Message:
    """Number of the parameter, piece, dtype and place of each content; ``size`` bytes in all."""

    contents: list[tuple[int, Piece, torch.dtype, int]]
    size: int = 0

    def buffer(self) -> Tensor:
        return torch.empty(self.size, dtype=torch.uint8, device="cpu")

    def parts(self, buffer: Tensor) -> Iterator[tuple[int, Tensor, Piece]]:
        for number, piece, dtype, begin in self.contents:
            part = buffer[begin : begin + piece.numel * dtype.itemsize].view(dtype)
            yield number, part.view(piece.shape), piece


def _put(value: Tensor | None, part: Tensor) -> None:
    if value is None:
        part.zero_()
    else:
        part.copy_(value.reshape(part.shape))


def _piece(view: Sequence[int], box: Sequence[Sequence[int]]) -> Piece:
    return Piece(tuple(view), tuple((begin, end) for begin, end in box))


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not of the group"
    return work
