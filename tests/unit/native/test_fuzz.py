"""What comes over a connection is broken on purpose: frames of real rounds changed, lost, twice, or out of order.

``SEEDS=0:10000`` tries as many as one likes. A seed breaks what it finds: what was recorded is of two threads that
talk, so frames may be in another order the next time, and the stream of a run that failed is kept.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from lightning_hivemind.engine.native.codecs import Exact
from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.wire.connection import pieces
from lightning_hivemind.engine.native.wire.encoding import MAX_MESSAGE_BYTES
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, PIECE_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.reader import Reader
from lightning_hivemind.engine.native.wire.sink import Payload
from lightning_hivemind.errors import WireError
from swarm.town import Town, wait_for
from unit.native.test_driver import TARGET, Trainee
from unit.seeds import seeds

#: some chunks take more than a piece
LAYOUT = Layout(3 * PIECE_BYTES // 4 + 1000, chunk_elements=PIECE_BYTES // 2)
SETTINGS = Settings(run="run", target_samples=TARGET, chunks=LAYOUT.chunks)
ROOT = Head.root("run", "founder")
Frame = tuple[Header, bytes]


class Watched:
    """A driver's sink that keeps what comes, and sees how much memory is asked for."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.frames = driver, list[Frame]()

    def room(self, peer: str, header: Header) -> memoryview | None:
        room = self._driver.room(peer, header)
        assert room is None or len(room) <= max(MAX_MESSAGE_BYTES, 4 * LAYOUT.elements)
        return room

    def moved(self, peer: str, header: Header) -> None:
        self._driver.moved(peer, header)

    def arrived(self, peer: str, header: Header, payload: memoryview | None) -> None:
        if payload is not None:
            self.frames.append((header, bytes(payload)))
        self._driver.arrived(peer, header, payload)

    def lost(self, peer: str, reason: str) -> None:
        self._driver.lost(peer, reason)


class Nowhere:
    """Connections over which nothing goes."""

    upload_rate = 1.0
    slow_to = ()

    def __init__(self, *, in_the_clear: bool) -> None:
        self.in_the_clear = in_the_clear

    def send(self, to: str, header: Header, payload: Payload = ()) -> None:
        pass

    def forget(self, round_id: bytes, kind: Kind | None = None) -> None:
        pass

    def sends(self, round_id: bytes, kind: Kind | None = None, to: str | None = None) -> bool:
        return False

    def look(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass


class Victim(Trainee):
    """Says apart what went wrong in its own part."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.failures: list[str] = []

    def failed(self, reason: str) -> None:
        self.failures.append(reason)


def driver_of(trainee: Trainee) -> Driver:
    return Driver(Peer(SETTINGS, trainee.name, b"life"), trainee, LAYOUT, [Exact()] * LAYOUT.chunks)


def contribute(trainee: Trainee, driver: Driver, samples: int) -> None:
    trainee.values, trainee.samples = torch.randn(LAYOUT.elements), samples
    driver.contributed()


def has_made(trainee: Trainee, steps: int) -> bool:
    return len(trainee.commits) >= steps


@cache
def recorded() -> list[Frame]:
    """What one of two peers gets in three rounds."""
    town, trainees = Town(secure=False), [Trainee("a"), Trainee("b")]
    drivers = [driver_of(trainee) for trainee in trainees]
    watched = Watched(drivers[0])
    drivers[0].start(town.add("a", watched))
    drivers[1].start(town.add("b", drivers[1]))
    for driver, other in zip(drivers, "ba", strict=True):
        driver.saw(other, Place(head=ROOT, samples=0, stamp=0.0))
        driver.adopt(ROOT)
    for number in range(1, 4):
        for trainee, driver in zip(trainees, drivers, strict=True):
            contribute(trainee, driver, TARGET // 2)
        for trainee in trainees:
            wait_for(partial(has_made, trainee, number), f"step {number}")
    for driver in drivers:
        driver.stop(5.0)
    assert {Kind.MESSAGE, Kind.INPUT, Kind.RESULT} <= {header.kind for header, _ in watched.frames}
    return watched.frames


def broken(chance: random.Random, frames: Sequence[Frame]) -> bytes:
    """As a stream: some frames changed, and then some bytes."""
    found = list(frames)
    for _ in range(chance.randint(0, 4)):
        at = chance.randrange(len(found))
        header, payload = found[at]
        match chance.randrange(5):
            case 0:
                del found[at : at + chance.randint(1, 3)]
            case 1:
                found[at:at] = found[at : at + chance.randint(1, 3)]
            case 2:
                chance.shuffle(found)
            case 3:
                field = chance.choice(["kind", "round", "chunk", "version", "checksum"])
                number = chance.choice([0, 1, 2, LAYOUT.chunks, 2**32 - 1])
                rounds = [one.round for one, _ in frames]
                values = {"kind": chance.choice(list(Kind)), "round": chance.choice(rounds)}
                found[at] = replace(header, **{field: values.get(field, number)}), payload
            case _:
                cut = chance.choice([payload[:-1], payload + b"x", payload[::-1], b"", chance.randbytes(len(payload))])
                found[at] = replace(header, length=len(cut)), cut
        found = found or list(frames)
    stream = bytearray()
    for header, payload in found:
        for piece, parts in pieces(header, [memoryview(payload)]):
            stream += piece.pack() + b"".join(parts)
    for _ in range(chance.choice([0, 0, 1, 3])):
        at, count = chance.randrange(len(stream)), chance.choice([1, 4, HEADER_BYTES, 1000])
        match chance.randrange(4):
            case 0:
                stream[at] ^= chance.randint(1, 255)
            case 1:
                del stream[at : at + count]
            case 2:
                stream[at:at] = chance.randbytes(count)
            case _:
                stream[at:at] = stream[at : at + count]
    return bytes(stream)


@pytest.mark.parametrize("seed", seeds(60))
def test_whatever_a_connection_brings_this_peer_trains_on(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    stream = broken(chance, recorded())
    victim = Victim("a")
    driver = driver_of(victim)
    in_the_clear = chance.random() < 0.5
    driver.start(Nowhere(in_the_clear=in_the_clear))  # type: ignore[arg-type]
    try:
        driver.saw("b", Place(head=ROOT, samples=0, stamp=0.0))
        driver.adopt(ROOT)
        contribute(victim, driver, TARGET // 2)
        feed(driver, stream, in_the_clear=in_the_clear)
        driver.lost("b", "the connection is closed")
        driver.contributed()  # it has seen to all that came before
        before = len(victim.commits)
        contribute(victim, driver, TARGET)
        wait_for(partial(has_made, victim, before + 1), f"a step after it (seed {seed})")
        assert victim.failures == []
    except BaseException:
        (tmp_path / "stream").write_bytes(stream)
        print("the stream is kept:", tmp_path / "stream")
        raise
    finally:
        driver.stop(5.0)


def feed(driver: Driver, stream: bytes, *, in_the_clear: bool) -> None:
    """As a connection of peer "b" does."""
    here, there = socket.socketpair()
    writer = threading.Thread(target=send, args=(here, stream))
    writer.start()
    reader = Reader(there, "b", Watched(driver), verifies=in_the_clear)
    with there, contextlib.suppress(WireError, OSError):  # then it is closed
        while True:
            reader.read()
    writer.join()


def send(sock: socket.socket, stream: bytes) -> None:
    with sock, contextlib.suppress(OSError):  # the other end reads no more
        sock.sendall(stream)
