"""A modelled peer that keeps the engine's pace: who waits for whom between batches, by the very same :class:`Pace`."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, cast

from lightning_hivemind.engine.native.pace import Pace
from lightning_hivemind.engine.native.protocol.actions import Action, Apply, Called, GiveUp, Note, Send
from lightning_hivemind.engine.native.protocol.messages import RoundId
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.simulation.quick import QuickPeer
from lightning_hivemind.simulation.trainer import Habits, SimulatedPeer

if TYPE_CHECKING:
    from lightning_hivemind.simulation.paced_world import PacedWorld

#: a batch takes its usual time, give or take so much
JITTER = 0.05


class PacedPeer(SimulatedPeer):
    """As the engine without overlap: no batch begins while a round is due or under way, or while a state is owed."""

    world: PacedWorld
    least_tick_s = 0.05  # while a coordinator's loss is inquired into, it always wants one at once

    def __init__(self, world: PacedWorld, name: str, incarnation: int, settings: Settings, habits: Habits) -> None:
        super().__init__(world, name, incarnation, settings, habits)
        self.pace = Pace(settings.target_samples, longest_s=0.8 * settings.matchmaking_s)
        #: chunks that are on their way here, by round and sender
        self.incoming: Counter[tuple[RoundId, str]] = Counter()
        self._chance = random.Random(f"{world.seed} {self.tag}")
        self._computing = False
        self._called: tuple[RoundId, float] | None = None
        self._under_way: RoundId | None = None
        self._idle_since = self._hold_until = world.now

    def _make_core(self, tag: str) -> Peer:
        return QuickPeer(self.settings, self.name, tag.encode(), reduces=self.habits.reduces, ranks=self.world.ranks)

    @property
    def quick(self) -> QuickPeer:
        """The core, as what it is."""
        return cast(QuickPeer, self.core)

    # ------------------------------------------------------------------ batches

    def _train(self) -> None:
        """Begin the next batch, unless there is a reason to wait: asked after every event."""
        if self._computing or not self.alive or self._under_way is not None or self._called is not None:
            return
        now = self.world.now
        if self.parameters is None or self.parameters.head != self.core.head:
            return
        if now < self._hold_until or (self.core.due and now < self._idle_since + self.settings.round_s):
            return
        self._computing = True
        self.pace.begin_batch(now)
        self.world.clock.after(self.habits.batch_s * self._chance.uniform(1 - JITTER, 1 + JITTER), self._batch)

    def _batch(self) -> None:
        if not self.alive:
            return
        now = self.world.now
        self.pace.end_batch(now)
        self._make_samples()
        self._computing, self._idle_since = False, now
        self._hold_until = self.pace.hold_until(len(self.pool) * self.habits.weight, now)
        if self._hold_until > now:
            self.world.clock.at(self._hold_until, self._train)
        self._report_pool()
        self._answer(now)

    def carry_out(self) -> None:
        super().carry_out()
        self._train()

    def _tick_at(self, due: float) -> None:
        """Once at a time: an earlier one that is planned meanwhile takes the place of this one."""
        self.world.clock.at(due, lambda: self.tick() if due == self._ticking_at else None)

    def saw(self, peer: str, place: Place) -> None:
        """It reads another peer's record: most lead to nothing, which need not be carried out."""
        self.core.saw(peer, place, self.world.now)
        if self.quick.wants_something or self.core.deadline < self._ticking_at:
            self.carry_out()
        else:
            self._train()

    def tick(self) -> None:
        if self.alive:  # a chunk that is on its way is a sign of life: parts of it arrive all the time
            for round_id, sender in self.incoming:
                if self.world.peers[sender].alive:
                    self.core.heard(round_id, sender, self.world.now)
        super().tick()

    # ------------------------------------------------------------------ rounds

    def _answer(self, now: float) -> None:
        """Join the round that called, if it was waiting for this batch, or has waited long enough."""
        if self.alive and self._called is not None and (not self._computing or now >= self._called[1]):
            (round_id, _), self._called = self._called, None
            self._enter(round_id)
            self.carry_out()

    def _enter(self, round_id: RoundId) -> None:
        self._under_way = round_id
        self._join(round_id)

    def _do(self, action: Action) -> None:
        now = self.world.now
        match action:
            case Called(round=round_id):
                self.pace.called(now)
                until = self.pace.join_at(now)
                if until <= now:
                    self._called = None
                    self._enter(round_id)
                else:
                    self._called = (round_id, until)
                    self.world.clock.at(until, lambda: self._answer(self.world.now))
                return
            case Apply(commit=commit, mine=mine):
                given = mine.samples if mine is not None else 0
                others = len(commit.contributions) - (mine is not None)
                self.pace.step(commit.samples - given, now, mine=given, others=others)
                self._under_way = self._called = None
                self._idle_since = self._hold_until = now
                self.world.tally.decided(self, commit)
            case GiveUp(round=round_id):
                if self._under_way == round_id:
                    self._under_way = None
                if self._called is not None and self._called[0] == round_id:
                    self._called = None
            case Note(what=what):
                self.world.tally.reason(what)
                return
            case Send(message=message):
                self.world.tally.sends(self, action.to, message)
            case _:
                pass
        super()._do(action)
