"""The shape of a run that is to be forecast, checked; and the world that it makes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from lightning_hivemind.engine.native.layout import Layout, layout_of
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.wire.speed import FAST
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.simulation.links import PAYLOAD, SharedLinks, Wire
from lightning_hivemind.simulation.paced_world import PacedWorld
from lightning_hivemind.simulation.profiles import PROFILES, Line
from lightning_hivemind.simulation.trainer import Habits

#: bytes of a chunk of so many values; kept equal to the engine's codecs by a test
CODECS: dict[str, Callable[[int], int]] = {
    "none": lambda values: 4 * values,
    "fp16": lambda values: 4 + 2 * values,
    "int8": lambda values: 4 * -(-values // 1024) + values,
    "int4": lambda values: 4 * -(-values // 64) + -(-values // 2),
}
#: float32 parameters and the two moments of Adam
STATE_BYTES_PER_VALUE = 12
MOST_PEERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a forecast is made of.

    Attributes:
        profile: a name in :data:`.profiles.PROFILES`.
        parameters: values that are averaged.
        codec: a name in :data:`CODECS`.
        batch_s: seconds of one batch at a peer of middle speed; batch_samples: samples in it.
        target_batch_size: samples of a global step; None: one batch of every peer.
        steps: to be measured, after one that is not.
        churn_per_min: peers that are killed, and started again, per minute in the whole swarm.
        restart_s: until a killed peer's process is there again; then it downloads the state. An assumption.
        up_mbit_s: instead of the profile's uplinks, if given.
        matchmaking_time, averaging_timeout, next_chunk_timeout: the strategy's arguments, in seconds.
    """

    peers: int
    profile: str = "home-broadband"
    parameters: int = 10_000_000
    codec: str = "fp16"
    batch_s: float = 1.0
    batch_samples: int = 32
    target_batch_size: int | None = None
    steps: int = 20
    churn_per_min: float = 0.0
    restart_s: float = 30.0
    up_mbit_s: float | None = None
    matchmaking_time: float = 5.0
    averaging_timeout: float = 30.0
    next_chunk_timeout: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("peers", 2 <= self.peers <= MOST_PEERS, f"give a number from 2 to {MOST_PEERS}")
        for name, most in (("parameters", 10**12), ("batch_samples", 10**9), ("steps", 10**6)):
            self._check(name, 1 <= getattr(self, name) <= most, f"give a number from 1 to {most}")
        self._check("profile", self.profile in PROFILES, f"give one of {', '.join(PROFILES)}")
        self._check("codec", self.codec in CODECS, f"give one of {', '.join(CODECS)}")
        for name in ("batch_s", "matchmaking_time", "averaging_timeout", "next_chunk_timeout", "up_mbit_s"):
            value = getattr(self, name)
            self._check(name, value is None or 0 < value < math.inf, "give a number above 0")
        for name in ("churn_per_min", "restart_s"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "give a number that is not negative")
        self._check("target_batch_size", self.target >= 1, "give a number of samples above 0")
        if self.averaging_timeout <= self.matchmaking_time:
            self._check("averaging_timeout", False, f"give more than matchmaking_time={self.matchmaking_time:g}")

    def _check(self, name: str, right: bool, fix: str) -> None:
        if not right:
            raise ArgumentError(f"{name}={getattr(self, name)!r}: {fix}. Nothing was simulated.")

    @property
    def target(self) -> int:
        """Samples of a global step."""
        return self.peers * self.batch_samples if self.target_batch_size is None else self.target_batch_size

    @property
    def layout(self) -> Layout:
        """The chunks of the engine."""
        return layout_of(self.parameters)

    @property
    def encoded_bytes(self) -> int:
        """Of the whole vector, without headers."""
        layout = self.layout
        return sum(CODECS[self.codec](layout.size(chunk)) for chunk in range(layout.chunks))

    @property
    def slowest_send_s(self) -> float:
        """Seconds in which the profile's slowest uplink carries one peer's gradient once: a round takes no less."""
        return self.encoded_bytes / min(self._wire(line, dialled=True).up for line in PROFILES[self.profile].lines)

    def settings(self) -> Settings:
        """As the engine derives them from the strategy's arguments."""
        return Settings(
            run="forecast",
            target_samples=self.target,
            chunks=self.layout.chunks,
            matchmaking_s=self.matchmaking_time,
            stall_s=self.next_chunk_timeout or self.matchmaking_time,
            round_s=self.averaging_timeout,
        )

    def world(self) -> PacedWorld:
        """With all peers in it, about to begin their first batch."""
        chance, profile = random.Random(self.seed), PROFILES[self.profile]
        names = [f"12D3KooW{number:044d}" for number in range(self.peers)]  # as long as real ones
        lines = _share_out(self.peers, profile.lines)
        dialled = _dialled(lines)
        wires = {name: self._wire(line, reach) for name, line, reach in zip(names, lines, dialled, strict=True)}
        settings = self.settings()
        world = PacedWorld(
            settings,
            SharedLinks(seed=self.seed, wires=wires, detect_s=settings.detect_s),
            layout=self.layout,
            encoded_bytes=CODECS[self.codec],
            state_bytes=STATE_BYTES_PER_VALUE * self.parameters,
            seed=self.seed,
        )
        for name in names:
            batch_s = self.batch_s * profile.spread ** chance.uniform(-1.0, 1.0)
            habits = Habits(
                batch_samples=self.batch_samples,
                batch_s=batch_s,
                reduces=wires[name].dialled,
                bandwidth=min(wires[name].up, FAST),
                weight=self.batch_samples,
            )
            world.add(name, habits)
        return world

    def _wire(self, line: Line, dialled: bool) -> Wire:
        up, down = (PAYLOAD * 1e6 / 8 * rate for rate in (self.up_mbit_s or line.up_mbit_s, line.down_mbit_s))
        return Wire(up=up, down=down, latency_s=line.latency_ms / 1e3, loss=line.loss, dialled=dialled)


def _share_out(count: int, lines: tuple[Line, ...]) -> list[Line]:
    """``count`` lines in the profile's shares, in runs of one kind (ranks are hashed: order does not matter)."""
    dealt: list[Line] = []
    reached = 0.0
    for line in lines:
        reached += line.share * count
        dealt += [line] * (round(reached) - len(dealt))
    return dealt + [lines[-1]] * (count - len(dealt))


def _dialled(lines: list[Line]) -> list[bool]:
    """Who can be connected to: evenly spread, and at least one peer, or nobody would ever meet."""
    owed, found = 0.0, []
    for line in lines:
        owed += line.undialled
        found.append(owed < 1.0)
        owed -= 0.0 if found[-1] else 1.0
    return found if any(found) else [True, *found[1:]]
