"""Whole native engines in one process, over real sockets, where dictionaries are in the place of libp2p and the DHT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine import swarm_records as swarm_records_module
from lightning_hivemind.engine.native import parts as parts_module
from lightning_hivemind.engine.native import whereabouts as whereabouts_module
from lightning_hivemind.engine.native.engine import NativeEngine
from lightning_hivemind.engine.native.parts import Parts
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.engine.native.wire.sink import Introduction
from lightning_hivemind.events import Event, EventBus
from lightning_hivemind.training.optimizers import rebuilder
from swarm.training import training_of

#: of a peer that others join through; nobody dials it
FOUNDER = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class Introduced:
    """In the place of libp2p: peers of one process know one another."""

    everybody: ClassVar[dict[str, Introduced]] = {}

    def __init__(self, me: str, run: str, links: Links, *, fingerprint: bytes, port: int, **_: object) -> None:
        self.me, self.links, self._fingerprint, self._port = me, links, fingerprint, port
        self.everybody[me] = self

    def introduce(self, peer: str, dials: bool) -> Introduction:
        other = self.everybody[peer]
        endpoints, token = (("127.0.0.1", other._port),), other.links.expect(self.me)
        return Introduction(endpoints=endpoints, fingerprint=other._fingerprint, token=token)

    def know(self, peer: str, addresses: list[str]) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


class Board:
    """In the place of records in the DHT: what a peer publishes is there at once."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)

    def records(self, dht: object, run: str, peer: str, refresh_s: float = 0.0) -> Any:
        everybody = self._records[run]
        mine = everybody.setdefault(peer, {})
        return SimpleNamespace(
            publish=mine.update,
            read=lambda: {one: dict(record) for one, record in list(everybody.items())},
            refresh=lambda timeout_s: True,
            close=lambda timeout_s: everybody.pop(peer, None),
        )


class Trainer:
    """A peer with one parameter, whose batches have the gradients that a test says.

    Args:
        begins: take its place in the swarm at once.
    Attributes:
        waited: how often the engine has asked, since a batch was to begin or to end, whether to go on waiting.
        patience: so often it may; the next time :attr:`impatient` is called, once.
        aborted: whether its process is being stopped.
    """

    def __init__(self, name: str, *, buffers: Sequence[torch.Tensor] = (), begins: bool = True, **given: Any) -> None:
        self.arguments = Arguments(**{"target_batch_size": 16, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], **given})
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 1000))
        self.plain = torch.optim.SGD([self.weight], lr=1.0)
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        training = training_of(
            self.plain,
            buffers=list(buffers),
            rebuild_optimizer=rebuilder(self.plain) if self.arguments.recreates_optimizer else None,
            should_abort=self._looks,
        )
        joins = bool(self.arguments.initial_peers)
        network: Any = SimpleNamespace(
            peer_id=name, dht=name, joins=joins, is_alive=lambda: True, visible_addresses=list
        )
        self.waited, self.patience, self.aborted = 0, 3, False
        self.impatient: Callable[[], None] = lambda: None
        self.engine = NativeEngine(self.arguments, network, training, bus)
        self.engine.start()
        if begins:
            self.engine.synchronise()

    def _looks(self) -> bool:
        self.waited += 1
        if self.waited > self.patience:
            impatient, self.impatient = self.impatient, lambda: None
            impatient()
        return self.aborted

    @property
    def parts(self) -> Parts:
        assert self.engine._parts is not None
        return self.engine._parts

    def begin(self) -> bool:
        """Begin a batch; returns whether a step was made first."""
        self.waited = 0
        return self.engine.begin_batch().committed

    def end(self, gradient: torch.Tensor | float = 1.0, samples: int = 8) -> bool:
        """End it, with this mean gradient; returns whether a step was made."""
        self.waited = 0
        self.weight.grad = torch.zeros_like(self.weight) + gradient
        return self.engine.step(samples).committed


def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on engines meet here."""
    board = Board()
    monkeypatch.setattr(Introduced, "everybody", {})
    monkeypatch.setattr(parts_module, "Introductions", Introduced)
    monkeypatch.setattr(whereabouts_module, "PeerRecords", board.records)
    monkeypatch.setattr(swarm_records_module, "PeerRecords", board.records)
