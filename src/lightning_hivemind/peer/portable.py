"""Checkpoints of models in parts as a plain Trainer writes them: whole, in one file, which any kind of peer resumes.

By the pieces, not by what torch or DeepSpeed have for it: what FSDP of version 1 makes of an optimizer is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hivemind.engine.base import Changed
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.peer.sharded import Sharded
from lightning_hivemind.peer.shards import plain_name, unwrapped

#: who writes directories
FSDP, DEEPSPEED = "FSDP or FSDP2", "DeepSpeed"
_SHOWN = 5
#: torch's name for it
_EXTRA = "_extra_state"


def writer_of(path: Any) -> str | None:
    """Whose ranks have written there, each its part."""
    if (Path(path) / ".metadata").is_file():
        return FSDP
    return DEEPSPEED if (Path(path) / "checkpoint").is_dir() else None


def refuse_directory(path: Any, own: str = "") -> None:
    """Raises ArgumentError if ``path`` is a directory, and not of a writer who is ``own``."""
    if not Path(path).is_dir() or (writer := writer_of(path)) == own:
        return
    raise ArgumentError(
        f"ckpt_path={str(path)!r} is a directory"
        + (f" that {writer} has written, and only ranks of the same kind can resume." if writer else ".")
        + " What any kind of peer resumes is one file, with the optimizer: let a peer of that kind resume it with"
        " portable_checkpoints=True, and save. (lightning-hivemind collate makes a file of its weights only, for"
        " load_from_checkpoint.)"
    )


@contextmanager
def reading(path: Any) -> Iterator[None]:
    """A file. Raises ArgumentError if it is none, or what it has is damaged."""
    refuse_directory(path)
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        raise ArgumentError(f"ckpt_path={str(path)!r} cannot be read ({type(error).__name__}: {error}).") from error


class ReadsFiles:
    """Of a peer whose ranks have all of the model: before Lightning's strategy."""

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with reading(checkpoint_path):
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        return loaded


def state_dict(model: Sharded) -> dict[str, Any]:
    """Of the user's module; a collective, of which rank 0 has the result."""
    whole = model.everything()
    if not model.leads:
        return {}
    module, by_id = model.shards.module, dict(zip(map(id, model.shards.parameters), whole, strict=True))
    found: dict[str, Any] = {
        unwrapped(name): by_id[id(p)] for name, p in module.named_parameters(remove_duplicate=False)
    }
    found |= {unwrapped(name): one.detach().cpu() for name, one in _buffers(module)}
    for name, one in module.named_modules():
        if type(one).get_extra_state is not torch.nn.Module.get_extra_state:
            found[unwrapped(f"{name}.{_EXTRA}")] = one.get_extra_state()
    return found


def load_state_dict(model: Sharded, given: Mapping[str, Any] | None, *, strict: bool) -> None:
    """What rank 0 was given, into all ranks' parts; a collective.

    Raises:
        ArgumentError: it is of another module. Nothing was changed.
    """
    module, shards = model.shards.module, model.shards
    names = [(plain_name(name), p) for name, p in module.named_parameters(remove_duplicate=False)]
    buffers = {plain_name(name): one for name, one in _buffers(module)}
    problem, whole, extra = "", list[Tensor](), dict[str, Any]()
    if given is not None:
        given = {plain_name(name): one for name, one in given.items()}
        problem = _misfit(given, names, buffers, shards.shapes, shards.parameters, strict=strict)
    if problem := model.say(problem):
        raise ArgumentError(f"ckpt_path: {problem}. Give a checkpoint of the same model; nothing was changed.")
    now = [] if strict else model.everything()  # what it lacks stays
    if given is not None:
        by_id = {id(p): given[name] for name, p in names if name in given}
        for number, p in enumerate(shards.parameters):
            whole.append(by_id[id(p)].to("cpu", shards.dtypes[number]).contiguous() if id(p) in by_id else now[number])
        for name, one in buffers.items():
            if name in given:
                one.copy_(given[name])
        extra = {name: one for name, one in given.items() if name.split(".")[-1] == _EXTRA}
    model.take_everything(whole, list(buffers.values()))
    extra = model.say(extra)
    for name, part in module.named_modules():
        if (key := plain_name(f"{name}.{_EXTRA}")) in extra:
            part.set_extra_state(extra[key])


def optimizer_state(model: Sharded) -> dict[str, Any]:
    """Of the ranks' optimizer, as torch's is; a collective, of which rank 0 has the result."""
    model.refresh(Changed.OPTIMIZER)
    return model.optimizer.state_dict() if model.leads else {}


def load_optimizer_state(model: Sharded, given: Mapping[str, Any] | None) -> None:
    """What rank 0 was given; a collective."""
    model.at_rank_0(lambda: model.optimizer.load_state_dict(dict(given or {})))
    model.values(Changed.OPTIMIZER)


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that a checkpoint has, by name."""
    for prefix, part in module.named_modules():
        for name, one in part._buffers.items():
            if one is not None and name not in part._non_persistent_buffers_set:
                whole = one.full_tensor() if isinstance(one, DTensor) else one
                yield f"{prefix}.{name}", whole


def _misfit(
    given: Mapping[str, Any],
    names: Sequence[tuple[str, Tensor]],
    buffers: Mapping[str, Tensor],
    shapes: list[torch.Size],
    parameters: list[Tensor],
    *,
    strict: bool,
) -> str:
    """What is wrong with it; empty if nothing is."""
    shape_of = dict(zip(map(id, parameters), shapes, strict=True))
    wanted = {name: shape_of[id(p)] for name, p in names} | {name: one.shape for name, one in buffers.items()}
    for name, shape in wanted.items():
        if name in given and given[name].shape != shape:
            return f"{name} has the shape {tuple(given[name].shape)} there, and here {tuple(shape)}"
    extra = [name for name in given if name not in wanted and name.split(".")[-1] != _EXTRA]
    missing = [name for name in wanted if name not in given]
    if strict and (missing or extra):
        return f"it lacks {missing[:_SHOWN]}, and has besides {extra[:_SHOWN]}"
    return ""
