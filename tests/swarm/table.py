"""Peers of the native protocol around a table: every message lies there until the test lets it be read.

For scenarios in which one certain message is late, lost, or arrives in the wrong moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.actions import (
    Action,
    Apply,
    Arrived,
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
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head, rank
from lightning_hivemind.engine.native.protocol.messages import Message, RoundId
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.protocol.settings import Settings


@dataclass(frozen=True, slots=True)
class Data:
    """An input (``digest`` is empty) or a result of a chunk."""

    round: RoundId
    chunk: int
    version: int = 0
    digest: bytes = b""


Letter = tuple[str, str, "Message | Data"]


class Table:
    """``hold`` keeps letters (sender, receiver, what) back, in ``held``. Nothing happens but by the test's will."""

    def __init__(self, names: list[str], settings: Settings) -> None:
        self.now, self.hold = 0.0, lambda *_: False
        self.hold: Callable[[str, str, Message | Data], bool]
        self.letters: list[Letter] = []
        self.held: list[Letter] = []
        self.applied: dict[str, list[Commit]] = {name: [] for name in names}
        self.done: list[tuple[str, Action]] = []
        self.gone: set[str] = set()
        self._number = 0
        self.peers = {name: Peer(settings, name, b"life") for name in names}
        root = Head.root(settings.run, names[0])
        for name, peer in self.peers.items():
            peer.adopt(root, (), self.now)
            for other in names:
                if other != name:
                    peer.saw(other, Place(head=root, samples=0, stamp=0.0), self.now)

    def train(self, **samples: int) -> None:
        for name, count in samples.items():
            self.peers[name].contributed(count, self.now)

    def flow(self) -> None:
        """Let everything be read that is not held back, in order, in this instant."""
        for _ in range(10_000):
            todo = [(name, action) for name, peer in self.peers.items() for action in peer.take()]
            for name, action in todo:
                if name not in self.gone:
                    self._do(name, action)
            if todo:
                continue
            if not self.letters:
                return
            letter = self.letters.pop(0)
            if self.hold(*letter):
                self.held.append(letter)
            else:
                self.read(*letter)
        raise AssertionError("the peers do not stop talking")

    def wait(self, duration_s: float, step_s: float = 0.05) -> None:
        end = self.now + duration_s
        while self.now < end:
            self.now += step_s
            for name, peer in self.peers.items():
                if name not in self.gone:
                    peer.tick(self.now)
            self.flow()

    def read(self, sender: str, receiver: str, what: Message | Data) -> None:
        """This letter is read now."""
        if receiver in self.gone:
            return
        peer = self.peers[receiver]
        if not isinstance(what, Data):
            peer.receive(sender, what, self.now)
        elif what.digest:
            peer.result_arrived(what.round, what.chunk, what.version, what.digest, sender, self.now)
        else:
            peer.input_arrived(what.round, what.chunk, sender, self.now)

    def release(self) -> None:
        """What was held back is read now."""
        held, self.held, self.hold = self.held, [], lambda *_: False
        for letter in held:
            self.read(*letter)
        self.flow()

    def kill(self, name: str) -> None:
        """Everybody notices at once; what it has sent may still be read."""
        self.gone.add(name)
        for other, peer in self.peers.items():
            if other not in self.gone:
                peer.lost(name, self.now)

    def notes(self) -> list[tuple[str | None, str]]:
        return [(action.peer, action.what) for _, action in self.done if isinstance(action, Note)]

    def _do(self, name: str, action: Action) -> None:
        peer = self.peers[name]
        match action:
            case Send(to=to, message=message):
                self.letters.append((name, to, message))
            case Called(round=round_id):
                self._number += 1
                mine = Contribution(peer=name, number=self._number, samples=peer.samples) if peer.samples else None
                peer.join(round_id, Offer(contribution=mine), self.now)
            case SendInput(round=round_id, chunk=chunk, to=to):
                self.letters.append((name, to, Data(round_id, chunk)))
            case Reduce(round=round_id, chunk=chunk, version=version):
                peer.reduced(round_id, chunk, version, self.now)
            case SendResult(round=round_id, chunk=chunk, version=version, to=to):
                digest = hashlib.sha256(f"{name} {chunk} {version}".encode()).digest()[:16]
                self.letters += [(name, one, Data(round_id, chunk, version, digest)) for one in to]
            case Apply(commit=commit):
                self.applied[name].append(commit)
                self.done.append((name, action))
            case TellGone(to=to, ended=ended):
                self.letters.append((name, to, ended))
            case Arrived() | GiveUp() | CatchUp() | Note():
                self.done.append((name, action))
            case _:
                pass


def by_rank(names: list[str], run: str, epoch: int = 0) -> list[str]:
    """The coordinator of an epoch first, then who follows it."""
    return sorted(names, key=lambda name: rank(run, epoch, name))
