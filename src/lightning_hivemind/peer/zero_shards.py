"""DeepSpeed inside of a peer: its optimizer as Lightning and a swarm see one, and the parts that ranks have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.peer import zero_adam
from lightning_hivemind.peer.pieces import Piece, interval
from lightning_hivemind.peer.shards import OfPiece, Shards
from lightning_hivemind.peer.whole import GroupView, OptimizerView
from lightning_hivemind.peer.zero_stages import Place, Stage


class ZeroOptimizer(OptimizerView):
    """DeepSpeed's optimizer, over the module's own parameters in the groups that the user has made.

    A step is DeepSpeed's: on what the last backward pass has left, or on what :meth:`use` was given since.

    Args:
        engine: which counts steps, for its checkpoints.
        groups: the parameters of each group.
    """

    def __init__(self, engine: Any, stage: Stage, groups: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(stage.zero.optimizer, [p for group in groups for p in group])
        self.engine, self.stage, self._groups = engine, stage, groups
        self._given: Callable[[], None] | None = None
        self.is_deepspeeds_adam = zero_adam.is_deepspeeds_adam(self.inner)
        #: whether the next step's gradients are clipped, which else DeepSpeed does where it is told to
        self.clipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """(The optimizer inside of DeepSpeed's has flat ones.)"""
        seen = (zero_adam.HIDDEN, zero_adam.BESIDES) if self.is_deepspeeds_adam else ()
        return [GroupView(group, own, *seen) for group, own in zip(self.inner.param_groups, self._groups, strict=True)]

    @property
    def inner(self) -> torch.optim.Optimizer:
        """Which DeepSpeed's steps with."""
        return self._seen

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def use(self, put: Callable[[], None]) -> None:
        """The next step is on what ``put`` puts there."""
        self._given = put

    @property
    def has_given(self) -> bool:
        """Whether the next step is not on what the last backward pass has left."""
        return self._given is not None

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        given, self._given = self._given, None
        if given is not None:
            self.stage.forget_gradients()
            given()
        zero, limit = self.stage.zero, self.stage.zero.clip_grad
        try:
            if self.clipped:
                zero.clip_grad = 0.0
            zero.step()
        finally:
            zero.clip_grad, self.clipped = limit, False
        self.engine.global_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.stage.forget_gradients()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """DeepSpeed loads its own checkpoints."""


class ZeroShards(Shards):
    """Of float32 values, whatever the model computes with."""

    optimizer: ZeroOptimizer

    def __init__(self, optimizer: ZeroOptimizer, module: torch.nn.Module) -> None:
        super().__init__(optimizer, module)
        self._stage = stage = optimizer.stage
        self._steps = [p.requires_grad for p in self.of_optimizer] + [False] * (len(self.parameters) - self.count)
        self._places: list[Place | None] = [
            stage.place(p) if steps else None for p, steps in zip(self.parameters, self._steps, strict=True)
        ]
        self._by_id = {id(p): one for p, one in zip(self.parameters, self._places, strict=True) if one is not None}
        self.shapes = [stage.shape(p) for p in self.parameters]
        self.dtypes = [torch.float32 if s else p.dtype for p, s in zip(self.parameters, self._steps, strict=True)]
        self.pieces = [self._piece(number) for number in range(len(self.parameters))]
        self._averaged: list[Tensor] = []

    @property
    def kind(self) -> str:
        inner = self.optimizer.inner
        return zero_adam.kind_of(inner) if self.optimizer.is_deepspeeds_adam else type(inner).__name__

    @property
    def steps_by(self) -> str:
        return type(self.optimizer.inner).__name__ if self.optimizer.is_deepspeeds_adam else ""

    def values(self) -> list[Tensor]:
        flats = self._stage.flats
        return [
            _at(flats, place) if steps else self._stage.frozen(p)[1]
            for p, place, steps in zip(self.parameters, self._places, self._steps, strict=True)
        ]

    def written(self) -> None:
        self._stage.written()

    def gradients(self) -> list[Tensor | None]:
        return [
            None if place is None else self._stage.gradient(p, place)
            for p, place in zip(self.of_optimizer, self._places, strict=False)
        ]

    def stepping(self) -> list[Tensor | None]:
        if not self.optimizer.has_given:
            return self.gradients()
        return [None if place is None else _at(self._averaged, place) for place in self._places[: self.count]]

    def room_for_gradients(self, reached: Sequence[bool]) -> list[Tensor]:
        """(DeepSpeed knows no parameter without a gradient: of who is not reached it is zero.)"""
        self._averaged = self._averaged or [torch.zeros_like(flat, requires_grad=False) for flat in self._stage.flats]
        for flat in self._averaged:
            flat.zero_()
        self.optimizer.use(lambda: self._stage.put_gradients(self._averaged, self._by_id))
        return [_at(self._averaged, place) for place, has in zip(self._places, reached, strict=False) if has]

    def state(self) -> list[dict[str, Any]]:
        flats, state = self._stage.flats, self.optimizer.state
        found: list[dict[str, Any]] = []
        for place in self._places[: self.count]:
            entry = {} if place is None else state.get(flats[place.flat], {})
            told = {name: _of(one, flats, place) for name, one in entry.items()}
            found.append(zero_adam.as_torchs(told) if self.optimizer.is_deepspeeds_adam else told)
        return found

    def room_for_state(self, told: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        flats, state = self._stage.flats, self.optimizer.state
        state.clear()
        room: list[dict[str, Tensor]] = []
        for place, entry in zip(self._places, told, strict=False):
            mine: dict[str, Tensor] = {}
            for name, value in entry.items():
                if not isinstance(value, OfPiece):
                    if place is not None:
                        own = zero_adam.as_deepspeeds(name, value) if self.optimizer.is_deepspeeds_adam else value
                        state[flats[place.flat]][name] = own
                    continue
                if place is None:
                    mine[name] = torch.empty(0, dtype=value.dtype, device="cpu")
                    continue
                flat = flats[place.flat]
                if name not in state[flat]:
                    state[flat][name] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
                mine[name] = state[flat][name].narrow(0, place.offset, place.numel)
            room.append(mine)
        return room

    def _piece(self, number: int) -> Piece:
        parameter, place, numel = self.parameters[number], self._places[number], self.shapes[number].numel()
        if self._steps[number]:
            return interval(numel, 0, 0) if place is None else interval(numel, place.begin, place.begin + place.numel)
        begin, part = self._stage.frozen(parameter)
        return interval(numel, begin, begin + part.numel())


def _at(flats: Sequence[Tensor], place: Place | None) -> Tensor:
    """What lies there; of nothing: an empty tensor."""
    if place is None:
        return flats[0].detach()[:0]
    return flats[place.flat].detach().narrow(0, place.offset, place.numel)


def _of(value: Any, flats: Sequence[Tensor], place: Place | None) -> Any:
    """Of an entry of a flat partition's state, what is of the parameter there."""
    if place is None or not isinstance(value, Tensor) or value.shape != flats[place.flat].shape:
        return value
    return value.narrow(0, place.offset, place.numel)
