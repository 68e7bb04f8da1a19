"""One peer of a hivemind swarm: accumulate, average, step; built on hivemind's averagers, trusting none of them.

What hivemind's own ``Optimizer`` does in one class is split here: :mod:`.tracker` says when an epoch is due,
:mod:`.epoch` runs its rounds, :mod:`.state` takes over a state, and this class decides what to do next. It speaks
hivemind's wire protocol under hivemind's names, so stock peers average with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hivemind.p2p import PeerID

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.base import PeerTraining, StepOutcome
from lightning_hivemind.engine.stock.adoption import load_local_parameters
from lightning_hivemind.engine.stock.build import Parts, build_parts, start_tracker
from lightning_hivemind.engine.stock.epoch import EpochRounds
from lightning_hivemind.engine.stock.rounds import Missed, NotNow
from lightning_hivemind.engine.swarm_records import SwarmRecords
from lightning_hivemind.engine.worker import Worker
from lightning_hivemind.errors import DaemonError, EngineStuckError, StateError
from lightning_hivemind.events import (
    BatchAccumulated,
    EpochCommitted,
    EventBus,
    PeersChanged,
    PeerStopped,
    RoundMissed,
    RoundStarted,
    StateLoaded,
    StateUnavailable,
    StopRequested,
    SwarmReady,
)
from lightning_hivemind.network.daemon import NETWORK_PARTS, PeerNetwork

T = TypeVar("T")

ADOPT_ATTEMPTS = 10
ADOPT_PAUSE_S = 1.0
EXPIRY_S = 10.0  # how much later than due a report may be forgotten everywhere
START_ATTEMPTS = 4
FIRST_ANSWER_S = 15.0  # many times what a lookup takes that meets peers which are gone
RECORDS_S = 1.0
IDLE_S = 0.2  # how long an auxiliary peer sleeps between two looks at the swarm


class StockEngine:
    """See the module and :class:`~lightning_hivemind.engine.base.Engine`."""

    def __init__(self, arguments: Arguments, network: PeerNetwork, training: PeerTraining, events: EventBus) -> None:
        self._a, self._network, self._training, self._events = arguments, network, training, events
        self._worker = Worker("lightning-hivemind-rounds", events, self._should_abort)
        self._parts: Parts | None = None
        self._session: EpochRounds | None = None
        self._records: SwarmRecords | None = None
        self._restored_epoch = 0
        self._num_peers = 1
        self._stop_epoch: int | None = None
        self._failed_adoptions = 0
        self._failing_since: float | None = None
        self._adoption_error: StateError | None = None
        self.optimizer = training.optimizer

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._records = SwarmRecords(
            self._a, self._network, self._training.schema, "engine hivemind", self._training.outside
        )
        self._records.check_schema()
        joins = bool(self._a.initial_peers)
        tracker = self._worker.call(
            lambda: start_tracker(self._a, self._network.dht),
            what="the DHT's first answer",
            limit_s=FIRST_ANSWER_S,
            cancel=lambda: None,
        )
        parts = build_parts(self._a, self._network.dht, tracker, self._training, share_state=not joins)
        self._parts = parts
        self.optimizer = parts.state.optimizer
        self._training.make_scheduler(self.optimizer)
        self._session = EpochRounds(self._a, parts, self._records, self._training, self._events)

    def kept(self) -> dict[str, Any]:
        return {}

    def restore(self, optimizer_state: Mapping[str, Any], epoch: int, kept: Mapping[str, Any]) -> None:
        parts = self._require_parts()
        self.optimizer.load_state_dict(dict(optimizer_state))
        self._restored_epoch = epoch
        with parts.tracker.pause_updates(), parts.state.lock_commit:
            parts.state.local_epoch = epoch
            load_local_parameters(parts.state)
            parts.tracker.update_epoch(epoch)
        self._share(epoch)

    def synchronise(self) -> StepOutcome:
        parts = self._require_parts()
        joins = bool(self._a.initial_peers)
        session = self._require_session()
        self._in_worker(session.look_around, "a look at the other peers", self._limit_s)
        if self._a.auxiliary:
            self._in_worker(session.follow, "following the swarm", self._limit_s)
        elif parts.tracker.global_epoch > self.epoch or (joins and self.epoch == 0):
            self._adopt_at_start()
        if not self._a.client_mode and not self._a.auxiliary:
            parts.state.allow_state_sharing = True
        self._count_peers()
        self._events.emit(SwarmReady(epoch=self.epoch, num_peers=self._num_peers))
        return StepOutcome(epoch=self.epoch, committed=False)

    def _adopt_at_start(self) -> None:
        """A joiner begins with the parameters that the others have, also before their first step."""
        parts = self._require_parts()
        for attempt in range(START_ATTEMPTS):
            behind = parts.tracker.global_epoch > self.epoch
            if self._adopt(required=behind):
                return
            if not behind and not self._num_trainers():
                return
            time.sleep(ADOPT_PAUSE_S if attempt < START_ATTEMPTS - 1 else 0.0)
        if self._adoption_error is not None:
            raise self._adoption_error  # somebody shares a state, and it does not fit
        action = "starting with this peer's own parameters; the first averaging of the state makes them equal"
        self._events.emit(StateUnavailable(epoch=self.epoch, reason="no peer shares its state", action=action))

    def _num_trainers(self) -> int:
        """Other live peers that train, as far as is known."""
        records = self._records
        ours = records.trainers if records is not None else set()
        return len(ours) + len(self._require_parts().tracker.others_since(0))

    def flush(self) -> None:
        if self._session is not None and not self._worker.stuck:  # a checkpoint on the way out must still be possible
            self._in_worker(self._session.finish_background, "delayed work", self._limit_s)

    def before_validation(self, *, last: bool = False) -> None:
        self.flush()

    def shutdown(self, timeout_s: float) -> None:
        start = time.monotonic()
        if self._records is None:
            return
        if self._session is not None:
            self._session.close(max(1.0, timeout_s - RECORDS_S))
        elif self._parts is not None:  # it failed while it started
            self._parts.stop(start + max(1.0, timeout_s - RECORDS_S))
        self._records.close(RECORDS_S)
        self._worker.close()
        self._restored_epoch = self.epoch
        self._session, self._parts, self._records = None, None, None
        self._events.emit(PeerStopped(epoch=self.epoch, duration_s=time.monotonic() - start))

    # ------------------------------------------------------------------ step

    def begin_batch(self) -> StepOutcome:
        return StepOutcome(epoch=self.epoch, committed=False)

    def step(self, batch_samples: int, gradient_scale: float = 1.0) -> StepOutcome:
        session, parts = self._require_session(), self._require_parts()
        self._check_processes()
        self._count_peers()
        session.apply_finished()
        if self._behind() > session.tolerated_lag:
            return self._catch_up(batch_samples)
        if self._a.auxiliary:
            self._idle_until_due()
        elif parts.grads is not None:
            session.accumulate(batch_samples, gradient_scale)
        else:
            session.local_update(batch_samples)
        if not self._a.auxiliary:
            self._report_batch(batch_samples)
        if not parts.tracker.ready_to_update_epoch:
            return StepOutcome(epoch=self.epoch, committed=False)
        return self._commit()

    def discard(self) -> int:
        return self._require_session().discard()

    def rescale(self, factor: float) -> None:
        self._require_session().rescale(factor)

    def _commit(self) -> StepOutcome:
        session = self._require_session()
        epoch, samples, start = self.epoch, self.local_samples, time.monotonic()
        self._events.emit(RoundStarted(epoch=epoch, samples=samples))
        try:
            result = self._in_worker(session.commit, f"the round of epoch {epoch}", self._limit_s)
        except Missed:
            return self._catch_up(0)
        except NotNow:
            return StepOutcome(epoch=self.epoch, committed=False)
        except EngineStuckError:
            if not self._training.should_abort():
                raise
            # this peer is being stopped, and its helpers perhaps already were: that is the reason, not the round
            return StepOutcome(epoch=self.epoch, committed=False)
        self._failed_adoptions, self._failing_since = 0, None
        self._share(self.epoch)
        self._events.emit(
            EpochCommitted(
                epoch=self.epoch,
                samples=samples,
                contributors=result.contributors,
                fraction=result.fraction,
                duration_s=time.monotonic() - start,
            )
        )
        if result.stop_requested:
            self._agree_to_stop(self.epoch)
        return StepOutcome(epoch=self.epoch, committed=True)

    def _idle_until_due(self) -> None:
        deadline = time.monotonic() + 5 * IDLE_S
        tracker = self._require_parts().tracker
        while not tracker.ready_to_update_epoch and time.monotonic() < deadline and not self._training.should_abort():
            time.sleep(IDLE_S)

    def _report_batch(self, batch_samples: int) -> None:
        self._events.emit(
            BatchAccumulated(
                epoch=self.epoch,
                batch_samples=batch_samples,
                local_samples=self.local_samples,
                swarm_samples=self.swarm_samples,
                target_batch_size=self._a.target_batch_size,
                num_peers=self._num_peers,
            )
        )

    # ------------------------------------------------------------------ falling behind

    def _behind(self) -> int:
        return int(self._require_parts().tracker.global_epoch) - self.epoch

    def _catch_up(self, batch_samples: int) -> StepOutcome:
        """The swarm committed without this peer: drop what it has for the old epoch, and this batch; take its state."""
        if self._a.auxiliary:
            self._in_worker(self._require_session().follow, "following the swarm", self._limit_s)
            return StepOutcome(epoch=self.epoch, committed=False)
        lost = self._require_session().discard() + batch_samples
        self._events.emit(RoundMissed(epoch=self.epoch, samples_lost=lost))
        self._adopt(required=True)
        return StepOutcome(epoch=self.epoch, committed=False)

    def _adopt(self, *, required: bool) -> bool:
        session, start = self._require_session(), time.monotonic()
        try:
            found = self._in_worker(session.adopt, "the download of the swarm's state", self._load_limit_s)
            self._adoption_error, reason = None, "no peer shares its state"
        except StateError as error:
            if self._failed_adoptions + 1 >= ADOPT_ATTEMPTS:
                raise
            found, reason, self._adoption_error = False, str(error), error
        if found:
            self._failed_adoptions, self._failing_since = 0, None
            self._share(self.epoch)
            self._events.emit(StateLoaded(epoch=self.epoch, duration_s=time.monotonic() - start))
        elif required:
            self._failed_adoptions += 1
            self._failing_since = self._failing_since or start
            # whoever was ahead may be dead: until its last report expires nobody can tell, and then we go on without it
            waited = (
                time.monotonic() - self._failing_since > self._require_parts().tracker.metadata_expiration + EXPIRY_S
            )
            if self._failed_adoptions >= ADOPT_ATTEMPTS and waited:
                raise StateError(
                    f"this peer is at epoch {self.epoch}, the swarm at {self.epoch + self._behind()}, and"
                    f" {self._failed_adoptions} attempts to download the swarm's state failed: {reason}."
                    " At least one peer that trains must be reachable (not in client_mode). Nothing was changed here."
                )
            self._events.emit(StateUnavailable(epoch=self.epoch, reason=reason, action="trying again"))
            time.sleep(ADOPT_PAUSE_S)
        return found

    def _share(self, epoch: int) -> None:
        """Tell joiners that this state is as good as its epoch."""
        parts = self._require_parts()
        if not self._a.client_mode:
            parts.state.state_sharing_priority = epoch
            if parts.grads is not None:
                parts.grads.state_sharing_priority = epoch

    # ------------------------------------------------------------------ the swarm

    def request_stop(self, reason: str) -> None:
        if self._stop_epoch is None and self._num_peers == 1:
            self._agree_to_stop(self.epoch, by_this_peer=True)
        else:
            self._require_session().stop_wanted = True

    def _agree_to_stop(self, epoch: int, *, by_this_peer: bool | None = None) -> None:
        if self._stop_epoch is None:
            mine = self._require_session().stop_wanted if by_this_peer is None else by_this_peer
            self._stop_epoch = epoch
            self._events.emit(StopRequested(epoch=self._stop_epoch, by_this_peer=mine))

    def swarm_mean(self, name: str, value: float, samples: int) -> float:
        if self._records is None:
            return value
        return self._records.mean(name, value, samples)

    def batch_weight(self, batch_samples: int) -> float:
        """See :meth:`.averagers.SampleWeighted.batch_weight`."""
        grads = self._require_parts().grads
        return 1.0 if grads is None else float(grads.batch_weight(batch_samples))

    def _count_peers(self) -> None:
        count = self.num_peers
        if count != self._num_peers:
            self._num_peers = count
            self._events.emit(PeersChanged(num_peers=count))

    # ------------------------------------------------------------------ what one may ask

    @property
    def epoch(self) -> int:
        return int(self._parts.state.local_epoch) if self._parts is not None else self._restored_epoch

    @property
    def num_peers(self) -> int:
        if self._parts is None or self._records is None:
            return 1
        reporting = {PeerID(peer).to_base58() for peer in self._parts.tracker.others_since(self.epoch - 1)}
        return 1 + len(reporting | self._records.peers)

    @property
    def local_samples(self) -> int:
        return int(self._parts.tracker.local_progress.samples_accumulated) if self._parts is not None else 0

    @property
    def swarm_samples(self) -> int:
        return self._parts.tracker.swarm_samples if self._parts is not None else 0

    @property
    def stop_epoch(self) -> int | None:
        return self._stop_epoch

    def _in_worker(self, function: Callable[[], T], what: str, limit_s: float) -> T:
        try:
            return self._worker.call(function, what=what, limit_s=limit_s, cancel=self._require_session().cancel)
        except EngineStuckError:
            self._check_processes()
            raise

    def _should_abort(self) -> bool:
        return self._training.should_abort() or self._dead_process is not None

    def _check_processes(self) -> None:
        """Raise DaemonError, and not whatever it leads to, if a process of this peer is gone."""
        dead = self._dead_process
        if dead is not None and not self._training.should_abort():
            raise DaemonError.gone(dead)

    @property
    def _dead_process(self) -> str | None:
        if not self._network.is_alive():
            return NETWORK_PARTS
        return None if self._parts is None else self._parts.dead

    @property
    def _limit_s(self) -> float:
        # gradients and state are each bounded by averaging_timeout inside; this is the outer fence
        return 2 * self._a.averaging_timeout + self._a.matchmaking_time

    @property
    def _load_limit_s(self) -> float:
        return float(self._a.load_state_timeout) + self._a.averaging_timeout

    def _require_parts(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("the engine is not running: start() was not called, or shutdown() was")
        return self._parts

    def _require_session(self) -> EpochRounds:
        if self._session is None:
            raise RuntimeError("the engine is not running: start() was not called, or shutdown() was")
        return self._session
