"""What a codec has left out of averages (top-k): it is added to what this peer gives next (error feedback)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.sums import views


class LeftOut:
    """Float32 CPU, of sums over samples that were given before; see :meth:`.Exchange.left_out`.

    Args:
        marked: at the end of what is given stands for each of these whether it has a gradient.
    """

    def __init__(self, memory: Memory, marked: Sequence[Tensor]) -> None:
        self._memory, self._marked = memory, marked
        self._values: Tensor | None = None

    def forget(self) -> None:
        self._values = None

    def committed(self, left_out: Tensor | None, *, listed: bool) -> None:
        """A commit has left this of what this peer gave, if it is known; ``listed``: with all that was added to it."""
        if listed or self._values is None:
            self._values = left_out
        elif left_out is not None:
            self._values.add_(left_out)

    def added_to(self, values: Tensor, samples: int) -> Tensor:
        """To a mean over ``samples``; ``values`` themselves if there is nothing, else in other memory."""
        if self._values is None:
            return values
        found = torch.add(values, self._values, alpha=1 / samples, out=self._memory.floats(values.numel()))
        marks = found[found.numel() - len(self._marked) :]
        for mark, part, parameter in zip(marks, views(self._values, self._marked), self._marked, strict=True):
            if not mark and parameter.requires_grad and part.any():  # (else it is frozen, and stands still)
                mark.fill_(1.0)
        return found
