"""The module's buffers stay the tensors that the engine holds."""

from __future__ import annotations

import logging

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

log = logging.getLogger("lightning_hivemind")


class Buffers:
    """``tensors`` are those of ``module.buffers()``, in that order.

    ``self.mean = 0.9 * self.mean + x`` puts another tensor in a buffer's place, of which the engine would not know.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        copies: dict[int, torch.Tensor] = {}
        for owner in module.modules():
            for name, tensor in owner._buffers.items():
                if tensor is not None and is_dense(tensor) and not _can_be_written(tensor):
                    if id(tensor) not in copies:
                        copies[id(tensor)] = tensor.clone(memory_format=torch.contiguous_format)
                    owner._buffers[name] = copies[id(tensor)]
        memory = {_memory_of(one) for one in module.parameters() if is_dense(one)} - {0}
        dense = [one for one in module.buffers() if is_dense(one)]
        self.tensors = [one for one in dense if _memory_of(one) not in memory]  # (the others are parameters)
        for name in (name for name, one in module.named_buffers() if not is_dense(one)):
            log.warning("buffer %s is not dense: it is neither averaged nor handed to peers that join", name)
        self._places = [
            (owner, name, tensor)
            for owner in module.modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None and is_dense(tensor)
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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has a mean with others like it, and bytes to send."""
    whole = not isinstance(tensor, DTensor)  # else this process has a part of it
    return whole and not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Not one that was expanded, of which several values are one, or made in ``torch.inference_mode``."""
    shared = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not shared and not tensor.is_inference()
