"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): gradients of matrices are averaged as factors of low rank.

All peers hold the same orthonormal basis B of a matrix's columns, or of its rows. Each gives M B (or M' B, M being its
gradient), which is linear, so the average is that of the mean gradient; with it the step is made, and out of it comes
the basis of the next step, of the other side (alternating them is ACP-SGD's idea, Zhang et al. 2023). So a step needs
one round where PowerSGD needs two, and sends half as much; with twice as many columns, the same.

What the factors leave out of this peer's gradients is added to the next ones. Bases are a function of the averages
alone: peers have the same ones, they are part of a state, and an aborted round changes nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hivemind.engine.native.host import host_zeros
from lightning_hivemind.engine.native.memory import Memory

#: share of a column that must be new to be more than rounding
LEAST_NEW_SHARE = 1e-3
#: bits of the mantissa that are kept of bases and of averaged gradients: peers whose processors round otherwise, in the
#: last bits of float64, then still have the same ones (but for one value in 10^8 and less)
BASIS_BITS, GRADIENT_BITS = 8, 12


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of ``rows`` x ``columns`` at ``start`` of the flat vector of gradients, and the ``rank`` of its factors.

    ``turn``: at epochs of this parity the basis is of its columns.
    """

    start: int
    rows: int
    columns: int
    rank: int
    turn: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of(self, whole: Tensor, epoch: int) -> Tensor:
        """Its part of a flat vector of all gradients, :meth:`turned`."""
        return self.turned(whole[self.start : self.start + self.elements], epoch)

    def turned(self, flat: Tensor, epoch: int) -> Tensor:
        """As a matrix that is multiplied by the epoch's basis from the right."""
        matrix = flat.view(self.rows, self.columns)
        return matrix if self._by_columns(epoch) else matrix.t()

    def factor(self, epoch: int) -> tuple[int, int]:
        """Shape of what is averaged."""
        return (self.rows if self._by_columns(epoch) else self.columns), self.rank

    def _by_columns(self, epoch: int) -> bool:
        return (epoch + self.turn) % 2 == 0


@dataclass(slots=True)
class _Given:
    """A contribution: its factors and the bases that they were made with; ``counted`` once it is in a commit."""

    number: int
    epoch: int
    samples: int
    factors: Tensor
    bases: Tensor
    counted: bool = False


class LowRank:
    """See the module. Its methods may be called from any thread.

    Args:
        shapes: of the trained parameters, in the order of the flat vector; what has more than two dimensions is a
            matrix of the first one and all the others.
        rest: elements of what follows the gradients in that vector, tensor by tensor, and is averaged as it is.
        rank: PowerSGD's, which sends two factors of so many columns: here it is one of twice as many.
        min_compression_ratio: only matrices of which that saves at least this share of the elements.

    Attributes:
        name: goes into the schema.
        sizes: elements of what is averaged in place of the flat vector, tensor by tensor.
        carried: float32 CPU, the bases at the epoch of the optimizer: a part of the state, kept by who steps.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        rest: Sequence[int],
        *,
        rank: int,
        min_compression_ratio: float,
        memory: Memory | None = None,
    ) -> None:
        self._memory = memory or Memory()
        self.name = f"PowerSGD of rank {rank} where it saves {min_compression_ratio:g}"
        self._matrices, plain = _lay_out(shapes, rank, min_compression_ratio)
        gradients = sum(math.prod(shape) for shape in shapes)
        factors = max(sum(math.prod(one.factor(parity)) for one in self._matrices) for parity in (0, 1))
        self._elements = gradients + sum(rest)
        self.sizes = [factors, *(span.stop - span.start for span in plain), *rest]
        #: where what is averaged as it is lies in the flat vector, and where in what is averaged
        self._plain: list[tuple[slice, slice]] = []
        start = factors
        for span in (*plain, slice(gradients, self._elements)):
            self._plain.append((span, slice(start, start := start + span.stop - span.start)))
        self._lock = threading.Lock()
        #: what the factors left out of this peer's sums of gradients, and what they leave out with what is given now
        self._left = host_zeros(sum(one.elements for one in self._matrices))
        self._total = torch.zeros_like(self._left)
        self._given: _Given | None = None
        #: which parameters have ever had a gradient since
        self._ever = host_zeros(len(shapes))
        #: by epoch, from that of the optimizer to the last one that is known; and averages that lead further
        self._bases: dict[int, Tensor] = {}
        self._averages: dict[int, Tensor] = {}
        self.carried = host_zeros(factors)
        self.begin(0)

    # ------------------------------------------------------------------ where this peer is

    def begin(self, epoch: int) -> None:
        """Nothing is known of the gradients yet: any bases will do that are the same at all peers."""
        for index, (_, basis) in enumerate(self._factors(self.carried, epoch - 1)):
            basis.copy_(_orthonormal(host_zeros(*basis.shape), index))
        self.adopted(epoch)

    def adopted(self, epoch: int) -> None:
        """This peer has another state, of ``epoch``, ``carried`` included."""
        with self._lock:
            self._bases, self._averages, self._given = {epoch: self.carried.clone()}, {}, None
            self._left.zero_()
            self._ever.zero_()

    def stands_at(self, epoch: int) -> None:
        """This peer goes on from its own state, of ``epoch``: what it has heard of later ones is void."""
        with self._lock:
            self._bases = {one: bases for one, bases in self._bases.items() if one <= epoch}
            self._averages.clear()

    # ------------------------------------------------------------------ what is given

    def mark(self, marks: Tensor, trained: Tensor) -> None:
        """Into ``marks``: also those that had a gradient before, of which something may have been left out till now.

        ``trained``: 1.0 for each parameter that can have one, else 0.0; float32 CPU.
        """
        with self._lock:
            marks.copy_(torch.maximum(self._ever.mul_(trained), marks, out=self._ever))

    @torch.no_grad()
    def pack(self, mean: Tensor, number: int, samples: int, epoch: int) -> Tensor | None:
        """What to give to a round at ``epoch``; None if the step to there is not known here.

        Args:
            mean: float32 CPU, the flat vector, over ``samples``; not changed.
            number: of the contribution.
        """
        with self._lock:
            self._reach(epoch)
            bases = self._bases.get(epoch)
            if bases is None:
                return None
            self._settle()
            packed = host_zeros(sum(self.sizes))
            factors = packed[: self.sizes[0]]
            for (one, factor), basis, left, total in self._parts(factors, bases, epoch):
                torch.add(left, one.of(mean, epoch), alpha=samples, out=total)
                torch.matmul(total, basis, out=factor)
                factor.div_(samples)
            for whole, part in self._plain:
                packed[part] = mean[whole]
            self._given = _Given(number, epoch, samples, factors, bases)
            return packed

    def counted(self, numbers: Collection[int]) -> None:
        """These contributions of this peer are in a commit, and what it gave last is, or was a part of one of them."""
        with self._lock:
            if self._given is not None and self._given.number in numbers:
                self._given.counted = True
            else:  # an earlier one, of which this is not known any more
                self._left.zero_()
                self._given = None

    # ------------------------------------------------------------------ what comes back

    def learn(self, average: Tensor, epoch: int) -> None:
        """The step from ``epoch`` was decided, and will be unpacked: the next round may come before that."""
        with self._lock:
            self._averages[epoch] = average

    @torch.no_grad()
    def unpack(self, average: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Of the step from ``epoch``: the flat vector, float32 CPU, and what is to be ``carried`` after the step."""
        with self._lock:
            self._averages[epoch] = average
            self._reach(epoch + 1)
            if self._given is not None and self._given.counted:
                self._settle()  # (one that is not counted may be of the next round, which is under way)
            bases, following = self._bases[epoch], self._bases[epoch + 1]
            for known in (self._bases, self._averages):
                for past in [one for one in known if one <= epoch]:
                    del known[past]
        # without the lock, which the rounds' thread wants: bases and averages are never changed
        whole = self._memory.floats(self._elements)
        pairs = zip(self._factors(average, epoch), self._factors(bases, epoch - 1), strict=True)
        for (one, factor), (_, basis) in pairs:
            one.of(whole, epoch).copy_(_rounded(factor.double() @ basis.double().t(), GRADIENT_BITS))
        for span, part in self._plain:
            whole[span] = average[part]
        return whole, following

    # ------------------------------------------------------------------ private

    def _reach(self, epoch: int) -> None:
        """Compute bases up to those of ``epoch``, as far as the averages are here."""
        last = max(self._bases)
        while last < epoch and last in self._averages:
            self._bases[last + 1] = following = host_zeros(self.sizes[0])
            average = self._averages.pop(last)
            pairs = zip(self._factors(average, last), self._factors(following, last), strict=True)
            for index, ((_, factor), (_, basis)) in enumerate(pairs):
                basis.copy_(_orthonormal(factor, (last + 1 << 20) + index))
            last += 1

    def _settle(self) -> None:
        """What was given last is in a commit, or it is not, and nothing was left out."""
        given, self._given = self._given, None
        if given is None or not given.counted:
            return
        self._left, self._total = self._total, self._left
        for (_, factor), basis, left, _ in self._parts(given.factors, given.bases, given.epoch):
            left.sub_(factor @ basis.t(), alpha=given.samples)

    def _factors(self, flat: Tensor, epoch: int) -> Iterator[tuple[Matrix, Tensor]]:
        """Every matrix with its factor of ``epoch``, which has the shape of its basis of the epoch after."""
        start = 0
        for one in self._matrices:
            shape = one.factor(epoch)
            yield one, flat[start : start + math.prod(shape)].view(shape)
            start += math.prod(shape)

    def _parts(
        self, factors: Tensor, bases: Tensor, epoch: int
    ) -> Iterator[tuple[tuple[Matrix, Tensor], Tensor, Tensor, Tensor]]:
        """Every matrix with its factor, its basis, and where it lies in ``left`` and ``total``."""
        start = 0
        for pair, (one, basis) in zip(self._factors(factors, epoch), self._factors(bases, epoch - 1), strict=True):
            span = slice(start, start + one.elements)
            start += one.elements
            yield pair, basis, one.turned(self._left[span], epoch), one.turned(self._total[span], epoch)


def _lay_out(
    shapes: Sequence[Sequence[int]], rank: int, min_compression_ratio: float
) -> tuple[list[Matrix], list[slice]]:
    """What is averaged as factors, and where the rest of the gradients lies."""
    matrices, plain, start = [], [], 0
    for shape in shapes:
        elements = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 0
        columns = elements // rows if rows else 0
        saved = 1 - rank * (rows + columns) / elements if rows and elements else 0.0
        if rows and elements and saved >= min_compression_ratio:
            matrices.append(Matrix(start, rows, columns, min(2 * rank, rows, columns), turn=0))
        else:
            plain.append(slice(start, start + elements))
        start += elements
    # the larger factors of half of them at even epochs, those of the others at odd ones: each step sends as much
    loads = [0, 0]
    for one in sorted(matrices, key=lambda one: -abs(one.rows - one.columns) * one.rank):
        ways = [replace(one, turn=turn) for turn in (0, 1)]
        found = min(ways, key=lambda way: max(load + math.prod(way.factor(at)) for at, load in enumerate(loads)))
        matrices[matrices.index(one)] = found
        loads = [load + math.prod(found.factor(at)) for at, load in enumerate(loads)]
    return matrices, plain


def _orthonormal(matrix_NR: Tensor, seed: int) -> Tensor:
    """float32 (rows, rank): columns of length one, nearly orthogonal (they are rounded), that span those of the matrix.

    A column that adds nothing new to those before it is replaced by random numbers, which may find something.
    """
    columns = matrix_NR.double()
    lengths = columns.norm(dim=0)
    columns = columns / lengths.clamp_min(torch.finfo(torch.float64).tiny)
    basis, triangle = torch.linalg.qr(columns)
    weak = (lengths == 0) | (triangle.diagonal().abs() <= LEAST_NEW_SHARE)
    if weak.any():
        chance = torch.Generator().manual_seed(seed)
        # whole numbers, which every torch draws alike; many, so that none lies where rounding could go both ways
        random = torch.randint(-(1 << 20), 1 << 20, columns.shape, generator=chance).double()
        basis, _ = torch.linalg.qr(torch.where(weak, random / random.norm(dim=0), columns))
    return _rounded(basis, BASIS_BITS)


def _rounded(values: Tensor, bits: int) -> Tensor:
    """float32, to the nearest with so many bits of mantissa after the first."""
    dropped = 23 - bits
    whole = values.float().contiguous().view(torch.int32)
    return ((whole + (1 << dropped - 1) >> dropped) << dropped).view(torch.float32)
