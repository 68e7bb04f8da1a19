"""Networks that are modelled: what arrives, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

PeerId = str


class Network(Protocol):
    """Decides on everything that one peer sends another."""

    def deliveries(self, sender: PeerId, receiver: PeerId, size_bytes: int, now: float) -> list[float]:
        """When what is sent now arrives: usually one time; none if it is lost, more if it is repeated."""

    def detection_s(self, observer: PeerId, peer: PeerId) -> float:
        """After how long ``observer`` notices that ``peer`` is dead or cut off."""


@dataclass(kw_only=True)
class HostileNetwork:
    """Loses, repeats, delays and reorders whatever is sent. For tests: no real link is that bad.

    Attributes:
        drop, repeat: probabilities per message.
        delay_s: the longest delay; each message has its own, so that they overtake one another.
        detect_s: the longest time until a dead peer is noticed.
    """

    seed: int
    drop: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.05
    detect_s: float = 2.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def deliveries(self, sender: PeerId, receiver: PeerId, size_bytes: int, now: float) -> list[float]:
        if self._random.random() < self.drop:
            return []
        count = 2 if self._random.random() < self.repeat else 1
        return [now + self._random.uniform(0.0, self.delay_s) for _ in range(count)]

    def detection_s(self, observer: PeerId, peer: PeerId) -> float:
        return self._random.uniform(0.0, self.detect_s)
