"""Where the gradients of several batches go: into a buffer beside ``param.grad``, a sum in ``param.grad`` itself, or at
once into the parameters.

Sums are in units of the first batch (each batch's mean gradient times its samples over the first one's), so that one
batch, and equal batches whose number is a power of two, come out of the mean bit for bit as a plain Trainer has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class BufferSum:
    """Sums into memory of its own: ``param.grad`` is free for the next batch."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.elements = sum(p.numel() for p in parameters)
        device = parameters[0].device if parameters else torch.device("cpu")
        self._values = torch.zeros(self.elements, device=device)
        self.samples = self.first = self.epoch = 0
        #: whether a batch is being computed that writes where the sum is; whether an average is there
        self.busy = self.lent = False

    def weight(self, samples: int) -> float:
        """What to multiply the loss of a batch by, before its backward pass."""
        return 1.0

    def begin_batch(self) -> None:
        pass

    def end_batch(self) -> None:
        pass

    def add(self, samples: int, epoch: int, scale: float) -> int:
        """``param.grad`` is the mean gradient of a batch now. Returns the samples that are lost."""
        first = not self.samples
        if first:
            self.first, self.epoch = samples, epoch
        for part, parameter in zip(views(self._values, self._parameters), self._parameters, strict=True):
            gradient = dense(parameter)
            if first:
                part.copy_(gradient) if gradient is not None else part.zero_()
            elif gradient is not None:
                part.add_(gradient, alpha=samples / self.first)
        self.samples += samples
        return 0

    def read(self, out: Tensor) -> None:
        """The mean over samples into float32 CPU (elements,)."""
        out.copy_(self._values)
        if self.samples != self.first:
            out.mul_(self.first / self.samples)

    def clear(self) -> None:
        self.samples = 0


class InPlaceSum:
    """``reuse_grad_buffers``: the backward passes themselves add up in ``param.grad``, which nobody else clears."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.elements = sum(p.numel() for p in parameters)
        self.samples = self.first = self.epoch = 0
        self.busy = self.lent = self._void = False
        self._scale = 1.0

    def weight(self, samples: int) -> float:
        if not self.samples or self._void:
            self.first = samples
        return samples / self.first

    def begin_batch(self) -> None:
        self.busy = True

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
        self.samples += samples
        self._scale = scale
        return 0

    def read(self, out: Tensor) -> None:
        for part, parameter in zip(views(out, self._parameters), self._parameters, strict=True):
            gradient = dense(parameter)
            part.copy_(gradient) if gradient is not None else part.zero_()
        factor = self.first / self.samples / self._scale
        if factor != 1.0:
            out.mul_(factor)

    def clear(self) -> None:
        self.samples, self._void = 0, self.busy
        if not self.busy and not self.lent:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()


class LocalUpdates:
    """``use_local_updates``: a batch's gradient is used at once, by ``step``, and only samples are counted."""

    elements = 0
    busy = lent = False

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self.samples = self.first = self.epoch = 0

    def weight(self, samples: int) -> float:
        return 1.0

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

    def read(self, out: Tensor) -> None:
        pass

    def clear(self) -> None:
        self.samples = 0


def dense(parameter: Tensor) -> Tensor | None:
    """Its gradient, also where an embedding made it sparse."""
    gradient = parameter.grad
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat vector in the parameters' shapes."""
    sizes = [p.numel() for p in parameters]
    return [part.view_as(p) for part, p in zip(torch.split(flat, sizes), parameters, strict=True)]
