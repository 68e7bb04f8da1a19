"""One peer of a swarm that averages by rounds of our own: what the training thread does.

    step(): add the batch ──> told to the rounds' thread ──> a round is due? wait ──> apply every step that is decided

Everything else (who is called, who reduces what, how it ends) happens in the rounds' thread: see ``protocol``,
``driver`` and ``handover``.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from typing import Any

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.base import Changed, PeerTraining, StepOutcome
from lightning_hivemind.engine.native.agreement import EVERY, Agreement, kind_of
from lightning_hivemind.engine.native.catching_up import REPORT_S, CatchingUp
from lightning_hivemind.engine.native.codecs.mapping import map_codec
from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.handover import Handover
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.parts import Parts, build, make_low_rank, overlaps, way_of
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.reports import Reports
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.state.snapshot import Snapshot
from lightning_hivemind.engine.native.stepper import Stepper
from lightning_hivemind.engine.native.steps import Step
from lightning_hivemind.engine.native.stopping import Stopping
from lightning_hivemind.engine.native.sums import Summing
from lightning_hivemind.engine.native.whereabouts import Whereabouts
from lightning_hivemind.engine.swarm_records import SwarmRecords
from lightning_hivemind.errors import DaemonError
from lightning_hivemind.events import EventBus, PeerStopped, SwarmReady, Waiting
from lightning_hivemind.network.daemon import NETWORK_PARTS, PeerNetwork

POLL_S = 0.2
RECORDS_S = 1.0
IDLE_S = 1.0  # how long an auxiliary peer waits for something to happen before it lets the loop go round


class NativeEngine:
    """See the module and :class:`~lightning_hivemind.engine.base.Engine`."""

    def __init__(self, arguments: Arguments, network: PeerNetwork, training: PeerTraining, events: EventBus) -> None:
        self._a, self._network, self._training, self._events = arguments, network, training, events
        self._head = Head.nowhere() if arguments.auxiliary else Head.root(arguments.run_id, network.peer_id)
        local = arguments.use_local_updates
        self._stepper = Stepper(
            training,
            self._head,
            delayed=bool(arguments.delay_optimizer_step),
            local=local,
            moments=arguments.average_opt_statistics,
            outer=arguments.outer,
        )
        self.optimizer = self._stepper.optimizer
        late = bool(arguments.delay_grad_averaging) + bool(arguments.delay_optimizer_step)
        name = "state_averaging_compression" if local else "grad_compression"
        self._coding = map_codec(getattr(arguments, name), name)
        gpu = next((p.device for p in self._stepper.model_parameters if p.device.type == "cuda"), None)
        self._memory = Memory(pinned=gpu is not None, device=gpu)
        self._stepper.low_rank = low_rank = make_low_rank(arguments, self._stepper, self._memory)
        self._gradients = Gradients(
            network.peer_id,
            self._stepper.model_parameters,
            self._stepper.statistics,
            max_staleness=arguments.max_staleness + late,
            summing=Summing(
                in_place=arguments.reuse_grad_buffers,
                local_step=self._stepper.step_alone if local else None,
                is_stale=lambda: self._stepper.stale,
                ranks=training.sums,
            ),
            low_rank=low_rank,
            memory=self._memory,
        )
        every = arguments.average_state_every
        self._agreement = Agreement(network.peer_id, kind_of(training, self.optimizer), every if every > 1 else EVERY)
        self._records: SwarmRecords | None = None
        self._parts: Parts | None = None
        self._whereabouts: Whereabouts | None = None
        self._catching_up: CatchingUp | None = None
        target, staleness = arguments.target_batch_size, arguments.max_staleness
        self._reports = Reports(events, target_samples=target, max_staleness=staleness)
        self._stopping = Stopping(events, lambda: self._training.last_step())

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        way = way_of(self._a, self._stepper.low_rank, self._coding)
        state_memory = StateMemory(self._memory, 4 * self._gradients.elements)
        if self._a.initial_peers and not self._a.auxiliary:  # it will take their state
            state_memory.prepare(self._stepper.state_bytes)
        self._records = SwarmRecords(self._a, self._network, self._training.schema, way, self._training.outside)
        self._records.check_schema()
        self._training.make_scheduler(self.optimizer)
        self._parts = parts = build(
            self._a,
            self._records.run,
            self._network,
            self._gradients,
            self._memory,
            self._coding,
            self._copy_state,
            state_memory,
            self._training.last_step,
        )
        self._whereabouts = Whereabouts(
            self._network,
            self._records.run,
            parts.driver,
            parts.introductions,
            lambda: parts.handover.owes and not self._a.auxiliary,
            None if self._a.auxiliary else self._agreement,
            reduces=not self._a.client_mode,
        )
        self._catching_up = CatchingUp(
            self._a, parts, self._records, self._whereabouts, self._training, self._stepper, self._events
        )

    def kept(self) -> dict[str, Any]:
        return self._stepper.kept()

    def restore(self, optimizer_state: Mapping[str, Any], epoch: int, kept: Mapping[str, Any]) -> None:
        # Of equal checkpoints one peer's is taken by all: the founder's, whoever that is.
        lineage = hashlib.sha256(f"checkpoint {self._a.run_id} {epoch} {self._network.peer_id}".encode()).digest()[:16]
        self._head = Head(epoch=epoch, lineage=lineage, samples=epoch * self._a.target_batch_size)
        self._stepper.load(optimizer_state, self._head, kept)

    def synchronise(self) -> StepOutcome:
        parts, whereabouts = self._running(), self._whereabouts
        assert whereabouts is not None
        self._stepper.begin()
        assert self._catching_up is not None
        best = max(self._catching_up.heads(self._head), key=lambda one: (one.samples, one.epoch), default=None)
        if best is not None and (best.outweighs(self._head) or (self._a.initial_peers and self._head.epoch == 0)):
            self._catching_up.join(best)
        else:
            parts.driver.adopt(self._head)
        if not self._training.should_abort():  # (whoever waits for the founder would come to this peer)
            whereabouts.start()
        self._between_batches(wait=False)  # who follows owes a state
        parts.downloads.memory.release()
        self._reports.peers(self.num_peers)
        self._events.emit(SwarmReady(epoch=self.epoch, num_peers=self.num_peers))
        return StepOutcome(epoch=self.epoch, committed=False)

    def flush(self) -> None:
        self._stepper.settle(wait=True)

    def before_validation(self, *, last: bool = False) -> None:
        self.flush()
        self._gather(due=not last)
        self._running().telling.tell_at_once()
        self._stepper.leave(last=last)

    def shutdown(self, timeout_s: float) -> None:
        start = time.monotonic()
        if self._records is None:
            return
        records, self._records = self._records, None
        with contextlib.ExitStack() as left:  # all of it, also if Ctrl+C comes meanwhile: a notebook lives on
            left.callback(records.close, RECORDS_S)
            left.callback(self._stepper.close)
            if self._parts is not None:
                left.callback(self._parts.stop, start + max(0.5, timeout_s - RECORDS_S))
            if self._whereabouts is not None:
                self._whereabouts.stop()
        if self._catching_up is not None:
            self._catching_up.errands.close()
        self._parts = self._whereabouts = self._catching_up = None
        self._events.emit(PeerStopped(epoch=self.epoch, duration_s=time.monotonic() - start))

    # ------------------------------------------------------------------ step

    def begin_batch(self) -> StepOutcome:
        handover, committed = self._running().handover, False
        self._stepper.back()
        self._gradients.end_batch()
        self._gather(due=False)
        while not (
            handover.begin_batch(self._head, self._limit_s if self._waits else 0.0) or self._training.should_abort()
        ):
            committed |= self._between_batches(wait=self._waits)
            if self._stopped:
                break
        self._gradients.begin_batch()
        return StepOutcome(epoch=self.epoch, committed=committed)

    def step(self, batch_samples: int, gradient_scale: float = 1.0) -> StepOutcome:
        handover = self._running().handover
        self._reports.peers(self.num_peers)
        lost = self._gradients.add(batch_samples, self.epoch, gradient_scale) if batch_samples else 0
        swarm_samples = self._running().driver.status.swarm_samples
        due = not handover.under_way and swarm_samples + batch_samples >= self._a.target_batch_size
        self._gather(due=due or handover.pace.gathers_ahead(time.monotonic()))
        handover.end_batch()  # a round that has waited for this batch may have it
        if batch_samples:
            self._reports.batch(self.epoch, batch_samples, local=self.local_samples, swarm=self.swarm_samples)
        self._gradients.end_batch()
        self._stepper.settle(wait=False)
        self._note_parameters()
        assert self._catching_up is not None
        self._head = self._catching_up.agree(self._catching_up.stay(self._head), self._agreement, self._reports)
        committed = self._between_batches(wait=not overlaps(self._a), lost=lost)
        return StepOutcome(epoch=self.epoch, committed=committed)

    def discard(self) -> int:
        lost = self._gradients.discard()
        self._running().driver.contributed()
        return lost

    def rescale(self, factor: float) -> None:
        self._gradients.rescale(factor)

    def batch_weight(self, batch_samples: int) -> float:
        return self._gradients.weight(batch_samples)

    def _between_batches(self, *, wait: bool, lost: int = 0) -> bool:
        """Do everything that is due; with ``wait``, until no round of this peer is. True if a step was made."""
        parts, committed, reported = self._running(), False, time.monotonic()
        handover, began = parts.handover, parts.handover.waits_since or reported
        assert self._catching_up is not None
        self._gradients.away = False
        parts.telling.tell()
        hold_until = handover.hold_until() if wait else began
        while not self._training.should_abort():
            if not self._network.is_alive() and not self._training.should_abort():
                raise DaemonError.gone(NETWORK_PARTS)
            self._catching_up.errands.run()
            for epoch, reason in handover.take_untold().items():
                self._reports.round_failed(epoch, reason)
            handover.check()
            while (step := self._next_step(handover)) is not None:
                self._report_handed(handover)  # of others, too, that may be in it
                self._apply(step)
                committed = True
            dropped, refused = handover.take_lost()
            if lost := lost + dropped:
                self._reports.lost(self.epoch, lost, left_behind=handover.owes, slow_line=handover.hands_over)
                lost = 0
            if refused:
                self._reports.refused(self.epoch, refused)
            self._report_handed(handover)
            if handover.owes and not self._owes_nothing(handover) and not self._stopped:
                continue
            self._gather(due=wait and (parts.driver.status.due or hold_until > time.monotonic()))
            with handover.changed:
                if not (wait and self._waits) or self._stopped or handover.ready(self._head):
                    if handover.ready(self._head) and not self._stopped:
                        continue
                    break
                if committed:
                    break  # the next batch is of the new parameters
                now, status = time.monotonic(), parts.driver.status
                waits_s = self._limit_s if handover.waits or status.due else hold_until - began
                if self._a.auxiliary:
                    waits_s = max(waits_s, IDLE_S)
                if now - began >= waits_s:
                    break
                handover.changed.wait(min(POLL_S, waits_s - (now - began)))
            if handover.under_way:
                self._reports.round_started(self.epoch, self.local_samples)
            if now - reported >= REPORT_S:
                reported = now
                what = f"the round of epoch {self.epoch}"
                self._events.emit(Waiting(what=what, elapsed_s=now - began, limit_s=self._limit_s))
        self._gradients.away = True
        return committed

    def _report_handed(self, handover: Handover) -> None:
        for handed in handover.take_handed():
            self._reports.handed_over(self.epoch, handed)

    def _next_step(self, handover: Handover) -> Step | None:
        """None after that with which all stop."""
        if handover.stops_at is not None:
            self._stopping.agree(handover.stops_at, by_this_peer=handover.stop_wanted)
        return None if self._stopped else handover.next_step(self._head)

    def _apply(self, step: Step) -> None:
        """Make one global step."""
        head = step.commit.head
        self._reports.round_started(self.epoch, step.mine)
        if not self._a.auxiliary:
            steps_on_sums = self._a.reuse_grad_buffers and not self._a.recreates_optimizer
            self._stepper.settle(wait=True)
            self._note_parameters()  # of the step before, if it was made in the background until now
            with self._gradients.lent() if steps_on_sums else contextlib.nullcontext():
                assert step.average is not None, "a step whose average is not here"
                self._stepper.step(step.average, head, step.counted, mine=step.mine)
        self._head = head
        if not self._a.auxiliary:
            self._note_parameters()
        changed = self._running().handover.changed
        with changed:
            changed.notify_all()  # who waits for a state of it
        self._reports.step(step)

    def _gather(self, *, due: bool) -> None:
        """What ranks have in parts, and have summed or moved since: for a round that calls, or is ``due``."""
        pace = self._running().handover.pace
        if self._gradients.is_stale() and (due or pace.wanted):
            if self._stepper.stale:
                self._stepper.gathered.refresh(Changed.PARAMETERS)
            self._gradients.gather()
            pace.wanted = False
            self._running().driver.contributed()  # which joins that round now

    def _note_parameters(self) -> None:
        stepper, agreement = self._stepper, self._agreement
        if not stepper.busy and agreement.due(stepper.head):
            stepper.gathered.refresh(Changed.PARAMETERS)
            agreement.note(stepper.head, stepper.common)

    def _copy_state(self, known: Snapshot | None) -> Snapshot | None:
        """For a peer that joins; called from the donor's thread."""
        catching_up = self._catching_up
        return None if catching_up is None else catching_up.give(known, lambda: self._catching_up is catching_up)

    def _owes_nothing(self, handover: Handover) -> bool:
        """The parameters here were not the swarm's. Are they now? Else fetch its state, and go on from there."""
        assert self._catching_up is not None
        if settled := handover.settle(self._head):
            self._catching_up.settled()
        elif self._a.auxiliary:  # it has none, and needs none
            self._head = self._running().driver.status.head or self._head
            handover.settle(self._head)
        elif handover.expects(self._head):
            with handover.changed:
                handover.changed.wait(POLL_S)
        else:
            self._head = self._catching_up.run(self._head)
        return settled

    # ------------------------------------------------------------------ the swarm

    def _others(self) -> set[str]:
        """Who lives, whether or not it can be reached from here."""
        status = self._parts.driver.status if self._parts is not None else None
        return set() if status is None else {*status.living, *status.cut}

    def request_stop(self, reason: str) -> None:
        if self._stopping.epoch is None and self.num_peers == 1:
            self._stopping.agree(self.epoch, by_this_peer=True)
        else:
            self._running().handover.stop_wanted = True

    def swarm_mean(self, name: str, value: float, samples: int) -> float:
        if self._records is None:
            return value
        return self._records.mean(name, value, samples, alive=self._others())

    # ------------------------------------------------------------------ what one may ask

    @property
    def epoch(self) -> int:
        return self._head.epoch

    @property
    def num_peers(self) -> int:
        return 1 + len(self._others())

    @property
    def local_samples(self) -> int:
        return self._gradients.samples

    @property
    def swarm_samples(self) -> int:
        known = 0 if self._parts is None else self._parts.driver.status.swarm_samples
        return max(self.local_samples, known)

    @property
    def stop_epoch(self) -> int | None:
        return self._stopping.epoch

    @property
    def _stopped(self) -> bool:
        return self._stopping.is_reached(self.epoch)

    @property
    def _waits(self) -> bool:
        """Whether no batch begins while a round of this peer is due: without overlap, or it would get too far ahead."""
        share = self._running().handover.pace.share(self.num_peers)
        return not overlaps(self._a) or self._gradients.is_far_ahead(share)

    @property
    def _limit_s(self) -> float:
        """How long the training thread waits for a round before it goes on accumulating."""
        return float(self._a.averaging_timeout + self._a.matchmaking_time)

    def _running(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("the engine is not running: start() was not called, or shutdown() was")
        return self._parts
