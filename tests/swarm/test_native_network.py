"""The native engine's connections between two peers that know of one another through libp2p only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("hivemind")

import msgpack  # type: ignore[import-untyped]

from lightning_hivemind.engine.native.introductions import Introductions, hosts_of, read_introduction
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.engine.native.wire.tls import Certificate
from lightning_hivemind.errors import WireError
from lightning_hivemind.events import EventBus
from lightning_hivemind.network.daemon import PeerNetwork
from lightning_hivemind.network.settings import NetworkSettings
from swarm.town import wait_for

pytestmark = pytest.mark.swarm


class Heard:
    """A sink that keeps what arrives."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, bytes]] = []
        self.losses: list[str] = []

    def room(self, peer: str, header: Header) -> memoryview | None:
        return memoryview(bytearray(header.length))

    def moved(self, peer: str, header: Header) -> None:
        pass

    def arrived(self, peer: str, header: Header, payload: memoryview | None) -> None:
        self.frames.append((peer, bytes(payload or b"")))

    def lost(self, peer: str, reason: str, *, connects: bool = False) -> None:
        self.losses.append(peer)


class Member:
    """A peer with all that it needs to be found."""

    def __init__(self, *join: Member, dialled: bool = True, run: str = "run") -> None:
        addresses = tuple(address for one in join for address in one.network.visible_addresses())
        settings = NetworkSettings(run_id="run", host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=addresses)
        self.network = PeerNetwork(settings, EventBus())
        self.network.start()
        self.heard, certificate = Heard(), Certificate.create()
        self.links = Links(
            self.heard, certificate=certificate, introduce=self._introduce, stream=self._stream, detect_s=3.0
        )
        port = self.links.listen()
        self._unheard = socket.socket()
        if not dialled:  # a router before it drops, or refuses, what comes to another port than libp2p's
            self._unheard.bind(("127.0.0.1", 0))
            port = int(self._unheard.getsockname()[1])
        self.introductions = Introductions(
            self.network.dht, run, self.links, fingerprint=certificate.fingerprint, port=port, timeout_s=5.0
        )
        self.introductions.start()

    def _introduce(self, peer: str, dials: bool) -> Any:
        return self.introductions.introduce(peer, dials)

    def _stream(self, peer: str, timeout_s: float) -> socket.socket:
        return self.introductions.stream(peer, timeout_s)

    @property
    def peer_id(self) -> str:
        return self.network.peer_id

    def close(self) -> None:
        self.links.close()
        self.introductions.close()
        self.network.shutdown()
        self._unheard.close()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    started = [Member()]
    started.append(Member(started[0]))
    yield started
    for one in started:
        one.close()


def test_two_peers_connect_by_their_ids_and_know_who_speaks(members: list[Member]) -> None:
    first, second = members
    first.links.send(second.peer_id, Header(kind=Kind.INPUT, length=5), (b"hello",))
    wait_for(lambda: second.heard.frames, "the frame")
    assert second.heard.frames == [(first.peer_id, b"hello")]
    second.links.send(first.peer_id, Header(kind=Kind.INPUT, length=6), (b"answer",))
    wait_for(lambda: first.heard.frames, "the answer")
    assert first.heard.frames == [(second.peer_id, b"answer")]
    second.links.close()
    wait_for(lambda: first.heard.losses, "the loss")
    assert first.heard.losses == [second.peer_id]


def test_two_peers_whose_routers_let_only_libp2p_through_are_connected_by_it() -> None:
    first = Member(dialled=False)
    second = Member(first, dialled=False)
    payload = bytes(range(256)) * (5 << 12)
    try:
        for one, other in ((first, second), (second, first)):
            one.links.send(other.peer_id, Header(kind=Kind.INPUT, length=len(payload)), (payload,))
        for one, other in ((first, second), (second, first)):
            wait_for(lambda one=one: one.heard.frames, "the frame")
            assert one.heard.frames == [(other.peer_id, payload)]
        second.links.close()
        wait_for(lambda: first.heard.losses, "the loss")
        assert first.heard.losses == [second.peer_id]
    finally:
        first.close()
        second.close()


def test_a_peer_that_nobody_knows_is_lost_and_not_waited_for_ever(members: list[Member]) -> None:
    first = members[0]
    stranger = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"
    first.links.send(stranger, Header(kind=Kind.PING))
    wait_for(lambda: first.heard.losses, "the loss")
    assert first.heard.losses == [stranger]


def test_hosts_that_mean_this_machine_come_last() -> None:
    texts = ["/ip4/127.0.0.1/tcp/1", "/ip4/203.0.113.7/tcp/1", "/ip6/::1/tcp/1", "/ip4/203.0.113.7/udp/2/quic-v1"]
    assert hosts_of(texts) == ["203.0.113.7", "127.0.0.1", "::1"]


@pytest.mark.parametrize("data", [b"", b"\x93\x90\x01\x02", b"\x93\x91\x92\xa1x\x00\xc4\x00\xc4\x00", bytes(5000)])
def test_an_introduction_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read_introduction(data, b"proof")


def test_a_peer_that_libp2p_does_not_find_is_reached_by_the_addresses_in_its_record(members: list[Member]) -> None:
    """As one that has just joined through a third peer ("routing: not found"); here there is no third one."""
    one = members[1]
    members.append(other := Member())
    with pytest.raises(OSError, match=r"libp2p does not get through"):
        one.introductions.introduce(other.peer_id)
    one.introductions.know(other.peer_id, other.network.visible_addresses())
    assert one.introductions.introduce(other.peer_id).endpoints


@pytest.mark.parametrize("dials", [False, True], ids=["how to reach it", "to be dialled"])
def test_who_has_an_address_and_does_not_know_the_run_learns_nothing(members: list[Member], dials: bool) -> None:
    """libp2p tells everybody the names of handlers, so that one can ask."""
    first = members[0]
    members.append(outsider := Member(first, run="another"))
    assert "run" not in first.introductions._handler.rsplit(".", 1)[1]
    assert outsider.introductions._handler != first.introductions._handler
    outsider.introductions._handler = first.introductions._handler
    with pytest.raises(OSError, match="does not know the run"):
        outsider.introductions.introduce(first.peer_id, dials)
    assert outsider.peer_id not in {one.peer for one in first.links._expected.values()}
    assert not first.links._inviting
    assert members[1].introductions.introduce(first.peer_id).token


def test_who_is_asked_must_know_the_run_too() -> None:
    """Whoever has a record may be nobody of this run."""
    answer = [[], b"fingerprint", b"token", b"its proof"]
    assert read_introduction(msgpack.packb(answer), b"its proof").token == b"token"
    with pytest.raises(WireError, match="does not know the run"):
        read_introduction(msgpack.packb(answer), b"another")


def test_addresses_that_are_none_or_another_peers_do_no_harm(members: list[Member]) -> None:
    founder, one = members
    stranger = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"
    for addresses in (["no address"], [], founder.network.visible_addresses()):
        one.introductions.know(stranger, addresses)
        with pytest.raises(OSError, match=r"does not get through|none"):
            one.introductions.introduce(stranger)
    assert one.introductions.introduce(founder.peer_id).endpoints
