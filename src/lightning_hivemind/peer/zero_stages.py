"""DeepSpeed's ZeRO optimizers, as far as a swarm needs them: flat partitions in float32, and what lies where in them.

By what deepspeed 0.19 keeps in its optimizers; its own functions for whole parameters would bring each to every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Place:
    """Of what this rank has of a parameter: ``numel`` values from ``begin`` on lie in ``flat`` from ``offset`` on."""

    flat: int
    offset: int
    numel: int
    begin: int


class Stage(ABC):
    """``zero``: DeepSpeed's optimizer."""

    def __init__(self, zero: Any) -> None:
        self.zero = zero

    @property
    @abstractmethod
    def flats(self) -> list[Tensor]:
        """Float32: of this rank, by group; what the optimizer inside of DeepSpeed's steps on."""

    @abstractmethod
    def shape(self, parameter: Tensor) -> torch.Size:
        """Of the whole parameter."""

    @abstractmethod
    def place(self, parameter: Tensor) -> Place | None:
        """Of a parameter that is trained; None: this rank has nothing of it."""

    @abstractmethod
    def frozen(self, parameter: Tensor) -> tuple[int, Tensor]:
        """Of one that is not: what this rank has, flat, and where that begins."""

    @abstractmethod
    def gradient(self, parameter: Tensor, place: Place) -> Tensor | None:
        """After a backward pass: the mean over ranks of what this rank has of it."""

    @abstractmethod
    def put_gradients(self, flats: Sequence[Tensor], places: Mapping[int, Place]) -> None:
        """Let DeepSpeed step on these, laid out as :attr:`flats`; ``places`` by the id of a parameter."""

    @abstractmethod
    def forget_gradients(self) -> None:
        """What a backward pass has left: the next one begins anew."""

    @abstractmethod
    def written(self) -> None:
        """Other values are in :attr:`flats`: bring them into the model, at all ranks."""

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state, and the gradients with it, lie in host memory or beyond."""
        return bool(getattr(self.zero, "cpu_offload", False) or getattr(self.zero, "offload_optimizer", False))

    def _note_norm(self, parameter: Tensor, gradient: Tensor) -> None:
        """With offload the norm is put together from what was noted in the backward pass."""
        self.zero.norm_for_param_grads[self.zero.get_param_id(parameter)] = gradient.double().norm(2)


class Stage1And2(Stage):
    """Each rank has the whole model, and an interval of the flat vector of each group in float32."""

    @property
    def flats(self) -> list[Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def shape(self, parameter: Tensor) -> torch.Size:
        return parameter.shape

    def place(self, parameter: Tensor) -> Place | None:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Place(mapping.param_group_index, here.start, here.numel, there.start)

    def frozen(self, parameter: Tensor) -> tuple[int, Tensor]:
        if not parameter.is_contiguous():  # channels_last: what is written into a copy would be lost
            parameter.data = parameter.data.contiguous()
        return 0, parameter.detach().view(-1)

    def gradient(self, parameter: Any, place: Place) -> Tensor | None:
        if self.offloads:
            self.zero._wait_for_offload_copies()  # DeepSpeed itself waits for them before it steps
            gradient = self.flats[place.flat].grad
            return None if gradient is None else gradient.narrow(0, place.offset, place.numel)
        if self.zero.averaged_gradients.get(place.flat) is None:
            return None
        found: Tensor = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).reshape(-1)
        whole = found.numel() == parameter.numel() != place.numel
        return found.narrow(0, place.begin, place.numel) if whole else found

    def put_gradients(self, flats: Sequence[Tensor], places: Mapping[int, Place]) -> None:
        zero = self.zero
        for number, flat in enumerate(flats):
            parts = [(p, flat.narrow(0, one.offset, one.numel)) for p, one in self._in(number, places)]
            if self.offloads:
                target = zero.single_partition_of_fp32_groups[number].grad
                target.copy_(flat)
                for parameter, part in parts:
                    self._note_norm(parameter, part)
                continue
            zero.averaged_gradients[number] = list(_filled(flat, [places[id(p)] for p, _ in parts]))

    def _in(self, number: int, places: Mapping[int, Place]) -> list[tuple[Tensor, Place]]:
        """Parameters of a partition, in the order in which they lie there."""
        found = [(p, places[id(p)]) for p in self.zero.params_in_partition[number] if id(p) in places]
        return sorted(found, key=lambda one: one[1].offset)

    def forget_gradients(self) -> None:
        zero = self.zero
        zero.micro_step_id = -1
        for number in list(zero.averaged_gradients):
            zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
        zero._release_preflattened_grad_buffers()
        zero.zero_grad(set_to_none=True)
        if self.offloads:
            zero._wait_for_offload_copies()
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
            for flat in self.flats:
                flat.grad.zero_()  # type: ignore[union-attr]  # it has one all the time

    def written(self) -> None:
        self.zero.update_lp_params()


class Stage3(Stage):
    """A rank has an interval of each parameter, and the same one in float32."""

    @property
    def flats(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape)

    def place(self, parameter: Any) -> Place | None:
        flat, offset, numel = self.zero.grad_position[self.zero.get_param_id(parameter)]
        begin = self.zero._get_param_partition_rank(parameter) * numel
        there = min(numel, max(0, parameter.ds_numel - begin))  # the last ones are padded
        return Place(flat, offset, there, begin) if there else None

    def frozen(self, parameter: Any) -> tuple[int, Tensor]:
        if parameter.ds_tensor.final_location == "nvme":
            raise ArgumentError(
                "DeepSpeed with offload_param on NVMe, and frozen parameters there: a swarm could not read them. Use"
                ' device "cpu".'
            )
        part = parameter.ds_tensor.detach().reshape(-1)
        begin = self.zero._get_param_partition_rank(parameter) * part.numel()
        return begin, part[: max(0, parameter.ds_numel - begin)]

    def gradient(self, parameter: Tensor, place: Place) -> Tensor | None:
        if not self.offloads and self.zero.averaged_gradients.get(place.flat) is None:
            return None
        found: Tensor = self.zero._get_fp32_grad_state_partition(parameter, True)[0]
        return found.reshape(-1).narrow(0, 0, place.numel)

    def put_gradients(self, flats: Sequence[Tensor], places: Mapping[int, Place]) -> None:
        zero = self.zero
        for number, group in enumerate(zero.fp16_groups):
            parts = []
            for parameter in group:
                _, offset, numel = zero.grad_position[zero.get_param_id(parameter)]
                parts.append(flats[number].narrow(0, offset, numel))
                if self.offloads:
                    self._note_norm(parameter, parts[-1])
            if self.offloads:
                zero.fp32_partitioned_groups_flat[number].grad.copy_(flats[number])
            else:
                zero.averaged_gradients[number] = parts

    def forget_gradients(self) -> None:
        self.zero.zero_grad(set_to_none=True)
        self.zero.averaged_gradients = {}
        if (sums := self.zero.grad_partitions_flat_buffer) is not None:
            sums.zero_()  # else who is not reached by the next pass has what was left by this one
        self.zero._offload_boundary_param_ids = set()
        if self.offloads:
            self.zero.reset_cpu_buffers()
            for flat in self.flats:
                if flat.grad is not None:
                    flat.grad.zero_()

    def written(self) -> None:
        zero = self.zero
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()


def _filled(flat: Tensor, places: Sequence[Place]) -> Iterator[Tensor]:
    """All of ``flat``, in order: what lies at those places, and what is between them and behind."""
    end = 0
    for place in places:
        if place.offset > end:
            yield flat.narrow(0, end, place.offset - end)
        end = place.offset + place.numel
        yield flat.narrow(0, place.offset, place.numel)
    if end < flat.numel():
        yield flat.narrow(0, end, flat.numel() - end)
