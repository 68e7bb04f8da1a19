"""One ``trainer.fit`` in a swarm: everything of a peer that lives as long as the fit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.base import Engine, PeerTraining, StepOutcome
from lightning_hivemind.engine.factory import make_engine
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.prints import print_of
from lightning_hivemind.errors import ArgumentError, NonFiniteGradientsError
from lightning_hivemind.events import EventBus
from lightning_hivemind.lightning_twins import lightning_module
from lightning_hivemind.peer.follower import FollowingEngine
from lightning_hivemind.peer.leader import LeadingEngine
from lightning_hivemind.peer.model import PeerModel
from lightning_hivemind.peer.ranks import Ranks
from lightning_hivemind.peer.replicas import Replicas
from lightning_hivemind.peer.sharded import Sharded
from lightning_hivemind.peer.whole import HostedOptimizer
from lightning_hivemind.training.buffers import Buffers
from lightning_hivemind.training.bystander import Bystander
from lightning_hivemind.training.checks import check_trainer
from lightning_hivemind.training.first_to_know import FirstToKnow, hooks_before_steps
from lightning_hivemind.training.optimizers import rebuilder
from lightning_hivemind.training.outside import outside
from lightning_hivemind.training.precision import LossScale
from lightning_hivemind.training.progress import LoopProgress, StopTogether
from lightning_hivemind.training.schedulers import SwarmSchedulers, scheduler_from
from lightning_hivemind.training.schema import schema_of
from lightning_hivemind.training.sigterm import Sigterm
from lightning_hivemind.training.zero_grad import DisabledZeroGrad

if TYPE_CHECKING:
    from lightning_hivemind.network.daemon import PeerNetwork

log = logging.getLogger("lightning_hivemind")

MOST_DROPPED = 200
MOST_DOUBLED = 10


class TrainingSession:
    """Joins Lightning's loop to the engine: made in ``Strategy.setup``, closed in ``Strategy.teardown``."""

    engine: Engine

    def __init__(self, arguments: Arguments, strategy: Any, trainer: Any, events: EventBus) -> None:
        self._a, self._strategy, self._trainer, self._events = arguments, strategy, trainer, events
        self._module = trainer.lightning_module
        self._buffers = Buffers(self._module)
        self._progress = LoopProgress(trainer)
        self._stopping = StopTogether(trainer, alone=arguments.auxiliary)
        own_way = lightning_module(strategy.package, "utilities.model_helpers").is_overridden(
            "lr_scheduler_step", self._module
        )
        self._schedulers = SwarmSchedulers(self._step_scheduler, goes_back=arguments.engine == "native" and not own_way)
        self._zero_grad = DisabledZeroGrad(self._module) if arguments.reuse_grad_buffers else None
        self._scale: LossScale | None = None
        self._first: FirstToKnow | None = None
        self._bystander: Bystander | None = None
        self._ranks, self._place = Ranks(), 0
        self._model: PeerModel | None = None
        #: what a rank's loss is multiplied by, for the mean over ranks to be one over samples; and what it wishes
        self._share, self._wish, self._alone = 1.0, "", False
        self._sigterm = Sigterm(trainer)
        self.auxiliary = arguments.auxiliary
        self.started = False
        self.drop_reason = "non-finite gradient"
        self._stepped_before = False
        self._dropped_in_a_row: Counter[type[Exception]] = Counter()
        #: the global step at which this peer came into the run
        self._began_at = 0

    def check(self) -> None:
        """Refuse what cannot work in a swarm, before anything is started."""
        check_trainer(self._a, self._strategy, self._trainer)

    def start(self, network: Callable[[], PeerNetwork]) -> None:
        """Bring the engine up over the optimizer that Lightning has made, and take its place where need be.

        ``network`` is asked for by the rank that speaks to the swarm.
        """
        if self.auxiliary:
            self._bystander = Bystander(self._trainer, self._strategy.package)
        optimizer = self._strategy.optimizers[0]
        scaler = getattr(self._strategy.precision_plugin, "scaler", None)
        self._ranks = Ranks.connect(self._strategy)
        self._place = self._strategy.data_place  # computing it takes a millisecond
        if self._ranks.size > 1:
            self._sigterm.attach()
            self._stopping.known = False
        with self._ranks.together():
            self.engine = self._engine_for(optimizer, network)
        self.engine.start()
        if self._a.recreates_optimizer and self._ranks.leads:
            optimizer = HostedOptimizer(self.engine.optimizer, parameters_of(optimizer))
            self._strategy.optimizers = [optimizer]
        gradients = None if self._model is None else self._model.batch_gradients
        self._scale = LossScale(scaler, optimizer, reuses_buffers=self._a.reuse_grad_buffers, gradients=gradients)
        if self._scale.active:
            self.drop_reason = "overflow"
        if self._zero_grad is not None:
            self._zero_grad.disable()
        self._progress.attach()

        self._first = FirstToKnow(self._trainer, self._strategy, self.before_validation, self._ranks)
        if self._trainer.global_step > 0:  # another fit of the same Trainer goes on counting
            self.restore(self.engine.optimizer.state_dict(), self._trainer.global_step, {})

    def _engine_for(self, optimizer: torch.optim.Optimizer, network: Callable[[], PeerNetwork]) -> Engine:
        """What this rank of the peer has for an engine."""
        shards = self._strategy.shards(optimizer)
        each_steps, sums_first = not self._a.recreates_optimizer, not self._a.use_local_updates
        hooked = hooks_before_steps(self._trainer, self._strategy.package)
        others = {"extra_tensors": self._strategy.extra_tensors, "buffers": self._buffers.tensors}
        left = {} if shards is not None else outside(self._module, optimizer)
        training = PeerTraining(
            optimizer=optimizer,
            rebuild_optimizer=None if each_steps else rebuilder(optimizer),
            make_scheduler=self._make_scheduler,
            advance_schedulers=self._schedulers.advance,
            take_schedulers_back=self._schedulers.take_back,
            before_optimizer_step=self._before_optimizer_step,
            extra_tensors=self._strategy.extra_tensors,
            buffers=self._buffers.tensors,
            schema=schema_of(self._module, optimizer, shards, others),
            should_abort=self._should_abort,
            last_step=lambda: int(self._trainer.max_steps),
            outside=(next(iter(left), ""), print_of(left.values()) if left else ""),
        )
        common = self._ranks, self._strategy
        if shards is not None:
            self._model = Sharded(
                *common,
                shards,
                training.state_tensors,
                each_steps=each_steps,
                sums_first=sums_first,
                hooked=hooked,
            )
            hooked |= self._trainer.gradient_clip_val is not None
        elif self._ranks.size > 1:
            self._model = Replicas(*common, optimizer, training.state_tensors, each_steps=each_steps)
        else:
            return make_engine(self._a, network(), training, self._events)
        if not self._ranks.leads:
            return FollowingEngine(training, self._ranks, self._model)
        return LeadingEngine(
            lambda training: make_engine(self._a, network(), training, self._events),
            training,
            self._ranks,
            self._model,
            sums_first=sums_first,
            hooked=hooked,
        )

    @property
    def model_in_parts(self) -> PeerModel | None:
        """If ranks have the model, and the state of their optimizer, in parts."""
        return self._model if self._model is not None and self._model.in_parts else None

    def kept(self) -> dict[str, Any]:
        """See :meth:`.Engine.kept`."""
        return self.engine.kept() if hasattr(self, "engine") else {}

    def restore(self, optimizer_state: Mapping[str, Any], epoch: int, kept: Mapping[str, Any]) -> None:
        self.engine.restore(optimizer_state, epoch, kept)
        self._progress.follow(epoch, committed=False)

    def synchronise(self) -> None:
        if self._a.reuse_grad_buffers:
            self._strategy.optimizers[0].zero_grad()  # of a fit before, or of a hook: else in the first sum
        self._schedulers.resume(self.engine.epoch)  # Lightning has loaded their state by now, if there is one
        outcome = self.engine.synchronise()
        if self._a.initial_peers and self.engine.num_peers == 1 and self._ranks.leads:
            log.warning(
                "initial_peers answered, but nobody else is in run_id=%r yet: others that train have another one",
                self._a.run_id,
            )
        self.started, self._began_at = True, outcome.epoch
        self._progress.follow(outcome.epoch, committed=False)
        self._stopping.hold(outcome.epoch, alone=self.engine.num_peers == 1)

    @property
    def epoch(self) -> int:
        """Committed global steps; 0 while the engine is not there."""
        return self.engine.epoch if hasattr(self, "engine") else 0

    # ------------------------------------------------------------------ batches

    def begin_batch(self, samples: int) -> int:
        """A batch of so many samples begins; returns how many this peer's ranks have in it."""
        wish, self._wish = self._wish, ""
        shares = self._ranks.share(
            "batch",
            {
                "samples": samples,
                "wish": wish,
                "sigterm": self._sigterm.came,
                "time_is_up": self._stopping.timer_has_run_out(),
                "should_stop": bool(self._trainer.should_stop),
                "alone": self.engine.num_peers == 1,
                "place": self._place,
            },
            more=True,  # what the engine says below
        )
        by_place = {int(share["place"]): int(share["samples"]) for share in shares}
        total, self._alone = sum(by_place.values()), bool(shares[0]["alone"])
        self._share = samples * len(by_place) / total if total else 1.0
        if any(share["sigterm"] for share in shares):
            self._sigterm.take_effect()
        self._stopping.time_is_up |= any(share["time_is_up"] for share in shares)
        if any(share["should_stop"] for share in shares):
            self._trainer.should_stop = self._stopping.known = True
        if self._ranks.leads and (wish := next((share["wish"] for share in shares if share["wish"]), "")):
            self.request_stop(wish)
        outcome = self.engine.begin_batch()
        self._stepped_before |= self._settle(outcome)
        self._progress.follow(outcome.epoch, committed=False)
        if self._stopping.wants_to_stop():
            self.request_stop("trainer.should_stop is set here")
        return total

    def request_stop(self, reason: str) -> None:
        if not self._ranks.leads:
            self._wish = str(reason) or "requested"  # which rank 0 hears with the next batch
            return
        log.info("asking the whole run to stop: %s", reason)
        self.engine.request_stop(reason)

    def swarm_mean(self, name: str, value: float, samples: int) -> float:
        """See the strategy's. What a model says that is not the swarm's does not count."""
        if not self.started:  # Lightning's sanity check: nothing was trained, and no state taken
            return value
        mine = [self._place, value, 0 if self.auxiliary else int(samples)]
        told = self._ranks.share(f"swarm_mean {name}", mine)
        shares = list({place: (mean, count) for place, mean, count in told}.values())
        total = sum(count for _, count in shares)
        if len(shares) > 1 and total:
            value = sum(mean * count for mean, count in shares if count) / total
        return self.engine.swarm_mean(name, value, total)

    def batch_weight(self, samples: int) -> float:
        """What to multiply this rank's mean loss by, of a batch in which the peer has so many samples."""
        return self._share * self.engine.batch_weight(samples)

    def accept_gradients(self) -> bool:
        """Unscale this batch's gradients; False if they hold a value that is not finite."""
        accepted = self._scale is None or self._scale.accept()
        if self.model_in_parts is not None:
            accepted = all(self._ranks.share("finite", accepted, more=True))  # that of the step
        if accepted:
            self._dropped_in_a_row.clear()
        return accepted

    def drop_batch(self, samples: int) -> int:
        """Undo a batch whose gradients are not finite; returns the samples that are lost with it.

        Raises:
            NonFiniteGradientsError: there was no good batch for too long. (A loss scale finds its level in about 20.)
        """
        error = NonFiniteGradientsError(
            f"{MOST_DROPPED} batches in a row had a {self.drop_reason}, so this peer contributes nothing. Look for"
            " NaN in the data, or lower the learning rate. (Clipping gradients does not help against NaN.)"
        )
        return self._drop(samples, MOST_DROPPED, error)

    def drop_doubled(self, samples: int) -> int:
        """Undo a batch that is in the gradient several times; returns the samples that are lost with it.

        Raises:
            ArgumentError: that is how this module trains.
        """
        error = ArgumentError(
            f"reuse_grad_buffers=True: in {MOST_DOUBLED} batches in a row backward() was called several times, and"
            " nothing clears the gradient in between. Set reuse_grad_buffers=False."
        )
        return self._drop(samples, MOST_DOUBLED, error)

    def _drop(self, samples: int, most: int, error: Exception) -> int:
        """``error`` is raised with the last of so many batches for which it would be, without a good one in between."""
        self._dropped_in_a_row[type(error)] += 1
        if self._dropped_in_a_row[type(error)] >= most:
            raise error
        return self.discard(samples)

    def discard(self, samples: int) -> int:
        """Undo a batch; returns the samples that are lost with it."""
        if self._a.reuse_grad_buffers:  # it is in one sum with those before it
            return samples + self.engine.discard()
        return samples

    def step(self, samples: int) -> None:
        self._buffers.keep()
        scale = self._scale.buffer_scale if self._scale is not None else 1.0
        outcome = self.engine.step(samples, scale)
        # a step that was made just before this batch is counted and logged with it: the loop knows no other moment
        stepped, self._stepped_before = self._settle(outcome) or self._stepped_before, False
        self._progress.follow(outcome.epoch, committed=stepped)
        stop = self.engine.stop_epoch
        if stop is not None and outcome.epoch >= stop:
            self._stopping.stop()
        else:
            self._stopping.hold(
                outcome.epoch, alone=self._alone if self._ranks.size > 1 else self.engine.num_peers == 1
            )

    def _settle(self, outcome: StepOutcome) -> bool:
        if outcome.committed and self._scale is not None and (factor := self._scale.after_commit()) != 1.0:
            self.engine.rescale(factor)
        return outcome.committed

    def flush(self) -> None:
        self.engine.flush()

    def before_validation(self, *, last: bool = False) -> None:
        """Validate the parameters of the last global step, also when they are still under way."""
        if self.started:
            self.engine.before_validation(last=last)

    def optimizer_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.engine.optimizer.state_dict()
        return state

    def close(self, timeout_s: float) -> dict[str, Any]:
        """Returns what a checkpoint needs that is saved afterwards: see :meth:`kept`."""
        self._progress.detach()
        self._sigterm.detach()
        if self._first is not None:
            self._first.remove()
        if self._bystander is not None:
            self._bystander.end()
        self._stopping.release()
        if self._zero_grad is not None:
            self._zero_grad.restore()
        try:
            if hasattr(self, "engine"):
                self._warn_of_no_step()
                self.engine.shutdown(timeout_s)
        finally:
            self._ranks.close()
        return self.kept()

    def _warn_of_no_step(self) -> None:
        samples, target = self.engine.local_samples, self._a.target_batch_size
        nothing = samples and self.engine.epoch == self._began_at  # (steps that others have made are steps)
        if nothing and self._ranks.leads:
            log.warning(
                "no global step was made while this peer was in the run, so nothing was learned: of"
                " target_batch_size=%d samples it had %d when it ended, the swarm %d. Give a smaller target_batch_size,"
                " or train longer: max_epochs=-1, and max_steps for the number of global steps",
                target,
                samples,
                self.engine.swarm_samples,
            )

    # ------------------------------------------------------------------ what the engine calls back

    def _make_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        if self._a.scheduler_fn is not None:
            config_type = lightning_module(self._strategy.package, "utilities.types").LRSchedulerConfig
            scheduler = scheduler_from(self._a.scheduler_fn, optimizer)
            self._strategy.lr_scheduler_configs = [config_type(scheduler, interval="step")]
        self._schedulers.take_over(self._strategy.lr_scheduler_configs, self._trainer.global_step)

    def _step_scheduler(self, scheduler: Any, epoch: int) -> None:
        # Lightning, too, counts a step before it steps its schedulers. (With a delay in a thread of its own.)
        if self._a.engine == "native" and not self._a.delay_optimizer_step:
            self._progress.follow(max(epoch, self._trainer.global_step), committed=False)
        self._module.lr_scheduler_step(scheduler, None)

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hooks and clipping, on the averaged gradient, once per global step."""
        precision = self._strategy.precision_plugin
        if self._a.engine == "native":  # of several steps in a row each has its own trainer.global_step
            self._progress.follow(self.epoch, committed=False)
        if not self._a.delay_grad_averaging:
            precision._after_closure(self._module, optimizer)
            return
        # (With engine="hivemind" in the background.) Lightning's callers of hooks note the hook they are in, which the
        # training thread needs.
        for callback in self._trainer.callbacks:
            callback.on_before_optimizer_step(self._trainer, self._module, optimizer)
        self._module.on_before_optimizer_step(optimizer)
        self._module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=self._trainer.gradient_clip_val,
            gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
        )

    def _should_abort(self) -> bool:
        return self._sigterm.came or bool(getattr(self._trainer, "received_sigterm", False))
