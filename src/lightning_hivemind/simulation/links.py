"""A network with lines of limited width: what a peer sends and receives at once shares its uplink and its downlink.

The model, in order of what it leaves out:

* *First in, first out.* A chunk leaves when all that the peer sent before it has left, and is read when all that
  came to the receiver before it has been read. Real connections share a line instead, so single chunks arrive later
  than here and the last one at the same time. Sending and reading overlap: who is slower decides.
* *Messages pass data.* They wait only for other messages, and take their share of the line from the data behind them.
* *Loss slows a connection down*: to at most 1.22 x 1460 bytes / (round trip x sqrt(loss)), Mathis et al. 1997,
  doi:10.1145/263932.264023. Measured with cubic at 100 Mbit/s, 50 ms, 0.1%: 7 Mbit/s; the formula gives 9. A pair has
  several where its line is long and bad (``wire.lanes``). Where the kernel offers BBR the engine asks for it, and does
  better. A message that loses a packet comes a round trip and 0.2 s later. Nothing is lost altogether: that is what
  TCP is for.
* *Two peers that cannot be dialled do not reach one another.*

Headers of TLS, connections' start-up, queues in routers and the rest of the household are left out.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from lightning_hivemind.engine.native.wire.lanes import LOSSY, useful

PeerId = str
SEGMENT_BYTES = 1460
#: of what a line is said to carry: a packet over Ethernet has 66 bytes for that, IP and TCP (with its timestamps)
PAYLOAD = 1448 / 1514
MATHIS = 1.22
RETRANSMIT_S = 0.2


@dataclass(kw_only=True, slots=True)
class Wire:
    """One peer's line, and until when it is taken. Rates in bytes of data per second, times in seconds.

    ``*_messages`` are for the messages, which pass the data.
    """

    up: float
    down: float
    latency_s: float = 0.0
    loss: float = 0.0
    dialled: bool = True
    up_free: float = 0.0
    down_free: float = 0.0
    up_messages: float = 0.0
    down_messages: float = 0.0


@dataclass(kw_only=True)
class SharedLinks:
    """See the module. ``detect_s``: the longest time until a dead peer is noticed."""

    seed: int
    wires: dict[PeerId, Wire]
    detect_s: float = 2.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        #: until when the connection of a pair is taken
        self._pairs: dict[tuple[PeerId, PeerId], float] = {}

    def reach(self, one: PeerId, other: PeerId) -> bool:
        """Whether there can be a connection between these."""
        return self.wires[one].dialled or self.wires[other].dialled

    def deliveries(
        self, sender: PeerId, receiver: PeerId, size_bytes: int, now: float, *, data: bool = False
    ) -> list[float]:
        if not self.reach(sender, receiver):
            return []
        source, target = self.wires[sender], self.wires[receiver]
        latency_s = source.latency_s + target.latency_s
        if data:
            return [self._send_data(source, target, (sender, receiver), size_bytes, now) + latency_s]
        up_s, down_s = size_bytes / source.up, size_bytes / target.down
        begins = max(now, source.up_messages)
        source.up_messages = begins + up_s
        source.up_free = max(now, source.up_free) + up_s
        read = max(begins, target.down_messages) + down_s
        target.down_messages = read
        target.down_free = max(now, target.down_free) + down_s
        loss = source.loss + target.loss
        late_s = 2 * latency_s + RETRANSMIT_S if loss and self._random.random() < self._damaged(loss, size_bytes) else 0
        return [max(source.up_messages, read) + latency_s + late_s]

    def detection_s(self, observer: PeerId, peer: PeerId) -> float:
        return self._random.uniform(0.0, self.detect_s)

    def forget(self, peer: PeerId) -> None:
        """Its process has ended: nothing waits at its line any more."""
        wire = self.wires[peer]
        wire.up_free = wire.down_free = wire.up_messages = wire.down_messages = 0.0

    def _send_data(self, source: Wire, target: Wire, pair: tuple[PeerId, PeerId], size_bytes: int, now: float) -> float:
        begins = max(now, source.up_free)
        source.up_free = begins + size_bytes / source.up
        target.down_free = max(begins, target.down_free) + size_bytes / target.down
        read = max(source.up_free, target.down_free)
        rate = _pair_rate(source, target, len(self.wires) - 1)
        if rate < math.inf:
            self._pairs[pair] = carried = max(begins, self._pairs.get(pair, 0.0)) + size_bytes / rate
            read = max(read, carried)
        return read

    def _damaged(self, loss: float, size_bytes: int) -> float:
        packets = -(-size_bytes // SEGMENT_BYTES)
        return float(1.0 - (1.0 - loss) ** packets)


def _pair_rate(source: Wire, target: Wire, others: int) -> float:
    """Bytes per second of the connections between these; infinite where nothing is lost."""
    round_trip_s, loss = 2 * (source.latency_s + target.latency_s), source.loss + target.loss
    if not (loss and round_trip_s):
        return math.inf
    connections = useful(round_trip_s, others) if loss > LOSSY else 1
    return connections * MATHIS * SEGMENT_BYTES / (round_trip_s * math.sqrt(loss))
