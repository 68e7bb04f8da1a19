"""What a model needs, found out on the meta device: nothing of it is ever in memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from lightning_hivemind.errors import ArgumentError

#: of a backward pass, to a forward pass
_BACKWARD = 2.0
#: of which a model is not made
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
#: Adam's, where an optimizer could not be asked
_USUAL_STATE = 8.0


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Counts are of values, whatever their dtype.

    Attributes:
        parameters, trained: all of them; those that are trained.
        bytes: of all parameters and buffers, as they are.
        largest: values of the largest layer, which is whole on a device while it computes.
        block: the class of which a model of many alike blocks is made; "": it is made of none.
        at_once: values that FSDP has on a device at once: of a block, and of all that is in none.
        optimizer: its class, or "" if it could not be made.
        state_bytes: that the optimizer keeps for each trained value.
        activation_bytes: of one sample, that a backward pass needs; None: unknown.
        flops: of one sample, forward and backward; None: unknown.
        unknown: why something is.
    """

    parameters: int
    trained: int
    bytes: int
    largest: int
    block: str = ""
    at_once: int
    optimizer: str = ""
    state_bytes: float = _USUAL_STATE
    activation_bytes: float | None = None
    flops: float | None = None
    unknown: tuple[str, ...] = ()


def find(where: str) -> Callable[..., Any]:
    """``MODULE:NAME``, with the working directory as a place to look in.

    Raises:
        ArgumentError: there is no such thing.
    """
    module, _, name = where.partition(":")
    if not name:
        raise ArgumentError(f"{where!r}: say where the model's class is as MODULE:CLASS, as in train:GPT.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{where!r} cannot be had: {error}") from error
    if not callable(found):
        raise ArgumentError(f"{where!r} is no class, nor a function that makes a model.")
    made: Callable[..., Any] = found
    return made


def look_at(make: Callable[..., Any], arguments: dict[str, Any] | None = None) -> ModelFacts:
    """``make``: a class of a module, or what returns one.

    Raises:
        ArgumentError: it cannot be made on the meta device.
    """
    try:
        with torch.device("meta"):
            model = make(**(arguments or {}))
    except Exception as error:  # of the user's own code
        raise ArgumentError(
            f"{getattr(make, '__name__', make)} cannot be made without memory (torch.device('meta')):"
            f" {type(error).__name__}: {error}. Give what it is called with by --arguments, as JSON; and read values of"
            " tensors later than in __init__."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"{getattr(make, '__name__', make)} makes a {type(model).__name__}, not a torch module.")
    unknown: list[str] = []
    _configured(model, unknown)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    layers = [sum(p.numel() for p in part.parameters(recurse=False)) for part in model.modules()]
    block, at_once = _blocks(model)
    optimizer, state_bytes = _optimizer(model, unknown)
    activations, flops = _sample(model, unknown)
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        trained=trained,
        bytes=sum(one.numel() * one.element_size() for one in [*parameters, *model.buffers()]),
        largest=max(layers, default=0),
        block=block,
        at_once=at_once,
        optimizer=optimizer,
        state_bytes=state_bytes,
        activation_bytes=activations,
        flops=flops,
        unknown=tuple(unknown),
    )


def _blocks(model: torch.nn.Module) -> tuple[str, int]:
    """Of the classes whose instances have most of the model: that of the largest ones; and see ``at_once``."""
    everything = _values(model)
    found: dict[type, list[torch.nn.Module]] = {}
    for module in model.modules():
        if module is not model and type(module) not in _CONTAINERS:
            found.setdefault(type(module), []).append(module)
    best, at_once = "", everything
    largest = 0
    for kind, modules in found.items():
        inner = {id(part) for one in modules for part in one.modules() if part is not one}
        outermost = [one for one in modules if id(one) not in inner]
        inside, size = _values(*outermost), max(_values(one) for one in outermost)
        if len(outermost) > 1 and 2 * inside >= everything and size > largest:
            best, at_once, largest = kind.__name__, everything - inside + size, size
    return best, at_once


def _values(*modules: torch.nn.Module) -> int:
    """Each counted once."""
    return sum({id(p): p.numel() for one in modules for p in one.parameters()}.values())


def _configured(model: Any, unknown: list[str]) -> None:
    """What is made in ``configure_model``."""
    if any(True for _ in model.parameters()) or not callable(getattr(model, "configure_model", None)):
        return
    try:
        with torch.device("meta"):
            model.configure_model()
    except Exception as error:  # of the user's own code
        unknown.append(f"configure_model() raised {type(error).__name__}: {error}")


def _optimizer(model: Any, unknown: list[str]) -> tuple[str, float]:
    """Of what class it is, and bytes of its state for each trained value, by a step of it."""
    try:
        found = _first(model.configure_optimizers())
        parameters = [p for group in found.param_groups for p in group["params"]]
        for one in parameters:
            one.grad = torch.empty_like(one, device="meta")
        found.step()
        kept = [one for entry in found.state.values() for one in entry.values() if isinstance(one, Tensor)]
        size = sum(one.numel() * one.element_size() for one in kept)
        return type(found).__name__, size / max(1, sum(p.numel() for p in parameters))
    except Exception as error:  # of the user's own code
        unknown.append(
            f"the optimizer could not be asked ({type(error).__name__}: {error}): as much as Adam keeps is assumed"
        )
        return "", _USUAL_STATE
    finally:
        model.zero_grad()


def _first(made: Any) -> torch.optim.Optimizer:
    """The optimizer in what ``configure_optimizers`` may return."""
    if isinstance(made, torch.optim.Optimizer):
        return made
    if isinstance(made, dict):
        return _first(made["optimizer"])
    if isinstance(made, (list, tuple)) and made:
        return _first(made[0])
    raise TypeError(f"configure_optimizers returned {type(made).__name__}")


def _sample(model: Any, unknown: list[str]) -> tuple[float | None, float | None]:
    """Bytes that a backward pass needs, and floating-point operations, of one sample of ``example_input_array``."""
    example = getattr(model, "example_input_array", None)
    if example is None:
        unknown.append(
            "the model has no example_input_array, so activations and operations are not known: set it to a batch"
        )
        return None, None
    given = tree_map(lambda one: torch.empty_like(one, device="meta") if isinstance(one, Tensor) else one, example)
    inputs = given if isinstance(given, (tuple, dict)) else (given,)
    first = next(iter(inputs.values() if isinstance(inputs, dict) else inputs))
    samples = max(1, first.shape[0]) if isinstance(first, Tensor) and first.dim() else 1
    known = {id(one) for one in [*model.parameters(), *model.buffers()]}
    kept: dict[tuple[int, ...], int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in known and id(tensor._base) not in known:
            kept[tensor.untyped_storage()._cdata, tensor.numel()] = tensor.numel() * tensor.element_size()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # so that no number is used twice
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    except Exception as error:  # of the user's own code
        unknown.append(f"forward(example_input_array) raised {type(error).__name__} on the meta device: {error}")
        return None, None
    flops = (1 + _BACKWARD) * counter.get_total_flops()
    return sum(kept.values()) / samples, flops / samples
