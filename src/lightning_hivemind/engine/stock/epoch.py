"""The rounds of one hivemind peer: what happens between "the swarm has enough samples" and "every peer stepped".

Gradients are averaged, the optimizer steps, parameters are averaged again (hivemind's peers drift apart by rounding and
by lost parts). Whatever fails is an event, and no gradient is lost silently: a failed round steps on this peer's own
gradient only if nobody else went on.

``commit``, ``adopt`` and ``finish_background`` may block and run in the engine's worker; the rest is quick.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hivemind.averaging.control import StepControl

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.base import PeerTraining
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.stock.adoption import adopt_state
from lightning_hivemind.engine.stock.build import Parts
from lightning_hivemind.engine.stock.others import FRESH_S, Others
from lightning_hivemind.engine.stock.rounds import (
    ALONE,
    POLL_S,
    UNDER_WAY,
    Missed,
    NotNow,
    RoundResult,
    await_round,
    cancel,
    note,
)
from lightning_hivemind.engine.swarm_records import SwarmRecords
from lightning_hivemind.events import DelayedRoundFinished, DhtSilent, EventBus, RoundIncomplete


class EpochRounds:
    """Owns the controls of the rounds that are under way; see the module for which thread calls what."""

    def __init__(
        self, arguments: Arguments, parts: Parts, records: SwarmRecords, training: PeerTraining, events: EventBus
    ) -> None:
        self._a, self._parts = arguments, parts
        self._others = Others(arguments, parts, records, events, self._should_abort)
        self._training, self._events = training, events
        self._grad_control: StepControl | None = None
        self._state_control: StepControl | None = None
        self._background_state: tuple[Future[RoundResult], int, int] | None = None
        self._background_notes: dict[bytes, dict[str, Any]] = {}
        self._delayed_result: RoundResult | None = None
        self._last_members: frozenset[bytes] = frozenset()
        self._cancelled = threading.Event()  # what is under way must come back; the next call may work again
        self._closing = threading.Event()
        self.stop_wanted = False
        #: how many epochs the swarm may be ahead before this peer must take its state instead of joining its round
        self.tolerated_lag = 1 if arguments.delay_grad_averaging or arguments.use_local_updates else 0

    # ------------------------------------------------------------------ between rounds

    def look_around(self) -> None:
        """Read what the other peers last said of their progress."""
        with self._parts.tracker.pause_updates():
            self._others.look()

    def accumulate(self, batch_samples: int, gradient_scale: float) -> None:
        grads = self._grads
        grads.loss_scale = gradient_scale
        if batch_samples > 0:
            grads.accumulate_grads_(batch_samples)
        self._parts.tracker.report_local_progress(self._epoch, grads.local_samples_accumulated)

    def discard(self) -> int:
        """Forget what was accumulated for this epoch; returns how many samples that were."""
        tracker = self._parts.tracker
        samples = int(tracker.local_progress.samples_accumulated)
        if self._parts.grads is not None:
            self._grads.reset_accumulated_grads_()
        tracker.report_local_progress(self._epoch, 0)
        return samples

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        grads = self._grads
        for accumulated in grads._grad_accumulators():
            accumulated.mul_(factor)
        grads.loss_scale *= factor

    def local_update(self, batch_samples: int) -> None:
        """``use_local_updates``: step at once on this batch's own gradient; peers average parameters later."""
        tracker = self._parts.tracker
        samples = tracker.local_progress.samples_accumulated + batch_samples
        tracker.report_local_progress(self._epoch, samples)
        if batch_samples == 0:
            return
        state = self._parts.state
        self._training.before_optimizer_step(state.optimizer)
        # not through hivemind's step, which would wait for a delayed averaging; that one is applied as a difference
        with state.lock_commit, state.lock_optimizer:
            state.optimizer.step()
            self._training.advance_schedulers(self._epoch)

    def apply_finished(self) -> None:
        """Take over what background rounds have finished since the last batch."""
        self._parts.state.step(apply_delayed_updates=True)
        self._parts.state.guard.check()
        if self._background_state is not None and self._background_state[0].done():
            finished, self._background_state = self._background_state, None
            self._background_notes = self._judge_state_round(*finished).notes

    def finish_background(self) -> None:
        """Wait for everything that is delayed, and apply it."""
        self._cancelled.clear()
        self._await_background()
        if self._background_state is not None:
            self._background_state[0].result()  # it ends with the round, or as soon as this peer stops
        self.apply_finished()

    def _await_background(self) -> None:
        """Until it is over, or this peer stops. (hivemind's own wait gives up sooner, and goes on beside it.)"""
        while self._parts.state.pending_updates and not self._should_abort():
            wait(self._parts.state.pending_updates, timeout=POLL_S)
            self._parts.state.step(apply_delayed_updates=True)

    # ------------------------------------------------------------------ a round

    def commit(self) -> RoundResult:
        """End the epoch with the others.

        Raises:
            Missed: they ended it without this peer. Nothing was changed here.
            NotNow: nothing was changed, anywhere.
        """
        parts = self._parts
        self._cancelled.clear()
        with parts.tracker.pause_updates():
            if self._a.delay_optimizer_step or self._a.delay_state_averaging:
                self.finish_background()
                if parts.state.pending_updates:
                    raise NotNow
            others = self._expected_others()
            if others:
                self._others.resize_groups(1 + len(others))
            result, trigger = (UNDER_WAY if others else self._alone()), None
            if parts.grads is not None:
                result, trigger = self._gradient_phase(others)
            with parts.state.lock_commit:
                # whoever did not come to average gradients will not come to average parameters
                result = self._step_phase(others if not result.alone else set(), result, trigger)
            if parts.grads is not None and trigger is None:
                parts.grads.reset_accumulated_grads_()  # after the step, which may have used them where they lie
            parts.tracker.update_epoch(parts.state.local_epoch)
            if self._a.delay_grad_averaging and self._delayed_result is not None:
                delayed, self._delayed_result = self._delayed_result, None
                return RoundResult(fraction=0.0, notes=delayed.notes)
            return result

    def _gradient_phase(self, others: set[bytes]) -> tuple[RoundResult, Any]:
        """Average gradients, or start to: returns what is known, and what the optimizer step must wait for."""
        grads, epoch = self._grads, self._epoch
        if not others:
            if not grads.local_samples_accumulated:
                raise NotNow  # the target was filled by peers that are gone; an auxiliary peer has nothing to do alone
            grads.load_accumulators_into_averager_()
            self._use_gradients()
            return self._alone(), None
        self._grad_control = control = grads.schedule_step(
            timeout=self._a.averaging_timeout, gather=note(stop=self.stop_wanted, auxiliary=self._a.auxiliary)
        )
        weight = None if self._a.auxiliary else grads.weight
        grads.step(weight=weight, control=control, reset_accumulators=False, wait=False)
        if not self._a.delay_grad_averaging:
            return self._finish_gradients(control, epoch, len(others), backup=None), None
        with grads.get_tensors() as tensors:
            backup = [tensor.clone() for tensor in tensors]
        grads.reset_accumulated_grads_()
        return UNDER_WAY, partial(self._finish_delayed, control, epoch, len(others), backup)

    def _finish_delayed(self, control: StepControl, epoch: int, others: int, backup: list[torch.Tensor]) -> None:
        try:
            self._delayed_result = result = self._finish_gradients(control, epoch, others, backup=backup)
        except Exception as error:
            self._parts.state.guard.keep(error)  # hivemind gives up the step, and says nothing to the training thread
            raise
        contributors, fraction = result.contributors, result.fraction
        self._events.emit(DelayedRoundFinished(epoch=epoch + 1, contributors=contributors, fraction=fraction))

    def _finish_gradients(
        self, control: StepControl, epoch: int, others: int, *, backup: list[torch.Tensor] | None
    ) -> RoundResult:
        result = await_round(
            control,
            lambda: self._grads.received_fraction,
            patience_s=self._patience_s,
            timeout_s=self._a.averaging_timeout,
            should_abort=self._should_abort,
        )
        if self._a.auxiliary:
            if not result.succeeded:
                raise NotNow  # it will follow the swarm's epoch
            return result
        if not result.succeeded and backup is None and self._should_abort():
            raise NotNow  # a step of its own would make the others take the state of a peer that leaves
        if not result.succeeded:
            self._fall_back(result, epoch, others, backup)
        elif result.fraction < 1.0:
            self._incomplete("gradients", epoch, result, others, "stepped on what arrived")
        elif result.contributors < others + 1 and "target_group_size" not in (self._a.averager_opts or {}):
            reason = f"{result.contributors} of {others + 1} expected peers were in the group"
            self._incomplete("gradients", epoch, replace(result, reason=reason), others, "stepped with them")
        self._last_members = result.members
        self._use_gradients()
        return result if result.succeeded else replace(ALONE, alone=not result.members)

    def _fall_back(self, result: RoundResult, epoch: int, others: int, backup: list[torch.Tensor] | None) -> None:
        """A round failed. If the others went on, so must we, with their state; else step on the local gradient."""
        if backup is None:
            self._others.look()
            if self._others.lead(epoch) > 0:
                self._incomplete("gradients", epoch, result, others, "the others went on: taking their state")
                raise Missed
            if not self._grads.local_samples_accumulated:
                raise NotNow
            self._grads.load_accumulators_into_averager_()
        else:
            with self._grads.get_tensors() as tensors:
                for tensor, kept in zip(tensors, backup, strict=True):
                    tensor.copy_(kept)
        self._incomplete("gradients", epoch, result, others, "stepped on this peer's own gradient")

    def _step_phase(self, others: set[bytes], result: RoundResult, trigger: Any) -> RoundResult:
        """Optimizer step, epoch + 1, and averaging of parameters: now, or in the background."""
        state, next_epoch = self._parts.state, self._epoch + 1
        control: StepControl | None = None
        if others and next_epoch % self._a.average_state_every == 0 and not state.averaging_in_progress:
            control = self._begin_state_round(next_epoch)
        delayed = self._a.delay_state_averaging and not self._a.auxiliary
        steps = not self._a.auxiliary and self._parts.grads is not None
        watched = None if control is None else self._watch(control)
        state.step(
            increment_epoch=True,
            wait_for_trigger=trigger,
            optimizer_step=steps,
            delay_optimizer_step=bool(self._a.delay_optimizer_step) and steps,
            averaging_round=control is not None,
            delay_averaging=delayed,
            averaging_control=control,
            averaging_opts=dict(timeout=self._a.averaging_timeout) if control is not None else None,
            grad_scaler=state.guard if steps else None,
        )
        if not delayed:
            state.guard.check()
        if not steps and not self._a.auxiliary:
            self._training.advance_schedulers(next_epoch)  # hivemind does it only where it steps
        if delayed and self._parts.grads is None:  # the wish to stop travels with the round before
            notes, self._background_notes = self._background_notes, {}
            result = replace(result, notes={**notes, **result.notes})
        if watched is None:
            return result
        if delayed:
            self._background_state = (watched, next_epoch, len(others))
            return result
        state_result = self._judge_state_round(watched, next_epoch, len(others))
        if self._parts.grads is None:  # with local updates this is the only round there is
            return state_result if state_result.succeeded else ALONE
        return result

    def _expected_others(self) -> set[bytes]:
        self._others.look()
        if self._others.lead(self._epoch) > self.tolerated_lag and not self._a.auxiliary:
            raise Missed
        return self._others.expected(self._epoch, self.tolerated_lag, self._last_members)

    def _alone(self) -> RoundResult:
        """The round of a peer that trains by itself; its own wish to stop is everybody's."""
        return replace(ALONE, notes={b"": note(stop=self.stop_wanted, auxiliary=False)})

    def _begin_state_round(self, next_epoch: int) -> StepControl:
        # stock peers gather the epoch here; with local updates this round must carry our notes, there is no other
        gather: Any = next_epoch
        if self._parts.grads is None:
            gather = note(stop=self.stop_wanted, auxiliary=self._a.auxiliary)
        self._state_control = self._parts.state.schedule_step(gather=gather, timeout=self._a.averaging_timeout)
        return self._state_control

    def _watch(self, control: StepControl) -> Future[RoundResult]:
        """What comes of a state round; it is given up if it finds no group in time, while hivemind waits for it."""
        watched: Future[RoundResult] = Future()

        def watch() -> None:
            result = await_round(
                control,
                lambda: self._parts.state.received_fraction,
                patience_s=self._patience_s,
                timeout_s=self._a.averaging_timeout,
                should_abort=self._should_abort,
            )
            watched.set_result(result)

        threading.Thread(target=watch, name="lightning-hivemind-state-round", daemon=True).start()
        return watched

    def _judge_state_round(self, watched: Future[RoundResult], epoch: int, others: int) -> RoundResult:
        result = watched.result()
        if self._parts.grads is None:
            self._last_members = result.members
        if not result.succeeded:
            self._incomplete("state", epoch, result, others, "parameters stay this peer's own until the next round")
        elif result.fraction < 1.0:
            self._incomplete("state", epoch, result, others, "kept what arrived")
        return result

    def _use_gradients(self) -> None:
        """Put the averager's gradients where the optimizer looks for them, then let hooks and clipping see them."""
        if self._a.auxiliary:
            return
        grads, optimizer = self._grads, self._parts.state.optimizer
        if not self._a.offload_optimizer:
            grads.copy_averaged_to(parameters_of(optimizer))
        grads.notify_used_averaged_gradients()
        self._training.before_optimizer_step(optimizer)

    def _incomplete(self, kind: str, epoch: int, result: RoundResult, others: int, action: str) -> None:
        self._events.emit(
            RoundIncomplete(
                epoch=epoch,
                kind=kind,
                reason=result.reason or f"{'part' if result.succeeded else 'none'} of the values arrived",
                fraction=result.fraction,
                contributors=result.contributors if result.succeeded else 1,
                expected=others + 1,
                action=action,
            )
        )

    # ------------------------------------------------------------------ state of others

    def adopt(self) -> bool:
        """Take over the best state that anybody shares. False if nobody does.

        Raises:
            StateError: what was sent does not fit; nothing changed.
        """
        parts = self._parts
        cancel(self._grad_control)
        self.finish_background()
        with parts.tracker.pause_updates():
            if not adopt_state(self._a, parts, self._training, self._should_abort):
                return False
            parts.tracker.update_epoch(parts.state.local_epoch)
            try:
                parts.tracker.announce(FRESH_S)
            except (FutureTimeoutError, TimeoutError):
                self._events.emit(DhtSilent(what="this peer's progress", duration_s=FRESH_S))
        return True

    def follow(self) -> None:
        """For auxiliary peers, whose parameters do not matter: go to the swarm's epoch."""
        parts = self._parts
        with parts.tracker.pause_updates():
            parts.state.local_epoch = max(self._epoch, int(parts.tracker.global_epoch))
            parts.tracker.update_epoch(parts.state.local_epoch)

    # ------------------------------------------------------------------ the end

    def cancel(self) -> None:
        """Make what blocks now come back."""
        self._cancelled.set()
        cancel(self._grad_control)
        cancel(self._state_control)

    def close(self, timeout_s: float) -> None:
        """Leave the swarm within ``timeout_s``."""
        self._closing.set()
        self.cancel()
        self._parts.stop(time.monotonic() + timeout_s)

    def _should_abort(self) -> bool:
        return self._cancelled.is_set() or self._closing.is_set() or self._training.should_abort()

    @property
    def _patience_s(self) -> float:
        # a group that forms at all forms within matchmaking_time of the last peer's arrival
        return float(1.5 * self._a.matchmaking_time + 1.0)

    @property
    def _epoch(self) -> int:
        return int(self._parts.state.local_epoch)

    @property
    def _grads(self) -> Any:
        assert self._parts.grads is not None, "no gradients are averaged with use_local_updates"
        return self._parts.grads
