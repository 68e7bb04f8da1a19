"""What the user hears of this peer's steps: events, each told once."""

from __future__ import annotations

import time

from lightning_hivemind.engine.native.agreement import Difference
from lightning_hivemind.engine.native.seam import Outcome
from lightning_hivemind.engine.native.steps import Handed, Received, Step
from lightning_hivemind.events import (
    LEFT_BEHIND,
    BatchAccumulated,
    EpochCommitted,
    EventBus,
    GradientCarried,
    GradientHandedOver,
    ParametersDiffered,
    PeersChanged,
    RoundIncomplete,
    RoundMissed,
    RoundStarted,
)


class Reports:
    """See the module. Used by the training thread.

    Args:
        target_samples: of a step.
        max_staleness: the user's argument.
    """

    def __init__(self, events: EventBus, *, target_samples: int, max_staleness: int) -> None:
        self._events, self._target_samples = events, target_samples
        self._too_old = f"they are older than max_staleness={max_staleness}"
        self._slow_line = f"this peer's line takes longer to send them than max_staleness={max_staleness} allows"
        self._num_peers, self._announced = 1, -1

    def peers(self, count: int) -> None:
        """So many are in the run."""
        if count != self._num_peers:
            self._num_peers = count
            self._events.emit(PeersChanged(num_peers=count))

    def batch(self, epoch: int, samples: int, *, local: int, swarm: int) -> None:
        """A batch was added; ``local`` and ``swarm`` are the samples towards the next step with it."""
        self._events.emit(
            BatchAccumulated(
                epoch=epoch,
                batch_samples=samples,
                local_samples=local,
                swarm_samples=swarm,
                target_batch_size=self._target_samples,
                num_peers=self._num_peers,
            )
        )

    def round_started(self, epoch: int, samples: int) -> None:
        """Of the step from ``epoch``, with so many samples of this peer."""
        if self._announced != epoch:
            self._announced = epoch
            self._events.emit(RoundStarted(epoch=epoch, samples=samples))

    def round_failed(self, epoch: int, reason: str) -> None:
        self._events.emit(
            RoundIncomplete(
                epoch=epoch,
                kind="gradients",
                reason=reason,
                fraction=0.0,
                contributors=1,
                expected=self._num_peers,
                action="nothing was changed; the next attempt has the same gradients",
            )
        )

    def step(self, step: Step) -> None:
        """It was made."""
        self._events.emit(
            EpochCommitted(
                epoch=step.commit.head.epoch,
                samples=step.mine,
                contributors=len(step.commit.contributions),
                fraction=1.0,
                duration_s=time.monotonic() - step.began,
            )
        )

    def lost(self, epoch: int, samples: int, *, left_behind: bool, slow_line: bool) -> None:
        """Samples of this peer are in no step, and will be in none."""
        reason = LEFT_BEHIND if left_behind else self._slow_line if slow_line else self._too_old
        self._events.emit(RoundMissed(epoch=epoch, samples_lost=samples, reason=reason))

    def refused(self, epoch: int, samples: int) -> None:
        """Samples of this peer whose gradient another one could not use."""
        reason = "the sum of their gradients, or of all peers', is not finite"
        self._events.emit(RoundMissed(epoch=epoch, samples_lost=samples, reason=reason))

    def handed_over(self, epoch: int, handed: Handed | Received) -> None:
        """A gradient was handed to another peer, or to this one, or that came to nothing."""
        if isinstance(handed, Received):
            self._events.emit(GradientCarried(epoch=epoch, peer=handed.of, samples=handed.samples))
            return
        peer, samples = handed.to, handed.samples
        if handed.outcome is Outcome.TAKEN:
            self._events.emit(GradientHandedOver(epoch=epoch, peer=peer, samples=samples, duration_s=handed.duration_s))
            return
        reason = f"peer {peer}, to which they were handed over a slow line, did not say that it has them (it may)"
        reason = self._slow_line if handed.outcome is Outcome.TOO_OLD else reason
        self._events.emit(RoundMissed(epoch=epoch, samples_lost=samples, reason=reason))

    def differed(self, found: Difference) -> None:
        unlike = "they are of another kind of device or torch, and round otherwise"
        reason = "of the same kind: something else than steps has changed them" if found.like else unlike
        self._events.emit(ParametersDiffered(epoch=found.epoch, num_peers=len(found.peers), reason=reason))
