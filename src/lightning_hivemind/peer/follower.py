"""What ranks other than 0 have for an engine: they do what rank 0 tells them, call by call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_hivemind.engine.base import Changed, PeerTraining, RanksSums, StepOutcome
from lightning_hivemind.peer.model import PeerModel
from lightning_hivemind.peer.ranks import Ranks
from lightning_hivemind.peer.words import Add, Done, Gather, GatherSum, Step, Values, Word


class FollowingEngine:
    """See the module, and :class:`~lightning_hivemind.engine.base.Engine`, of which it has all methods."""

    def __init__(self, training: PeerTraining, ranks: Ranks, model: PeerModel) -> None:
        self._training, self._ranks, self._model = training, ranks, model
        self.optimizer: torch.optim.Optimizer = model.local
        self.epoch = self.local_samples = self.swarm_samples = 0
        self.num_peers = 1
        self.stop_epoch: int | None = None

    # ------------------------------------------------------------------ together with rank 0

    def start(self) -> None:
        self._training.make_scheduler(self.optimizer)
        self._follow("start")

    def synchronise(self) -> StepOutcome:
        return self._follow("synchronise")

    def begin_batch(self) -> StepOutcome:
        return self._follow("begin_batch")

    def step(self, batch_samples: int, gradient_scale: float = 1.0) -> StepOutcome:
        if batch_samples:
            self._model.batch_ended()
        return self._follow("step")

    def before_validation(self, *, last: bool = False) -> None:
        self._follow("before_validation")

    def swarm_mean(self, name: str, value: float, samples: int) -> float:
        self._follow("swarm_mean")
        return self._value

    # ------------------------------------------------------------------ by itself

    def batch_weight(self, batch_samples: int) -> float:
        return 1.0

    def discard(self) -> int:
        return 0

    def rescale(self, factor: float) -> None:
        """Only rank 0 sums."""

    def kept(self) -> dict[str, Any]:
        return {}  # rank 0 writes checkpoints

    def restore(self, optimizer_state: Mapping[str, Any], epoch: int, kept: Mapping[str, Any]) -> None:
        if self._model.each_steps and not self._model.in_parts:
            self.optimizer.load_state_dict(dict(optimizer_state))
        self.epoch = epoch

    def request_stop(self, reason: str) -> None:
        raise AssertionError("rank 0 asks the swarm")

    def flush(self) -> None:
        """Rank 0 writes what is to be kept, of a model in parts with all others."""
        if self._model.in_parts:
            self._follow("flush")

    def shutdown(self, timeout_s: float) -> None:
        """Nothing was started here."""

    # ------------------------------------------------------------------ private

    def _follow(self, call: str) -> StepOutcome:
        """Do what rank 0 says until that call of its engine has come back."""
        while True:
            word: Word = self._ranks.hear(call)
            if isinstance(word, Step):
                self._make(word)
            elif isinstance(word, Values):
                self._take(word)
            elif isinstance(word, Gather):
                self._model.refresh(Changed(word.what))
            elif isinstance(word, Add):
                self._sums.add(word.factor, first=word.first)
            elif isinstance(word, GatherSum):
                self._sums.gather(())
            else:
                done = self._ranks.expect(Done, call, word)
                self.epoch, self.num_peers, self.stop_epoch = done.epoch, done.num_peers, done.stop_epoch
                self.local_samples, self.swarm_samples = done.local_samples, done.swarm_samples
                self._value = done.value
                return StepOutcome(epoch=done.epoch, committed=done.committed)

    @property
    def _sums(self) -> RanksSums:
        assert self._model.sums is not None, "rank 0 has gradients by itself"
        return self._model.sums

    def _make(self, step: Step) -> None:
        """One step of the optimizer, as rank 0 makes it now."""
        self.epoch = step.epoch
        if step.reached is not None:
            (self._model.host_gradients if step.hooks_only else self._model.gradients)(step.reached)
        self._training.before_optimizer_step(self.optimizer)
        if step.hooks_only:
            self._model.take_back(step.reached or [])
            return
        self.optimizer.step()
        if step.reached is not None:
            self.epoch += 1
            self._training.advance_schedulers(self.epoch)

    def _take(self, values: Values) -> None:
        self.epoch = values.epoch
        self._training.take_schedulers_back(self.epoch)
        self._training.advance_schedulers(self.epoch)
        self._model.values(Changed(values.changed))  # a rate that came with the optimizer is what rank 0 goes on from
