"""What comes over a connection is broken on purpose: frames of real rounds changed, lost, twice, or out of order.

So are those of a state that is fetched, and of a gradient that is handed over.

``SEEDS=0:10000`` tries as many as one likes. A seed breaks what it finds: what was recorded is of two threads that
talk, so frames may be in another order the next time, and the stream of a run that failed is kept.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from lightning_hivemind.engine.native.seam import Outcome, Parcel
from lightning_hivemind.engine.native.state import ranges
from lightning_hivemind.engine.native.state.donor import Donor
from lightning_hivemind.engine.native.state.download import WINDOW, Downloads
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.state.snapshot import MAX_DESCRIPTION_BYTES, Description, read_description
from lightning_hivemind.engine.native.wire.connection import pieces
from lightning_hivemind.engine.native.wire.encoding import MAX_MESSAGE_BYTES
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, PIECE_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.reader import Reader
from lightning_hivemind.engine.native.wire.sink import Payload
from lightning_hivemind.errors import StateError, WireError
from swarm.post_office import RANGE_BYTES, optimizer, snapshot
from swarm.town import Town, wait_for
from unit.native.test_driver import TARGET, Trainee
from unit.seeds import seeds

#: some chunks take more than a piece
LAYOUT = Layout(3 * PIECE_BYTES // 4 + 1000, chunk_elements=PIECE_BYTES // 2)
SETTINGS = Settings(run="run", target_samples=TARGET, chunks=LAYOUT.chunks)
ROOT = Head.root("run", "founder")
#: of a state: so few that all of them are asked for before any is checked
RANGES = 8
STATE = RANGES * RANGE_BYTES // 4
#: kinds of frames that are about rounds, states, and gradients that are handed over
READ = {*Kind} - {Kind.HELLO, Kind.REVERSED, Kind.PING, Kind.MORE}
STATES, PARCELS = {Kind.REQUEST, Kind.STATE}, {Kind.OFFERED, Kind.PARCEL, Kind.RECEIPT}
Frame = tuple[Header, bytes]


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", RANGE_BYTES)


class Watched:
    """A driver's sink that keeps what comes, and sees how much memory is asked for."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.frames = driver, list[Frame]()

    def room(self, peer: str, header: Header) -> memoryview | None:
        room = self._driver.room(peer, header)
        most = MAX_DESCRIPTION_BYTES if header.kind is Kind.STATE else max(MAX_MESSAGE_BYTES, 4 * LAYOUT.elements)
        assert room is None or len(room) <= most
        return room

    def moved(self, peer: str, header: Header) -> None:
        self._driver.moved(peer, header)

    def arrived(self, peer: str, header: Header, payload: memoryview | None) -> None:
        if payload is not None:
            self.frames.append((header, bytes(payload)))
        self._driver.arrived(peer, header, payload)

    def lost(self, peer: str, reason: str, *, connects: bool = False) -> None:
        self._driver.lost(peer, reason)


class Nowhere:
    """Connections over which nothing goes. ``said``: what should have gone, by kind."""

    upload_rate = 1.0
    slow_to = ()

    def __init__(self) -> None:
        self.said: defaultdict[Kind, list[Header]] = defaultdict(list)

    def send(self, to: str, header: Header, payload: Payload = ()) -> None:
        self.said[header.kind].append(header)

    def forget(self, round_id: bytes, kind: Kind | None = None) -> None:
        pass

    def sends(self, round_id: bytes, kind: Kind | None = None, to: str | None = None) -> bool:
        return False

    def look(self, now: float) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


class Victim(Trainee):
    """Says apart what went wrong in its own part. ``parcel``: besides its samples, and goes to another peer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.failures: list[str] = []
        self.parcel: Parcel | None = None

    def failed(self, reason: str) -> None:
        self.failures.append(reason)

    def hand_over(self, takes_s: float) -> Parcel | None:
        parcel, self.parcel = self.parcel, None
        return parcel

    def handed_over(self, to: str, parcel: Parcel, outcome: Outcome, duration_s: float) -> None:
        self.outcomes.append((to, outcome))


class Side:
    """A peer with all that reads frames: it takes part in rounds, gives and fetches a state, carries and hands over."""

    def __init__(self, name: str) -> None:
        self.trainee = Victim(name)
        self.driver = Driver(Peer(SETTINGS, name, b"life"), self.trainee, LAYOUT, [Exact()] * LAYOUT.chunks)
        #: what came of :meth:`fetch`
        self.fetched: list[torch.Tensor | StateError | None] = []
        self._over, self._fetching = threading.Event(), list[threading.Thread]()

    def start(self, links: object, other: str) -> None:
        """At the root, as ``other`` is."""
        self._donor = Donor(links.send, lambda known: snapshot(1, elements=STATE), links.forget)  # type: ignore[attr-defined]
        self._downloads = Downloads(links.send, 10.0, StateMemory())  # type: ignore[attr-defined]
        self.driver.start(links, self._donor, self._downloads)  # type: ignore[arg-type]
        self.driver.saw(other, Place(head=ROOT, samples=0, stamp=0.0))
        self.driver.adopt(ROOT)
        self._other = other

    def contribute(self, samples: int) -> None:
        self.trainee.values, self.trainee.samples = torch.randn(LAYOUT.elements), samples
        self.driver.contributed()

    def hand_over(self) -> None:
        """As if the line were slow."""
        self.trainee.parcel = Parcel(torch.randn(LAYOUT.elements), 8, 0, 1)
        self.has_slow_line(True)

    def has_slow_line(self, slow: bool) -> None:
        assert self.driver._carrying is not None
        self.driver._carrying._line.slow = slow
        self.driver.contributed()

    def fetch(self) -> None:
        """The other one's state, in a thread of its own."""
        thread = threading.Thread(target=self._fetch)
        thread.start()
        self._fetching.append(thread)

    def _fetch(self) -> None:
        mine = optimizer(2, STATE)

        def read(data: memoryview) -> Description:
            return read_description(data, mine, [], [])

        def enough(head: Head) -> bool:
            return True

        try:
            found = self._downloads.fetch(lambda: [self._other], read, 60.0, self._over.is_set, enough=enough)
        except StateError as error:
            self.fetched.append(error)
        else:
            self.fetched.append(None if found is None else found[1])

    def end_fetching(self) -> None:
        self._over.set()
        for thread in self._fetching:
            thread.join()

    def stop(self) -> None:
        self.end_fetching()
        self._donor.stop()
        self.driver.stop(5.0)


def has_made(trainee: Trainee, steps: int) -> bool:
    return len(trainee.commits) >= steps


@cache
def recorded() -> list[Frame]:
    """What one of two peers gets: each fetches the other's state and hands a gradient over; then come three rounds."""
    town, sides = Town(secure=False), [Side("a"), Side("b")]
    watched = Watched(sides[0].driver)
    links = [town.add("a", watched), town.add("b", sides[1].driver)]
    for side, mine, other in zip(sides, links, "ba", strict=True):
        side.start(mine, other)
    for side in sides:
        side.contribute(1)  # who has something for rounds is not known to be slow, and may carry
    for side in sides:
        side.fetch()
        wait_for(lambda side=side: side.fetched, "the state")  # type: ignore[misc]
        side.hand_over()
        wait_for(lambda side=side: side.trainee.outcomes, "the gradient was handed over")  # type: ignore[misc]
        side.has_slow_line(False)
    for number in range(1, 4):
        for side in sides:
            side.contribute(TARGET // 2)
        for side in sides:
            wait_for(partial(has_made, side.trainee, number), f"step {number}")
    for side in sides:
        side.stop()
    assert {header.kind for header, _ in watched.frames} == READ
    return watched.frames


def answering(frames: Sequence[Frame], said: Mapping[Kind, Sequence[Header]]) -> list[Frame]:
    """As if they answered what another peer has asked, which has numbers of its own."""
    asked = {Kind.STATE: Kind.REQUEST, Kind.RECEIPT: Kind.OFFERED}
    return [
        (replace(header, round=said[asked[header.kind]][0].round) if header.kind in asked else header, payload)
        for header, payload in frames
    ]


def stream_of(frames: Sequence[Frame], *, in_the_clear: bool) -> bytearray:
    stream = bytearray()
    for header, payload in frames:
        for piece, parts in pieces(header, [memoryview(payload)], sums=in_the_clear):
            stream += piece.pack() + b"".join(parts)
    return stream


def broken(chance: random.Random, frames: Sequence[Frame], *, in_the_clear: bool) -> bytes:
    """As a stream: all of it or what is of one matter, some frames changed, and then some bytes."""
    matter = chance.choice([READ, READ - STATES - PARCELS, STATES, PARCELS])
    frames = [frame for frame in frames if frame[0].kind in matter]
    found = list(frames)
    for _ in range(chance.randint(0, 6)):
        sorts = [(header.kind, header.chunk > 0) for header, _ in found]
        sort = chance.choice(sorted({*sorts}))  # there are few frames of some, a description for one
        at = chance.choice([number for number, one in enumerate(sorts) if one == sort])
        header, payload = found[at]
        match chance.randrange(6):
            case 0:
                del found[at : at + chance.randint(1, 3)]
                found = found or list(frames)
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
            case 4:
                other = bytearray(payload)
                for _ in range(chance.randint(1, 3) if payload else 0):
                    other[chance.randrange(len(other))] = chance.randrange(256)
                found[at] = header, bytes(other)
            case _:
                cut = chance.choice([payload[:-1], payload + b"x", payload[::-1], b"", chance.randbytes(len(payload))])
                found[at] = replace(header, length=len(cut)), cut
    stream = stream_of(found, in_the_clear=in_the_clear)
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


@contextlib.contextmanager
def asking() -> Iterator[tuple[Side, Nowhere, list[Frame]]]:
    """A peer that has asked for a state and offered a gradient, and what "b" says then."""
    frames, side, links = recorded(), Side("a"), Nowhere()
    side.start(links, "b")
    try:
        side.contribute(TARGET // 2)
        side.fetch()
        side.hand_over()
        wait_for(lambda: links.said[Kind.REQUEST] and links.said[Kind.OFFERED], "it has asked")
        yield side, links, answering(frames, links.said)
    finally:
        side.stop()


def announce(side: Side, links: Nowhere, frames: Sequence[Frame], *, in_the_clear: bool) -> None:
    """What begins a download here, one from here, and a parcel: then this peer takes or has the bytes of all three."""
    first = {header.kind: (header, payload) for header, payload in reversed(frames)}
    begin = [first[kind] for kind in (Kind.STATE, Kind.REQUEST, Kind.OFFERED)]
    feed(side.driver, stream_of(begin, in_the_clear=in_the_clear), in_the_clear=in_the_clear)
    wait_for(lambda: len(links.said[Kind.REQUEST]) >= 1 + WINDOW, "it asks for ranges")
    wait_for(lambda: links.said[Kind.STATE], "it has described its own state")
    wait_for(lambda: links.said[Kind.RECEIPT], "it asks for chunks")


@pytest.mark.parametrize("in_the_clear", [False, True])
def test_what_is_broken_below_is_read_where_it_is_not(in_the_clear: bool) -> None:
    """Frames of every kind: else they would be dropped whatever is in them."""
    with asking() as (side, links, frames):
        announce(side, links, frames, in_the_clear=in_the_clear)
        feed(side.driver, stream_of(frames, in_the_clear=in_the_clear), in_the_clear=in_the_clear)
        wait_for(lambda: side.fetched, "it has the state")
        wait_for(lambda: side.trainee.outcomes, "it has handed its gradient over")
        wait_for(lambda: side.trainee.carried, "it carries another one")
        wait_for(lambda: len(ranges_of(links)) == RANGES, "it has given its state")
        (state,), (outcome,), (parcel,) = side.fetched, side.trainee.outcomes, side.trainee.carried
    assert isinstance(state, torch.Tensor)
    assert torch.equal(state, snapshot(1, elements=STATE).content.copy())
    assert outcome == ("b", Outcome.TAKEN)
    assert (parcel.samples, parcel.values.numel()) == (8, LAYOUT.elements)


def ranges_of(links: Nowhere) -> list[int]:
    """Of this peer's state, that it has given."""
    return [header.chunk for header in links.said[Kind.STATE] if header.length == RANGE_BYTES]


@pytest.mark.parametrize("seed", seeds(100))
def test_whatever_a_connection_brings_this_peer_trains_on(seed: int, tmp_path: Path) -> None:
    chance, stream = random.Random(seed), b""
    in_the_clear = chance.random() < 0.5
    try:
        with asking() as (side, links, frames):
            stream = broken(chance, frames, in_the_clear=in_the_clear)
            if chance.random() < 0.75:
                announce(side, links, frames, in_the_clear=in_the_clear)
            feed(side.driver, stream, in_the_clear=in_the_clear)
            side.driver.lost("b", "the connection is closed")
            side.end_fetching()
            side.driver.contributed()  # it has seen to all that came before
            before, victim = len(side.trainee.commits), side.trainee
            side.contribute(TARGET)
            wait_for(partial(has_made, victim, before + 1), f"a step after it (seed {seed})")
            assert victim.failures == []
            assert all(bool(torch.isfinite(parcel.values).all()) for parcel in victim.carried)
            (state,) = side.fetched  # b's, or it has said why there is none
            assert not isinstance(state, torch.Tensor) or torch.equal(state, snapshot(1, elements=STATE).content.copy())
    except BaseException:
        (tmp_path / "stream").write_bytes(stream)
        print("the stream is kept:", tmp_path / "stream")
        raise


def feed(driver: Driver, stream: bytes | bytearray, *, in_the_clear: bool) -> None:
    """As a connection of peer "b" does."""
    here, there = socket.socketpair()
    writer = threading.Thread(target=send, args=(here, stream))
    writer.start()
    reader = Reader(there, "b", Watched(driver), verifies=in_the_clear)
    with there, contextlib.suppress(WireError, OSError):  # then it is closed
        while True:
            reader.read()
    writer.join()


def send(sock: socket.socket, stream: bytes | bytearray) -> None:
    with sock, contextlib.suppress(OSError):  # the other end reads no more
        sock.sendall(stream)
