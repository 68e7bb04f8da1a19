"""Random schedules of faults, from a seed: the same seed is the same run, message by message."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.simulation.network import HostileNetwork
from lightning_hivemind.simulation.trainer import Habits
from lightning_hivemind.simulation.world import World

#: of faults, in random schedules; besides, :meth:`Schedule.fault` knows "restart": so quickly that nobody notices
KINDS = ("crash", "freeze", "cut", "split", "slow")


@dataclass(kw_only=True)
class Schedule:
    """A world, and what will happen to it until ``trouble_s``; then everything is mended and calm for ``calm_s``.

    (And for three steps more, which take slow peers with a large target half a minute.)

    Attributes:
        kinds: of faults that may happen; ``lossy``: whether messages may be lost.
        names: of the peers; by default two to six.
        fired: the faults that did happen, as (time, kind, peers).
    """

    seed: int
    kinds: tuple[str, ...] = KINDS
    lossy: bool = True
    trouble_s: float = 10.0
    calm_s: float = 15.0
    names: list[str] = field(default_factory=list)
    fired: list[tuple[float, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = chance = random.Random(self.seed)
        network = HostileNetwork(
            seed=self.seed,
            drop=chance.choice([0.0, 0.0, 0.01, 0.05]) if self.lossy else 0.0,
            repeat=chance.choice([0.0, 0.05]),
            delay_s=chance.choice([0.001, 0.02, 0.1, 0.5]),
        )
        settings = Settings(
            run="hostile",
            target_samples=chance.choice([16, 64, 128]),
            chunks=chance.choice([1, 3, 8]),
            matchmaking_s=2.0,  # short, so that limits are reached
            stall_s=3.0,
            round_s=10.0,
        )
        self.network, self.world = network, World(settings, network)
        self.names = self.names or [f"p{number}" for number in range(chance.randint(2, 6))]
        for name in self.names:
            reduces = name == "p0" or chance.random() < 0.8
            self.world.add(name, Habits(batch_s=chance.choice([0.05, 0.1, 0.3, 1.0]), reduces=reduces))
        for _ in range(chance.randint(0, 8) if self.kinds else 0):
            self._plan_fault(chance.uniform(0.5, self.trouble_s))

    def run(self) -> World:
        """All of it; returns the world after the calm."""
        self.world.clock.run(self.trouble_s)
        self.mend()
        rate = sum(peer.habits.batch_samples / peer.habits.batch_s for peer in self.world.living())
        steps_s = 3 * self.world.settings.target_samples / rate
        self.world.clock.run(self.trouble_s + self.calm_s + steps_s)
        return self.world

    def mend(self) -> None:
        """No faults any more, and everybody is there."""
        self.network.drop = self.network.repeat = 0.0
        self.world.heal()
        for name in self.names:
            peer = self.world.peers[name]
            if not peer.alive:
                self.world.add(name, peer.habits)
            elif peer.frozen:
                self.world.thaw(name)
            self.world.peers[name].slows_down(False)

    def _plan_fault(self, time: float) -> None:
        kind, name, other = (self._random.choice(one) for one in (self.kinds, self.names, self.names))
        lasts_s = self._random.uniform(0.1, 6.0)
        self.world.clock.at(time, lambda: self.fault(kind, name, other, lasts_s))

    def fault(self, kind: str, name: str, other: str, lasts_s: float) -> None:
        """Let it happen now, if it can: one peer must be left that is well."""
        world, peer = self.world, self.world.peers[name]
        well = [one.name for one in world.living() if not one.frozen and one.name != name]
        if kind in ("cut", "split"):
            pairs = [(name, other)] if kind == "cut" else self._sides(name, other)
            if name != other:
                for pair in pairs:
                    world.cut(*pair)
                    world.clock.after(lasts_s, partial(world.join, *pair))
                self.fired.append((world.now, kind, f"{name} {other}"))
        elif well and peer.alive and not peer.frozen:
            self.fired.append((world.now, kind, name))
            if kind == "restart":
                self._restart(name)
            elif kind == "slow":
                peer.slows_down(True)
                world.clock.after(lasts_s, lambda: peer.slows_down(False))
            elif kind == "crash":
                world.crash(name)
                world.clock.after(lasts_s, lambda: None if world.peers[name].alive else self._restart(name))
            else:
                world.freeze(name)
                world.clock.after(lasts_s, lambda: world.thaw(name) if world.peers[name] is peer else None)

    def _sides(self, name: str, other: str) -> list[tuple[str, str]]:
        """All pairs across a partition: from ``name`` on in the order of the names, and from ``other`` on."""
        first, second = self.names.index(name), self.names.index(other)
        turned = self.names[first:] + self.names[:first]
        cut = (second - first) % len(turned)
        return [(one, another) for one in turned[:cut] for another in turned[cut:]]

    def _restart(self, name: str) -> None:
        self.world.add(name, self.world.peers[name].habits)
