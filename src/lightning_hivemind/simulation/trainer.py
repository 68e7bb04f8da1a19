"""A peer whose training and tensors are modelled, around the real protocol core.

Values are stood for by what they were made of: a sample by its name, a contribution by its samples, a reduced chunk by
who reduced what, parameters by the chain of averages that were applied. So it can be checked what a real run can only
hope: that all peers have the same parameters, and that no sample counts twice.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lightning_hivemind.engine.native.protocol.actions import (
    Action,
    Apply,
    Arrived,
    Begun,
    Called,
    CatchUp,
    GiveUp,
    Note,
    Reduce,
    Send,
    SendInput,
    SendResult,
    TellGone,
)
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.protocol.messages import Message, RoundId
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Offer, Plan
from lightning_hivemind.engine.native.protocol.settings import Settings

if TYPE_CHECKING:
    from lightning_hivemind.simulation.world import World


@dataclass(kw_only=True)
class Habits:
    """How a modelled peer trains: a batch of ``batch_samples`` takes ``batch_s`` seconds.

    ``weight``: samples that go by one name, for runs with so many that naming each would take long.
    """

    batch_samples: int = 8
    weight: int = 1
    batch_s: float = 0.1
    reduces: bool = True
    bandwidth: float = 1.0


@dataclass(kw_only=True)
class Parameters:
    """Stands for a model's parameters: where they are in the lineage, and the digest of all that was applied."""

    head: Head
    digest: bytes


@dataclass(kw_only=True)
class RoundData:
    """What a round has brought: inputs of own chunks by (chunk, peer), reduced ones and results by chunk.

    ``early``: results, with version and owner, that have come before their version of the plan.
    """

    plan: Plan | None = None
    inputs: dict[tuple[int, str], Contribution] = field(default_factory=dict)
    reduced: dict[int, bytes] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    early: dict[int, tuple[int, str, bytes]] = field(default_factory=dict)

    def begin(self, plan: Plan) -> None:
        self.plan = plan
        early, self.early = self.early, {}
        for chunk, result in early.items():
            self.take(chunk, *result)

    def take(self, chunk: int, version: int, owner: str, value: bytes) -> None:
        if self.plan is None or version > self.plan.version:
            self.early[chunk] = version, owner, value
        elif self.plan.wants(chunk, version, owner):
            self.results[chunk] = value


class SimulatedPeer:
    """One peer of a :class:`~.world.World`."""

    #: between two looks at the time, where the protocol wants one at once
    least_tick_s = 0.001

    def __init__(self, world: World, name: str, incarnation: int, settings: Settings, habits: Habits) -> None:
        self.world, self.name, self.settings, self.habits = world, name, settings, habits
        self.alive, self.frozen, self.slow = True, False, False
        tag = f"{name}#{incarnation}"
        self.core = self._make_core(tag)
        self.parameters: Parameters | None = None
        #: commits that this peer applied, oldest first
        self.applied: list[Commit] = []
        #: averages that are to be applied next, and whether their bytes are here; None: they are coming
        self._averages: deque[tuple[Commit, bool | None]] = deque()
        self.pool: set[str] = set()
        #: samples of each contribution that was offered, by its number, until it is known what became of them
        self.offered: dict[int, frozenset[str]] = {}
        self.data: dict[RoundId, RoundData] = {}
        #: results of rounds that this peer has not joined, or is not in any more
        self._before_joining: deque[tuple[str, RoundId, int, int, bytes]] = deque(maxlen=self.settings.chunks)
        self.notes: list[Note] = []
        #: samples that were dropped because it cannot be known whether a commit has them
        self._unknown: set[str] = set()
        #: this peer's contributions to commits that it left; a later lineage may have them after all
        self._forsaken: set[Contribution] = set()
        self.tag, self.made, self._numbers = tag, 0, incarnation << 32
        self._first_number = self._numbers
        self._mine: dict[RoundId, Contribution | None] = {}
        self._ticking_at = float("inf")

    def _make_core(self, tag: str) -> Peer:
        return Peer(self.settings, self.name, tag.encode(), reduces=self.habits.reduces)

    @property
    def head(self) -> Head:
        """Of the parameters: what the protocol knows to be committed may be about to be applied."""
        assert self.parameters is not None
        return self.parameters.head

    @property
    def decided(self) -> list[Commit]:
        """The commits that this peer knows of: those that it applied, and those whose averages are not all here."""
        return [*self.applied, *(commit for commit, _ in self._averages)]

    @property
    def dropped(self) -> int:
        """Samples (names) that are known to be in no commit of the lineage that this peer is on."""
        if not self._forsaken and not self._unknown:
            return 0
        kept = [one for commit in self.decided for one in commit.contributions if one.peer == self.name]
        # by sample: what it gave in vain to one round, it may have given again to another one
        gone = self._unknown.union(*map(self.world.samples_of, self._forsaken))
        return len(gone.difference(*map(self.world.samples_of, kept)))

    # ------------------------------------------------------------------ training

    def start(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.core.adopt(parameters.head, (), self.world.now)
        self.carry_out()
        self._train()

    def _train(self) -> None:
        self.world.clock.after(self.habits.batch_s, self._batch)

    def _batch(self) -> None:
        if not self.alive:
            return
        if not self.frozen:
            self._make_samples()
            self._report_pool()
        self.world.clock.after(self.habits.batch_s, self._batch)

    def _make_samples(self) -> None:
        for _ in range(self.habits.batch_samples // self.habits.weight):
            self.made += 1
            self.pool.add(f"{self.tag}/{self.made}")

    def _report_pool(self) -> None:
        self.core.contributed(0 if self.slow else len(self.pool) * self.habits.weight, self.world.now)
        self.carry_out()

    def slows_down(self, slow: bool) -> None:
        """Its line: it says that it gives nothing, and nobody waits for it. (If it is asked, it gives all the same.)"""
        self.slow = slow
        if self.alive and not self.frozen:
            self.core.sends_slowly(slow)
            self._report_pool()

    # ------------------------------------------------------------------ what comes in

    def receive(self, sender: str, message: Message) -> None:
        self.core.receive(sender, message, self.world.now)
        self.carry_out()

    def take_input(self, sender: str, round_id: RoundId, chunk: int, contribution: Contribution) -> None:
        self._data_of(round_id).inputs[chunk, sender] = contribution
        self.core.input_arrived(round_id, chunk, sender, self.world.now)
        self.carry_out()

    def take_result(self, owner: str, round_id: RoundId, chunk: int, version: int, value: bytes) -> None:
        if round_id not in self._mine and round_id not in self.data:
            self._before_joining.append((owner, round_id, chunk, version, value))
            return
        self._data_of(round_id).take(chunk, version, owner, value)
        self.core.result_arrived(round_id, chunk, version, value, owner, self.world.now)
        self.carry_out()

    def lost(self, peer: str) -> None:
        self.core.lost(peer, self.world.now)
        self.carry_out()

    def tick(self) -> None:
        self._ticking_at = float("inf")
        if self.alive and not self.frozen:
            self.core.tick(self.world.now)
            self.carry_out()

    # ------------------------------------------------------------------ what goes out

    def carry_out(self) -> None:
        """Do what the protocol wants, until it wants nothing more."""
        while actions := self.core.take():
            for action in actions:
                self._do(action)
        due = max(self.core.deadline, self.world.now + self.least_tick_s)
        if due < self._ticking_at:
            self._ticking_at = due
            self._tick_at(due)

    def _tick_at(self, due: float) -> None:
        self.world.clock.at(due, self.tick)

    def _do(self, action: Action) -> None:
        match action:
            case Send(to=to, message=message):
                self._send(to, message)
            case Called(round=round_id):
                self._join(round_id)
            case Begun(plan=plan):
                self._data_of(plan.round).begin(plan)
            case SendInput(round=round_id, chunk=chunk, to=to):
                mine = self._mine[round_id]
                assert mine is not None, "asked to give in a round to which nothing was offered"
                self.world.send(
                    self,
                    to,
                    self.world.data_bytes(chunk),
                    lambda other: other.take_input(self.name, round_id, chunk, mine),
                    data_of=round_id,
                )
            case Reduce():
                self._reduce(action)
            case SendResult(round=round_id, chunk=chunk, version=version, to=to):
                value = self._data_of(round_id).reduced[chunk]
                for peer in to:
                    self.world.send(
                        self,
                        peer,
                        self.world.data_bytes(chunk),
                        lambda other: other.take_result(self.name, round_id, chunk, version, value),
                        data_of=round_id,
                    )
            case Apply():
                self._apply(action)
            case Arrived():
                self._arrived(action)
            case TellGone(to=to, ended=ended):
                self._send(to, ended)
            case GiveUp(round=round_id):
                self._mine.pop(round_id, None)
                self.data.pop(round_id, None)
            case CatchUp():
                self.world.clock.after(self.world.state_time_s(self), lambda: self._catch_up(action))
            case Note():
                self.notes.append(action)

    def _send(self, to: str, message: Message) -> None:
        size_bytes = self.world.message_bytes(message)
        self.world.send(self, to, size_bytes, lambda other: other.receive(self.name, message))

    def _join(self, round_id: RoundId) -> None:
        contribution = None
        if self.pool:
            self._numbers += 1
            contribution = Contribution(
                peer=self.name, number=self._numbers, samples=len(self.pool) * self.habits.weight
            )
            self.offered[self._numbers] = samples = frozenset(self.pool)
            self.world.register(contribution, samples)
        self._mine[round_id] = contribution
        offer = Offer(contribution=contribution, reduces=self.habits.reduces, bandwidth=self.habits.bandwidth)
        self.core.join(round_id, offer, self.world.now)
        for result in [one for one in self._before_joining if one[1] == round_id]:
            self.take_result(*result)

    def _reduce(self, action: Reduce) -> None:
        data = self._data_of(action.round)
        stored = tuple(data.inputs[action.chunk, one.peer] for one in action.contributions)
        assert stored == action.contributions, "an input is not the one that the plan names"
        # who reduces makes a difference, as it does between unlike machines
        parts = f"{action.chunk} {action.version} {self.tag} {stored}"
        data.reduced[action.chunk] = hashlib.sha256(parts.encode()).digest()[:16]
        self.core.reduced(action.round, action.chunk, action.version, self.world.now)

    def _apply(self, action: Apply) -> None:
        if action.complete:
            self._compare(action.commit)
        if not action.coming:
            self.data.pop(action.commit.round, None)
        self._averages.append((action.commit, None if action.coming else action.complete))
        self._step()
        self._forget(action.commit)
        self._report_pool()

    def _compare(self, commit: Commit) -> None:
        state, data = hashlib.sha256(), self._data_of(commit.round)
        for chunk in range(self.settings.chunks):
            state.update(data.results[chunk])
        assert state.digest()[:16] == commit.digest, "not the bytes that were committed"

    def _arrived(self, action: Arrived) -> None:
        place = next((n for n, (commit, _) in enumerate(self._averages) if commit.round == action.round), None)
        if place is not None:
            commit, here = self._averages[place]
            assert here is None, "what is not coming has arrived"
            if action.complete:
                self._compare(commit)
            self._averages[place] = commit, action.complete
            self._step()
        self.data.pop(action.round, None)

    def _step(self) -> None:
        """Apply what is here, in order; wait for the first average that is coming, or fetch it."""
        while self._averages:
            commit, here = self._averages[0]
            if here is None:
                return
            if not here:
                self.world.clock.after(self.world.state_time_s(self), partial(self._fetch, commit))
                return
            self._averages.popleft()
            assert self.parameters is not None
            assert self.parameters.head == commit.parent, "a step that does not follow the one before"
            digest = hashlib.sha256(self.parameters.digest + commit.digest).digest()[:16]
            self.parameters = Parameters(head=commit.head, digest=digest)
            self.applied.append(commit)
            self.world.check(self, commit)

    def _forget(self, commit: Commit) -> None:
        """What is in the commit does not count again."""
        for one in commit.contributions:
            if one.peer == self.name and one.number in self.offered:
                self.pool -= self.offered.pop(one.number)

    def _fetch(self, commit: Commit) -> None:
        if not self.alive or not self._averages or self._averages[0] != (commit, False):
            return
        donors = [one for one in self.world.others(self) if self.world.connected(self, one) and commit in one.applied]
        if donors:  # a state brings all that it has at once
            known = {one for donor in donors for one in donor.applied}
            for place, (one, here) in enumerate(self._averages):
                self._averages[place] = one, True if here is False and one in known else here
            self._step()
            self.carry_out()
        else:
            self._copy_state()

    def _catch_up(self, action: CatchUp) -> None:
        if self.alive:
            self._copy_state()

    def _copy_state(self) -> None:
        """Take over the heaviest state in reach. If there is none but this peer's own, go on with that."""
        assert self.parameters is not None
        best: SimulatedPeer = self
        for other in self.world.others(self):
            if self.world.connected(self, other) and other.parameters is not None:
                assert best.parameters is not None
                if other.parameters.head.outweighs(best.parameters.head):
                    best = other
        assert best.parameters is not None
        decided = set(self.decided)
        self._averages.clear()
        if best is not self:
            known = best.applied
            self.parameters = Parameters(head=best.parameters.head, digest=best.parameters.digest)
            parents = [*(commit.parent for commit in known), self.parameters.head]
            start = parents.index(self.core.head) if self.core.head in parents else None
            if start is None:
                self._unknown |= self.pool  # what became of them cannot be known
                self.pool.clear()
                self.offered.clear()
            self.applied = list(known)
            for commit in known[start:] if start is not None else ():
                self._forget(commit)
        forsaken = decided - set(self.applied)  # also a commit whose bytes nobody has
        mine = [one for commit in forsaken for one in commit.contributions if one.peer == self.name]
        self._forsaken.update(one for one in mine if one.number > self._first_number)
        self.core.adopt(self.parameters.head, tuple(self.applied[-8:]), self.world.now)
        self._report_pool()

    def _data_of(self, round_id: RoundId) -> RoundData:
        return self.data.setdefault(round_id, RoundData())
