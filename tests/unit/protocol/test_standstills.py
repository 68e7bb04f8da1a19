"""Who stands still again and again, too briefly for others to notice: a busy interpreter, a machine that swaps."""

from __future__ import annotations

import pytest

from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.simulation.network import Network
from lightning_hivemind.simulation.trainer import Habits
from lightning_hivemind.simulation.world import World

EVERY_S, STANDS_S = 2.5, 1.2


class Line(Network):
    """Chunks take a second."""

    def deliveries(self, sender: str, receiver: str, size_bytes: int, now: float) -> list[float]:
        return [now + (1.0 if size_bytes > 1000 else 0.01)]

    def detection_s(self, observer: str, peer: str) -> float:
        return 1.0


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_who_stands_still_in_each_round_that_it_leads_lets_others_lead(names: str) -> None:
    """It gave each of them up, and called the next one, before it occurred to the others to do so."""
    world = World(Settings(run="run", target_samples=48, chunks=3, stall_s=20.0), Line())
    for name in names:
        world.add(name, Habits())
    world.clock.run(5.0)
    other, steps, last, longest_s = world.peers["b"], 0, 5.0, 0.0
    while world.now < 200.0:
        until = world.now + EVERY_S
        world.peers["a"].frozen = True
        world.clock.run(world.now + STANDS_S)
        world.thaw("a")
        world.clock.run(until)
        if other.head.epoch > steps:
            steps, last = other.head.epoch, world.now
        longest_s = max(longest_s, world.now - last)
    assert longest_s < 6 * world.settings.matchmaking_s
    world.check_ledger(other)
