"""Where the gradients of several batches go: into a buffer beside ``param.grad``, a sum in ``param.grad`` itself, or at
once into the parameters.

Sums are in units of the first batch (each batch's mean gradient times its samples over the first one's), so that one
batch, and equal batches whose number is a power of two, come out of the mean bit for bit as a plain Trainer has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.engine.base import RanksSums
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.transfer import Transfer


class BufferSum:
    """Sums into memory of its own: ``param.grad`` is free for the next batch."""

    def __init__(self, parameters: Sequence[Tensor], memory: Memory, whole: int) -> None:
        self._parameters, self._memory, self._whole = parameters, memory, whole
        self.elements = sum(p.numel() for p in parameters)
        device = _device_of(parameters)
        self._transfer = Transfer(device)
        #: in host memory it is what will be given, and taken from there when it is needed
        self._values = torch.empty(self.elements, dtype=torch.float32, device=device) if device.type != "cpu" else None
        #: of it, one for each parameter, once there was a batch
        self._views: list[Tensor] = []
        self.samples = self.first = self.epoch = 0
        #: samples of the last sum; this one's first batch is multiplied by ``_unit``, a power of two: with as many
        #: samples as in the last one the sum is the mean then, most often, without another look at all of it
        self._last, self._unit = 0, 1.0
        self._reached = [False] * len(parameters)
        #: whether a batch is being computed that writes where the sum is; whether an average is there
        self.busy = self.lent = False

    @property
    def elsewhere(self) -> bool:
        """Whether it is not here, and cannot be taken."""
        return False

    def weight(self, samples: int) -> float:
        """What to multiply the loss of a batch by, before its backward pass."""
        return 1.0

    def rescale(self, factor: float) -> None:
        pass

    def begin_batch(self) -> None:
        pass

    def end_batch(self) -> None:
        pass

    def add(self, samples: int, epoch: int, scale: float) -> int:
        """``param.grad`` is the mean gradient of a batch now. Returns the samples that are lost."""
        first = not self.samples
        if first:
            self.first, self.epoch = samples, epoch
            self._unit = 2.0 ** min(0, round(math.log2(samples / self._last))) if self._last else 1.0
        self._add(self._unit if first else self._unit * (samples / self.first), first=first)
        self.samples += samples
        return 0

    def _add(self, factor: float, *, first: bool) -> None:
        if self._values is None:
            self._values = self._memory.floats(self._whole)
        if not self._views:
            self._views = views(self._values, self._parameters)
        for number, (part, parameter) in enumerate(zip(self._views, self._parameters, strict=True)):
            gradient = dense(parameter.grad)
            self._reached[number] = gradient is not None or (self._reached[number] and not first)
            add(gradient, factor, part, first=first)
        self._transfer.written()

    def take(self) -> Tensor:
        """float32 CPU (whole,): the mean over samples, at the end which parameters have one; another sum begins."""
        assert self._values is not None, "nothing was added"
        found, factor = self._values, self.first / self.samples / self._unit
        self._last = self.samples
        if found.device.type == "cpu":
            self._values, self._views = None, []
        else:
            found = self._memory.floats(self._whole)
            self._transfer.fetch([(self._values, found[: self.elements])])
        if factor != 1.0:
            found[: self.elements].mul_(factor)
        self.samples = 0
        found[self._whole - len(self._reached) :] = torch.tensor(self._reached, dtype=torch.float32, device="cpu")
        return found

    def clear(self) -> None:
        self.samples = 0


class PartsSum(BufferSum):
    """Ranks of this peer have their gradients, and the sum of them, in parts: it can be taken after :meth:`gather`."""

    def __init__(self, ranks: RanksSums, parameters: Sequence[Tensor], memory: Memory, whole: int) -> None:
        super().__init__(parameters, memory, whole)
        self._ranks = ranks

    @property
    def elsewhere(self) -> bool:
        """Whether there is more of it than was gathered."""
        return bool(self.samples) and self._values is None

    def gather(self, lock: AbstractContextManager[Any]) -> None:
        """From the training thread. ``lock``: for whoever clears the sum, which may be done meanwhile."""
        values = self._memory.floats(self._whole)
        reached = self._ranks.gather(views(values, self._parameters))
        with lock:
            if self.samples:
                self._values, self._reached = values, reached

    def _add(self, factor: float, *, first: bool) -> None:
        self._values = None
        self._ranks.add(factor, first=first)

    def clear(self) -> None:
        super().clear()
        self._values = None


class InPlaceSum:
    """``reuse_grad_buffers``: the backward passes themselves add up in ``param.grad``, which nobody else clears.

    In host memory those of float32 are parts of one vector, which will be given as it is.
    """

    elsewhere = False

    def __init__(self, parameters: Sequence[Tensor], memory: Memory, whole: int) -> None:
        self._parameters, self._memory, self._whole = parameters, memory, whole
        self.elements = sum(p.numel() for p in parameters)
        self._transfer = Transfer(_device_of(parameters))
        #: whose gradients are parts of the vector, if there is one; parts that are, since this sum has begun
        self._joined = [p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters]
        self._parts: list[Tensor | None] = [None] * len(parameters)
        self._values: Tensor | None = None
        self.samples = self.first = self.epoch = 0
        self.busy = self.lent = self._void = False
        self._scale = 1.0

    def weight(self, samples: int) -> float:
        if not self.samples or self._void:
            self.first = max(1, samples)
        return samples / self.first

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        if self._values is not None:
            self._values[: self.elements].mul_(factor)
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            if parameter.grad is not None and not _is_at(parameter.grad, part):
                parameter.grad.mul_(factor)
        self._transfer.written()
        self._scale *= factor

    @torch.no_grad()
    def begin_batch(self) -> None:
        self.busy = True
        if self._values is not None or not any(self._joined):
            return
        self._values = self._memory.floats(self._whole)
        self._values[: self.elements].zero_()
        for number, part in enumerate(views(self._values, self._parameters)):
            if self._joined[number]:
                self._parameters[number].grad = self._parts[number] = part.data  # which counts its changes by itself

    def end_batch(self) -> None:
        """Of which nothing is added."""
        self.busy = False
        if self._void:
            self.clear()

    def add(self, samples: int, epoch: int, scale: float) -> int:
        self.busy = False
        if self._void:  # the sum that this batch was added to had become worthless meanwhile
            self.clear()
            return samples
        if not self.samples:
            self.epoch = epoch
        self._transfer.written()
        self.samples += samples
        self._scale = scale
        return 0

    @torch.no_grad()
    def take(self) -> Tensor:
        found, factor = self._values, self.first / self.samples / self._scale
        if found is None:
            found = self._memory.floats(self._whole)
        parts = list(zip(views(found, self._parameters), self._parameters, self._parts, strict=True))
        self._transfer.fetch(
            (gradient, target)
            for target, parameter, part in parts
            if not _is_at(parameter.grad, part) and (gradient := dense(parameter.grad)) is not None
        )
        reached = [_was_reached(*one) for one in parts]
        for mark, (target, _, _) in zip(reached, parts, strict=True):
            if not mark:
                target.zero_()
        if factor != 1.0:
            found[: self.elements].mul_(factor)
        found[self._whole - len(reached) :] = torch.tensor(reached, dtype=torch.float32, device="cpu")
        self.clear()
        return found

    def clear(self) -> None:
        self.samples, self._void = 0, self.busy
        if self.busy or self.lent:
            return
        self._values, self._parts = None, [None] * len(self._parameters)
        for joined, parameter in zip(self._joined, self._parameters, strict=True):
            if joined:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


class LocalUpdates:
    """``use_local_updates``: a batch's gradient is used at once, by ``step``, and only samples are counted."""

    elements = 0
    busy = lent = False

    def __init__(self, step: Callable[[], None], is_stale: Callable[[], bool], memory: Memory, whole: int) -> None:
        self._step, self._is_stale, self._memory, self._whole = step, is_stale, memory, whole
        self.samples = self.first = self.epoch = 0

    @property
    def elsewhere(self) -> bool:
        return self._is_stale()

    def weight(self, samples: int) -> float:
        return 1.0

    def rescale(self, factor: float) -> None:
        pass

    def begin_batch(self) -> None:
        pass

    def end_batch(self) -> None:
        pass

    def add(self, samples: int, epoch: int, scale: float) -> int:
        self._step()
        if not self.samples:
            self.epoch = epoch
        self.samples += samples
        return 0

    def take(self) -> Tensor:
        self.samples = 0
        return self._memory.floats(self._whole)

    def clear(self) -> None:
        self.samples = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Summing:
    """How a peer's gradients are summed: beside ``param.grad``, if nothing is said.

    Attributes:
        in_place: in ``param.grad`` itself (``reuse_grad_buffers``).
        local_step: each batch's gradient is used at once, by this (``use_local_updates``).
        is_stale: whether ``local_step`` has changed what is not gathered yet: then nothing can be given.
        ranks: which have gradients in parts, and sum them.
    """

    in_place: bool = False
    local_step: Callable[[], None] | None = None
    is_stale: Callable[[], bool] = lambda: False
    ranks: RanksSums | None = None

    def make(self, parameters: Sequence[Tensor], memory: Memory, whole: int) -> BufferSum | InPlaceSum | LocalUpdates:
        """``whole``: elements of the vector that is given, of which the sum is the first part."""
        if self.local_step is not None:
            return LocalUpdates(self.local_step, self.is_stale, memory, whole)
        if self.ranks is not None:
            return PartsSum(self.ranks, parameters, memory, whole)
        return (InPlaceSum if self.in_place else BufferSum)(parameters, memory, whole)


BESIDE = Summing()


def _device_of(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def add(gradient: Tensor | None, factor: float, part: Tensor, *, first: bool) -> None:
    """``factor`` times a gradient, if there is one, to its part of a sum, which the ``first`` one begins."""
    if not first:
        if gradient is not None:
            part.add_(gradient, alpha=factor)
    elif gradient is None:
        part.zero_()
    elif factor != 1.0 and gradient.dtype == part.dtype:
        torch.mul(gradient, factor, out=part)
    else:
        part.copy_(gradient)
        if factor != 1.0:
            part.mul_(factor)


def dense(gradient: Tensor | None) -> Tensor | None:
    """Also where an embedding made it sparse."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _is_at(gradient: Tensor | None, part: Tensor | None) -> bool:
    """Whether it is that part of a vector."""
    if gradient is None or part is None or gradient.layout is not torch.strided:
        return False
    return gradient.data_ptr() == part.data_ptr()


def _was_reached(summed: Tensor, parameter: Tensor, part: Tensor | None) -> bool:
    """Whether a batch has reached it; a gradient that is no part of a vector may be what is left of one before."""
    if parameter.grad is None:
        return False
    known = part._version > 0 if part is not None and _is_at(parameter.grad, part) else parameter.requires_grad
    return known or bool(summed.any())


def trained_now(parameters: Sequence[Tensor]) -> Tensor:
    """1.0 for each that may have a gradient, 0.0 for one that was frozen during the fit: float32 CPU."""
    return torch.tensor([one.requires_grad for one in parameters], dtype=torch.float32, device="cpu")


def views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat vector, which may be longer, in the parameters' shapes."""
    sizes = [p.numel() for p in parameters]
    parts = torch.split(flat[: sum(sizes)], sizes) if sizes else ()
    return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
