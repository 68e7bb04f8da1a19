"""A fault at every message of a step: its sender or its receiver dies or freezes right then, or it is lost or late.

Exhaustive where the random schedules (test_hostile.py) hit by chance: whatever role a peer has, coordinator, owner of
chunks or member, it is struck in every phase, and what that costs the others is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest

from lightning_hivemind.engine.native.protocol.messages import Message, RoundId
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.simulation.trainer import Habits, SimulatedPeer
from lightning_hivemind.simulation.world import World
from unit.protocol.test_hostile import assert_one_lineage
from unit.seeds import MANY

NAMES = ("p0", "p1", "p2")
BATCH_S = 0.1
#: faults strike in the step that begins after so many steps
WARM = 3
#: a connection that a dead process has left is noticed at once, as on loopback
NOTICED_S = 0.01
FROZEN_S, CUT_S = 6.0, 3.0
#: deaths come at every message, the other faults at every third one, with ``make hostile`` at every one, too
OTHERS = 1 if MANY else 3


class Line:
    """Everything arrives after a millisecond."""

    def deliveries(self, sender: str, receiver: str, size_bytes: int, now: float) -> list[float]:
        return [now + 0.001]

    def detection_s(self, observer: str, peer: str) -> float:
        return NOTICED_S


class Struck(World):
    """A world in which something happens at the message of a number: ``fault(world, sender, receiver)``.

    It returns the times at which that message arrives. Attributes: ``kinds`` of all messages so far; ``steps``: when
    each peer made a step.
    """

    def __init__(self, at: int | None = None, fault: Fault | None = None) -> None:
        settings = Settings(run="struck", target_samples=24, chunks=len(NAMES))
        super().__init__(settings, Line())
        self.at, self.fault, self.kinds, self.hit = at, fault, list[str](), ""
        self.ill = ""  # a peer that is struck; steps of it take as long as they take
        self.steps: dict[str, list[float]] = {name: [] for name in NAMES}
        for name in NAMES:
            self.add(name, Habits(batch_s=BATCH_S))
        self.clock.run(0.5)

    def message_bytes(self, message: Message) -> int:
        self._saying = type(message).__name__
        return super().message_bytes(message)

    def _transmit(
        self,
        sender: SimulatedPeer,
        target: SimulatedPeer,
        size_bytes: int,
        arrive: Callable[[SimulatedPeer], None],
        data_of: RoundId | None,
    ) -> None:
        number = len(self.kinds)
        self.kinds.append("data" if data_of is not None else self._saying)
        if number != self.at or self.fault is None:
            super()._transmit(sender, target, size_bytes, arrive, data_of)
            return
        self.hit = self.kinds[-1]
        for time in self.fault(self, sender.name, target.name):
            self._deliver(sender, target, time, arrive)

    def check(self, peer: SimulatedPeer, commit: object) -> None:
        super().check(peer, commit)  # type: ignore[arg-type]
        self.steps[peer.name].append(self.now)

    def longest_s(self, name: str) -> float:
        """Between two steps of a peer, or since its last one."""
        return max(after - before for before, after in pairwise([*self.steps[name], self.now]))


Fault = Callable[[Struck, str, str], list[float]]


def sender_dies(world: Struck, sender: str, receiver: str) -> list[float]:
    """With its message on the way."""
    world.crash(sender)
    world.ill = sender
    return [world.now + 0.001]


def receiver_dies(world: Struck, sender: str, receiver: str) -> list[float]:
    world.crash(receiver)
    world.ill = receiver
    return []


def sender_freezes(world: Struck, sender: str, receiver: str) -> list[float]:
    world.freeze(sender)
    world.ill = sender
    world.clock.after(FROZEN_S, lambda: world.thaw(sender))
    return [world.now + 0.001]


def receiver_freezes(world: Struck, sender: str, receiver: str) -> list[float]:
    world.freeze(receiver)
    world.ill = receiver
    world.clock.after(FROZEN_S, lambda: world.thaw(receiver))
    return [world.now + 0.001]


def sender_restarts(world: Struck, sender: str, receiver: str) -> list[float]:
    """So quickly that its connections do not tell."""
    habits = world.peers[sender].habits
    world.crash(sender)
    world.add(sender, habits)
    world.ill = sender
    return [world.now + 0.001]


def receiver_restarts(world: Struck, sender: str, receiver: str) -> list[float]:
    return sender_restarts(world, receiver, sender)[:0]


def sender_is_cut_off(world: Struck, sender: str, receiver: str) -> list[float]:
    """From both others, for a while in which it goes on alone."""
    for other in NAMES:
        if other != sender:
            world.cut(sender, other)
    world.clock.after(CUT_S, world.heal)
    world.ill = sender
    return []


def is_lost(world: Struck, sender: str, receiver: str) -> list[float]:
    return []


def is_late(world: Struck, sender: str, receiver: str) -> list[float]:
    return [world.now + 1.0]


def comes_twice(world: Struck, sender: str, receiver: str) -> list[float]:
    return [world.now + 0.001, world.now + 0.3]


#: how much longer than usual the longest step of those who are well may be (2 s for a death; what is silent is noticed
#: after ``detect_s``; what is lost is sent again), and for how long they are watched
FAULTS: dict[Fault, tuple[float, float]] = {
    sender_dies: (2.0, 5.0),
    receiver_dies: (2.0, 5.0),
    sender_freezes: (4.0, FROZEN_S + 4.0),
    receiver_freezes: (4.0, FROZEN_S + 4.0),
    sender_restarts: (2.0, 5.0),
    receiver_restarts: (2.0, 5.0),
    sender_is_cut_off: (2.0, CUT_S + 5.0),
    is_lost: (2.0, 5.0),
    is_late: (2.0, 5.0),
    comes_twice: (0.5, 3.0),
}


@cache
def calm() -> tuple[range, list[str], float]:
    """The messages of one step without a fault, their kinds, and the longest step."""
    world = Struck()
    first = last = 0
    while len(world.steps["p0"]) <= WARM + 1:
        world.clock.run(world.now + 0.001)
        done = min(map(len, world.steps.values()))
        first = first or (len(world.kinds) if done == WARM else 0)
        last = len(world.kinds)
    return range(first, last), world.kinds, max(map(world.longest_s, NAMES))


def test_a_step_has_messages_of_every_phase() -> None:
    numbers, kinds, _ = calm()
    found = {kinds[number] for number in numbers}
    assert {"Progress", "Call", "Join", "Begin", "data", "Done", "Committed"} <= found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_at_any_message_costs_little_and_breaks_nothing(fault: Fault) -> None:
    numbers, _, usual_s = calm()
    more_s, watched_s = FAULTS[fault]
    for number in numbers if fault in (sender_dies, receiver_dies) else numbers[::OTHERS]:
        world = Struck(number, fault)
        world.clock.run(world.now + watched_s)
        where = f"{fault.__name__} at message {number}, a {world.hit}"
        assert world.hit, f"message {number} was never sent"
        assert world.forks == 0 or fault is sender_is_cut_off, where  # which is two swarms, for that time
        assert_one_lineage(world)
        for peer in (one for one in world.living() if one.name != world.ill):
            assert world.longest_s(peer.name) <= usual_s + more_s, where
            assert peer.dropped == 0, where
