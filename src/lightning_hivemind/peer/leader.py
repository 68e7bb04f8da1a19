"""Rank 0's engine, and what the other ranks hear of it: see :mod:`.follower`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.engine.base import Changed, Engine, PeerTraining, RanksSums, StepOutcome
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.peer.model import PeerModel
from lightning_hivemind.peer.ranks import Ranks
from lightning_hivemind.peer.whole import HostedOptimizer
from lightning_hivemind.peer.words import Add, Done, Gather, GatherSum, Step, Values


class _Sums:
    """:class:`.RanksSums` of which the other ranks hear."""

    def __init__(self, ranks: Ranks, sums: RanksSums) -> None:
        self._ranks, self._sums = ranks, sums

    def add(self, factor: float, *, first: bool) -> None:
        self._ranks.tell(Add(factor, first), more=True)  # the end of this call, or that it fails
        self._sums.add(factor, first=first)

    def gather(self, whole: Sequence[Tensor]) -> list[bool]:
        self._ranks.tell(GatherSum())
        return self._sums.gather(whole)


class LeadingEngine:
    """The engine of a peer of several ranks, at rank 0: it is the real one, and tells the others what it does.

    A step is made by all ranks at once: rank 0 hands the averaged gradient out just before. What else the engine puts
    into the model goes to the others when its call ends.

    Args:
        make: the real engine.
        sums_first: gradients are averaged before a step; else each rank steps on the batch's own, which they all have.
        hooked: all ranks must be in what is done just before a step, whoever steps: there are hooks of the user's, or a
            norm is that of a model in parts.
    """

    def __init__(
        self,
        make: Callable[[PeerTraining], Engine],
        training: PeerTraining,
        ranks: Ranks,
        model: PeerModel,
        *,
        sums_first: bool,
        hooked: bool,
    ) -> None:
        self._ranks, self._model, self._hooked = ranks, model, hooked
        self._training, self._sums_first = training, sums_first
        self._changed = Changed(0)
        elsewhere = "a norm of elsewhere" if hooked and model.clips_elsewhere else ""
        wrapped = replace(
            training,
            optimizer=model.optimizer,
            make_scheduler=lambda stepping: training.make_scheduler(self._local(stepping)),
            before_optimizer_step=self._before_step,
            changed=self._note,
            refresh=self._refresh if model.in_parts else None,
            sums=None if model.sums is None else _Sums(ranks, model.sums),
            steps_on=model.steps_on,
            steps_by=" and ".join(one for one in (model.steps_by, elsewhere) if one),
        )
        self._engine = make(wrapped)
        self.optimizer = self._engine.optimizer

    # ------------------------------------------------------------------ of which the others hear

    def start(self) -> None:
        with self._ranks.together():
            self._engine.start()
            self._tell("start")

    def synchronise(self) -> StepOutcome:
        with self._ranks.together():
            return self._tell("synchronise", self._engine.synchronise())

    def begin_batch(self) -> StepOutcome:
        with self._ranks.together():
            return self._tell("begin_batch", self._engine.begin_batch())

    def step(self, batch_samples: int, gradient_scale: float = 1.0) -> StepOutcome:
        with self._ranks.together():
            if batch_samples:
                self._model.batch_ended()
            return self._tell("step", self._engine.step(batch_samples, gradient_scale))

    def before_validation(self, *, last: bool = False) -> None:
        with self._ranks.together():
            self._engine.before_validation(last=last)
            self._tell("before_validation")

    def swarm_mean(self, name: str, value: float, samples: int) -> float:
        with self._ranks.together():
            mean = self._engine.swarm_mean(name, value, samples)
            self._tell("swarm_mean", value=mean)
            return mean

    def batch_weight(self, batch_samples: int) -> float:
        return self._engine.batch_weight(batch_samples)

    # ------------------------------------------------------------------ of rank 0 only

    def discard(self) -> int:
        return self._engine.discard()

    def rescale(self, factor: float) -> None:
        self._engine.rescale(factor)

    def kept(self) -> dict[str, Any]:
        return self._engine.kept()

    def restore(self, optimizer_state: Mapping[str, Any], epoch: int, kept: Mapping[str, Any]) -> None:
        self._engine.restore(optimizer_state, epoch, kept)

    def request_stop(self, reason: str) -> None:
        self._engine.request_stop(reason)

    def flush(self) -> None:
        """Of a model in parts a checkpoint is of all ranks; of a whole one, what this puts into it the others have at
        the next call of which they hear.
        """
        self._engine.flush()
        if self._model.in_parts:
            with self._ranks.together():
                self._tell("flush")

    def shutdown(self, timeout_s: float) -> None:
        self._engine.shutdown(timeout_s)

    @property
    def epoch(self) -> int:
        return self._engine.epoch

    @property
    def num_peers(self) -> int:
        return self._engine.num_peers

    @property
    def local_samples(self) -> int:
        return self._engine.local_samples

    @property
    def swarm_samples(self) -> int:
        return self._engine.swarm_samples

    @property
    def stop_epoch(self) -> int | None:
        return self._engine.stop_epoch

    # ------------------------------------------------------------------ private

    def _note(self, what: Changed) -> None:
        self._changed |= what

    def _refresh(self, what: Changed) -> None:
        self._hand_out()  # else what the ranks have would take its place
        self._ranks.tell(Gather(int(what)))
        self._model.refresh(what)

    def _local(self, stepping: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """For schedulers and hooks: the one by which this rank steps."""
        return self._model.local if stepping is self._model.optimizer else stepping

    def _hand_out(self) -> None:
        """What the engine has put into the model, to the others."""
        changed, self._changed = self._changed, Changed(0)
        if changed == Changed.STATISTICS and not self._model.changes_with_statistics:
            return
        if changed:
            self._ranks.tell(Values(self.epoch, int(changed)))
            self._model.values(changed)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._model.in_parts:  # the ranks step on what they have
            self._hand_out()
        parameters = parameters_of(optimizer)
        reached = [p.grad is not None for p in parameters]
        if self._model.each_steps:
            self._ranks.tell(Step(self.epoch, reached if self._sums_first else None))
            if self._sums_first:
                self._model.gradients(reached)
        elif self._hooked:
            self._ranks.tell(Step(self.epoch, reached, hooks_only=True))
            self._model.host_gradients(reached, parameters)
            # on all ranks with gradients on their devices; here with settings and state of the one that steps
            self._training.before_optimizer_step(HostedOptimizer(optimizer, parameters_of(self._model.local)))
            self._model.take_back(reached, parameters)
            return
        self._training.before_optimizer_step(self._local(optimizer))

    def _tell(self, what: str, outcome: StepOutcome | None = None, *, value: float = 0.0) -> StepOutcome:
        outcome = outcome or StepOutcome(epoch=self.epoch, committed=False)
        self._hand_out()
        told = Done(
            what,
            outcome.epoch,
            outcome.committed,
            self.num_peers,
            self.local_samples,
            self.swarm_samples,
            self.stop_epoch,
            value,
        )
        self._ranks.tell(told)
        return outcome
