"""Runs a scenario and says what came of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from lightning_hivemind.simulation.paced_world import PacedWorld
from lightning_hivemind.simulation.quick import computed_once
from lightning_hivemind.simulation.scenario import Scenario

#: so many times the longest round, and batches, without a step: nothing will come of it any more
PATIENCE = 2.0
REASONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a run of that shape would be like. Bytes are of the application: frames, without TLS, TCP and IP.

    Attributes:
        steps: that were made and measured; one more came before them.
        simulated_s: virtual seconds of the measured steps; until it was given up, if there are none.
        step_s_median, step_s_p95: seconds from one step to the next; None if there was none.
        encoded_bytes: of one peer's gradient.
        sent_bytes_*, received_bytes_*: per peer and step; the largest is of the peer with the most.
        coordinator_messages, coordinator_message_bytes: sent and received by it, per step (mean).
        members: peers in a round (mean).
        full_rounds: share of the steps whose round had to its end all peers that were called.
        aborted_rounds: rounds that had a plan and came to nothing.
        forks: heads that were extended in two ways.
        samples_committed, samples_open: in the lineage; computed, and waiting for a step when the run was stopped.
        samples_lost_by_crash, samples_dropped: with a peer that was killed; in a step that did not survive.
        reasons: why rounds ended, or went on without a peer, and how often; the most frequent ones.
    """

    peers: int
    steps: int
    simulated_s: float
    step_s_median: float | None
    step_s_p95: float | None
    encoded_bytes: int
    chunks: int
    reducers: int
    sent_bytes_mean: float
    sent_bytes_largest: int
    received_bytes_mean: float
    received_bytes_largest: int
    coordinator_messages: float
    coordinator_message_bytes: float
    members: float
    full_rounds: float | None
    aborted_rounds: int
    forks: int
    crashes: int
    restarts: int
    samples_committed: int
    samples_open: int
    samples_lost_by_crash: int
    samples_dropped: int
    reasons: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Churn:
    """Kills random peers and starts them again. The last peer that is alive is spared."""

    def __init__(self, world: PacedWorld, scenario: Scenario) -> None:
        self._world, self._scenario = world, scenario
        self._chance = random.Random(f"{scenario.seed} churn")
        self.crashes = self.restarts = 0
        if scenario.churn_per_min:
            self._next()

    def _next(self) -> None:
        self._world.clock.after(self._chance.expovariate(self._scenario.churn_per_min / 60.0), self._strike)

    def _strike(self) -> None:
        living = sorted(peer.name for peer in self._world.living())
        if len(living) > 1:
            name = self._chance.choice(living)
            self.crashes += 1
            self._world.crash(name)
            peer = self._world.peers[name]
            away_s = self._scenario.restart_s + self._world.state_time_s(peer)
            self._world.clock.after(away_s, lambda: self._restart(name))
        self._next()

    def _restart(self, name: str) -> None:
        self.restarts += 1
        self._world.add(name, self._world.peers[name].habits)


def forecast(scenario: Scenario, progress: Callable[[int, float], None] = lambda steps, now: None) -> Forecast:
    """Simulate until all steps are made, or until no step comes any more.

    Args:
        progress: called after each step with the steps so far and the virtual time in seconds.
    Raises:
        AssertionError: an invariant of the protocol does not hold; this is a bug, and the seed repeats it.
    """
    with computed_once():
        world = scenario.world()
        churn = Churn(world, scenario)
        _run(world, scenario, progress)
        return _read(world, scenario, churn)


def _run(world: PacedWorld, scenario: Scenario, progress: Callable[[int, float], None]) -> None:
    slowest_s = max(peer.habits.batch_s for peer in world.peers.values())
    batches = math.ceil(scenario.target / (scenario.peers * scenario.batch_samples))
    patience_s = PATIENCE * (scenario.matchmaking_time + 1.5 * scenario.averaging_timeout + batches * slowest_s)
    steps, last = world.tally.steps, 0.0
    while len(steps) <= scenario.steps and world.now < last + patience_s:
        before = len(steps)
        world.clock.run(world.now + min(1.0, scenario.batch_s))
        if len(steps) > before:
            last = steps[-1].at
            progress(len(steps) - 1, world.now)
    if steps:  # let the last one arrive everywhere, or see who lacks it
        world.clock.run(world.now + scenario.batch_s)


def _read(world: PacedWorld, scenario: Scenario, churn: Churn) -> Forecast:
    committed = world.check_everything()
    tally = world.tally
    measured = tally.steps[1:]
    times = [after.at - before.at for before, after in zip(tally.steps, tally.steps[1:], strict=False)]
    counted = max(1, len(measured))
    weight, lives = scenario.batch_samples, world.everybody
    dead = [peer for peer in lives if not peer.alive]
    return Forecast(
        peers=scenario.peers,
        steps=len(measured),
        simulated_s=sum(times) if times else world.now,
        step_s_median=median(times) if times else None,
        step_s_p95=sorted(times)[math.ceil(0.95 * len(times)) - 1] if times else None,
        encoded_bytes=scenario.encoded_bytes,
        chunks=scenario.layout.chunks,
        reducers=sum(peer.habits.reduces for peer in world.peers.values()),
        sent_bytes_mean=tally.sent.total() / scenario.peers / counted,
        sent_bytes_largest=max(tally.sent.values(), default=0) // counted,
        received_bytes_mean=tally.received.total() / scenario.peers / counted,
        received_bytes_largest=max(tally.received.values(), default=0) // counted,
        coordinator_messages=fmean(step.messages for step in measured) if measured else 0.0,
        coordinator_message_bytes=fmean(step.message_bytes for step in measured) if measured else 0.0,
        members=fmean(step.members for step in measured) if measured else 0.0,
        full_rounds=fmean(step.full for step in measured) if measured else None,
        aborted_rounds=len(tally.aborted),
        forks=world.forks,
        crashes=churn.crashes,
        restarts=churn.restarts,
        samples_committed=weight * sum(map(len, committed.values())),
        samples_open=weight * sum(len(peer.pool) for peer in lives if peer.alive),
        samples_lost_by_crash=weight * sum(peer.made - len(committed.get(peer.tag, ())) for peer in dead),
        samples_dropped=weight * sum(peer.dropped for peer in lives if peer.alive),
        reasons=dict(tally.reasons.most_common(REASONS)),
    )
