"""Whole parameters of a model, whatever a peer has made of it: put together by torch itself, not by what is tested."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def in_parts(model: Any) -> bool:
    """Whether no rank has all of it: then :func:`wholes` is a collective of all ranks."""
    if any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in model.parameters()):
        return True
    return _has_fsdp(_wrapped(model)) or any(isinstance(p, DTensor) for p in model.parameters())


def wholes(model: Any) -> list[tuple[str, Tensor]]:
    """Names, as of the plain model, and values, in its order."""
    wrapped = _wrapped(model)
    if _has_fsdp(wrapped):
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            return [(plain(name), p.detach().clone()) for name, p in model.named_parameters()]
    parameters = list(model.parameters())
    if any(hasattr(p, "ds_id") for p in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return [(name, p.detach().clone()) for name, p in model.named_parameters()]
    for one in wrapped.modules():
        if isinstance(one, FSDPModule):
            one.reshard()  # (what was only evaluated stays together)
    return [
        (name, p.full_tensor() if isinstance(p, DTensor) else p)  # type: ignore[no-untyped-call]
        for name, p in model.named_parameters()
    ]


def plain(name: str) -> str:
    """Without what its modules are wrapped into."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _has_fsdp(model: Any) -> bool:
    return any(isinstance(one, FullyShardedDataParallel) for one in model.modules())


def _wrapped(model: Any) -> Any:
    return getattr(model._trainer, "model", model)  # FSDP wraps the whole
