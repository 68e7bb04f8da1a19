"""The module's buffers stay the tensors that the engine holds."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("lightning_hivemind")


class Buffers:
    """``tensors`` are those of ``module.buffers()``, in that order.

    ``self.mean = 0.9 * self.mean + x`` puts another tensor in a buffer's place, of which the engine would not know.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        for owner in module.modules():
            for name, tensor in owner._buffers.items():
                if tensor is not None and not _can_be_written(tensor):
                    owner._buffers[name] = tensor.clone(memory_format=torch.contiguous_format)
        self.tensors = list(module.buffers())
        self._places = [
            (owner, name, tensor)
            for owner in module.modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]

    @torch.no_grad()
    def keep(self) -> None:
        """Move the values of tensors that have taken a buffer's place into the buffer, and put that back."""
        for place in list(self._places):
            owner, name, tensor = place
            now = owner._buffers.get(name)
            if now is tensor:
                continue
            if now is None or now.shape != tensor.shape:
                log.warning(
                    "buffer %s of %s was replaced by one of another shape: it is no longer averaged, and peers that"
                    " join get its old values",
                    name,
                    type(owner).__name__,
                )
                self._places = [one for one in self._places if one is not place]
                continue
            tensor.copy_(now)
            owner._buffers[name] = tensor


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Not one that was expanded, of which several values are one, or made in ``torch.inference_mode``."""
    shared = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not shared and not tensor.is_inference()
