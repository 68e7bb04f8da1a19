"""Which values a round is of: of all parameters, or of one fragment of them after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from lightning_hivemind.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Stretch:
    """Of the flattened tensor at ``place``, the values from ``begin`` to before ``end``."""

    place: int
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.begin

    def of(self, tensor: Tensor) -> Tensor:
        """(elements,): a view, if the tensor is contiguous."""
        return tensor.reshape(-1)[self.begin : self.end]


class Fragments:
    """Tensors laid one after the other, cut into ``count`` fragments of one length.

    Where that is no whole number, some begin one value before the one before them ends.

    Args:
        sizes: of the tensors, in values; in all, at least ``count``.

    Raises:
        ArgumentError: there are fewer.

    Attributes:
        sizes: of what a round has: tensor by tensor, or of a fragment.
    """

    def __init__(self, sizes: Sequence[int], count: int = 1) -> None:
        self._spans = list(zip(accumulate([0, *sizes]), sizes, strict=False))
        self._count, total = count, sum(sizes)
        if count > max(total, 1):
            raise ArgumentError(f"StreamingDiLoCo(fragments={count}): this model has {total} values. Give fewer.")
        self._length, self._total = -(-total // count), total
        self.sizes = list(sizes) if count == 1 else [self._length]

    def of(self, epoch: int) -> list[Stretch]:
        """What the round that leads on from ``epoch`` has."""
        begin = epoch % self._count * self._total // self._count
        end = begin + self._length
        found = []
        for place, (first, size) in enumerate(self._spans):
            low, high = max(begin, first), min(end, first + size)
            if low < high or self._count == 1:
                found.append(Stretch(place, low - first, high - first))
        return found
