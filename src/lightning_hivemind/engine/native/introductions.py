"""How peers get to know one another's addresses: over libp2p, which has authenticated both and crosses NAT.

Every peer answers one question of those who know the run: how can you be reached, and with what token may I come?
Nobody in between can change the answer, so the connections that follow need no authority. Where none can be made,
libp2p carries one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

import hivemind
import msgpack  # type: ignore[import-untyped]
from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.engine.native.wire.sink import Introduction
from lightning_hivemind.errors import EngineStuckError, WireError
from lightning_hivemind.network.addresses import parse_address
from lightning_hivemind.network.dialing import dial, in_one_line
from lightning_hivemind.network.raw_streams import RawStreams

log = logging.getLogger("lightning_hivemind")
T = TypeVar("T")

MOST_ENDPOINTS = 16
PROOF_BYTES = 32
#: what follows the proof in a question: how can you be reached? or, shall you dial whoever asks?
REACH, DIAL = b"", b"dial"
#: bound of the answer: a fingerprint, a token, some addresses
MAX_ANSWER_BYTES = 4096
#: peers whose addresses are kept
MOST_KNOWN = 4096
START_S = 20.0
STOP_S = 2.0
LEAVING = "this peer is leaving the swarm"


class Introductions:
    """Asks and answers in a thread of its own.

    Args:
        dht: a running DHT, whose daemon is used.
        links: where tokens come from, and connections go that others make over libp2p.
        port: where ``links`` listens; None if others cannot dial this peer.
        ipv6: whether it listens there by IPv6; else by IPv4, and nobody needs to try the other one.
        timeout_s: for one question.
    """

    def __init__(
        self,
        dht: hivemind.DHT,
        run: str,
        links: Links,
        *,
        fingerprint: bytes,
        port: int | None,
        timeout_s: float,
        ipv6: bool = False,
    ) -> None:
        self._dht, self._links, self._fingerprint, self._port, self._ipv6 = dht, links, fingerprint, port, ipv6
        self._run_key, self._timeout_s = hashlib.sha256(run.encode()).digest(), timeout_s
        # libp2p tells anybody who asks which handlers there are
        self._handler = f"lightning_hivemind.introduce.{_keyed(self._run_key, b'handler')[:16].hex()}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="introductions", daemon=True)
        self._p2p: P2P | None = None
        self._streams: RawStreams | None = None
        self._addresses: dict[str, Sequence[str]] = {}
        #: after which the thread takes no question any more
        self._closed = False
        self._closing = threading.Lock()

    def start(self) -> None:
        """Answer from now on. Raises EngineStuckError if the DHT's process does not answer."""
        self._thread.start()
        try:
            daemon = self._call(self._listen(), START_S)
        except TimeoutError:
            raise EngineStuckError(
                f"the DHT's first answer did not come in {START_S:.0f} s: its process hangs. Nothing was changed."
                " Restart this peer."
            ) from None
        self._streams = RawStreams(daemon, daemon.parent, f"{self._handler}.stream", self._links.take)
        try:
            self._streams.start()
        except OSError as error:
            raise EngineStuckError(
                f"the libp2p daemon takes no streams: {error}. Nothing was changed. Restart this peer."
            ) from error

    def know(self, peer: str, addresses: Sequence[str]) -> None:
        """Where libp2p may find ``peer``, should it not know itself. (Whoever answers there must have its identity.)"""
        self._addresses.pop(peer, None)
        self._addresses[peer] = addresses
        if len(self._addresses) > MOST_KNOWN:
            del self._addresses[next(iter(self._addresses))]  # of whom nothing was heard for longest

    def introduce(self, peer: str, dials: bool = False) -> Introduction:
        """How ``peer`` can be reached; with ``dials`` it is asked to dial this one. Blocks; from any thread.

        Raises:
            OSError: it does not answer.
            WireError: its answer cannot be understood.
        """
        try:
            return self._call(self._ask(peer, DIAL if dials else REACH), self._timeout_s)
        except (P2PDaemonError, P2PHandlerError) as error:
            raise ConnectionError(in_one_line(str(error))) from error

    def stream(self, peer: str, timeout_s: float) -> socket.socket:
        """A connection to ``peer`` that libp2p carries. Blocks; from any thread. Raises OSError if there is none."""
        if self._streams is None:
            raise ConnectionError("this peer is only starting")
        return self._streams.open(peer, timeout_s)

    def close(self) -> None:
        """Stop answering. Safe to call twice."""
        try:
            if self._streams is not None:
                self._streams.close()
        finally:
            with self._closing:
                stops = self._thread.is_alive() and not self._closed
                self._closed = True
                if stops:
                    self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread.is_alive():
                self._thread.join(STOP_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> Path:
        """Where the daemon is controlled."""
        self._p2p = await self._dht.replicate_p2p()
        await self._p2p.add_protobuf_handler(self._handler, self._answer, BytesValue, balanced=True)
        return Path(self._p2p.daemon_listen_maddr["unix"])

    async def _ask(self, peer: str, question: bytes) -> Introduction:
        assert self._p2p is not None
        try:
            answer = await self._call_peer(peer, question)
        except P2PDaemonError:
            if not (addresses := self._addresses.get(peer)) or self._p2p is None:
                raise
            await dial(self._p2p, peer, addresses)
            answer = await self._call_peer(peer, question)
        return read_introduction(answer.value, self._proof(peer, self._p2p.peer_id.to_base58(), "answers"))

    async def _call_peer(self, peer: str, question: bytes) -> Any:
        assert self._p2p is not None
        request = BytesValue(value=self._proof(self._p2p.peer_id.to_base58(), peer) + question)
        return await self._p2p.call_protobuf_handler(PeerID.from_base58(peer), self._handler, request, BytesValue)

    async def _answer(self, request: BytesValue, context: Any) -> BytesValue:
        assert self._p2p is not None
        asker, endpoints = context.remote_id.to_base58(), list[list[Any]]()
        proof, question = request.value[:PROOF_BYTES], request.value[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(asker, self._p2p.peer_id.to_base58())):
            raise PermissionError("whoever asks this does not know the run")  # it gets no more than this
        if self._port is not None and question != DIAL:
            hosts = hosts_of(await self._p2p.get_visible_maddrs(latest=True))
            endpoints = [[host, self._port] for host in hosts if self._ipv6 or ":" not in host]
        else:
            self._links.invite(asker)
        token = self._links.expect(asker)
        answers = self._proof(self._p2p.peer_id.to_base58(), asker, "answers")
        return BytesValue(value=msgpack.packb([endpoints[:MOST_ENDPOINTS], self._fingerprint, token, answers]))

    def _proof(self, speaker: str, hearer: str, does: str = "asks") -> bytes:
        """That ``speaker`` knows the run; of use to nobody else, for libp2p has authenticated it."""
        return _keyed(self._run_key, f"{speaker} {does} {hearer}".encode())

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        with self._closing:
            if self._closed:
                coroutine.close()
                raise ConnectionError(LEAVING)
            future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout_s), self._loop)
        try:
            return future.result(timeout_s + 1.0)
        except CancelledError:
            raise ConnectionError(LEAVING) from None
        except (FutureTimeoutError, TimeoutError, asyncio.TimeoutError):
            future.cancel()
            raise TimeoutError(f"no answer over libp2p in {timeout_s:.1f} s") from None


def _keyed(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def hosts_of(addresses: Iterable[object]) -> list[str]:
    """The hosts in these multiaddresses, each once; those that only this machine can mean come last."""
    parsed = [parse_address("an address of this peer", str(address)) for address in addresses]
    hosts = dict.fromkeys(one.host for one in parsed if not one.relayed)
    return sorted(hosts, key=lambda host: host.startswith("127.") or host == "::1")


def read_introduction(data: bytes, proof: bytes) -> Introduction:
    """The answer of another peer, which must have this ``proof`` that it knows the run; else raises WireError."""
    try:
        if len(data) > MAX_ANSWER_BYTES:
            raise ValueError(f"{len(data)} bytes")
        endpoints, fingerprint, token, shown = msgpack.unpackb(data, use_list=True, raw=False, max_ext_len=0)
        pairs = tuple((host, port) for host, port in endpoints)
        sound = len(pairs) <= MOST_ENDPOINTS and all(_is_endpoint(host, port) for host, port in pairs)
        if not sound or not isinstance(fingerprint, bytes) or not isinstance(token, bytes):
            raise ValueError("not addresses, a fingerprint and a token")
        if not isinstance(shown, bytes) or not hmac.compare_digest(shown, proof):
            raise ValueError("whoever answers does not know the run")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"an introduction that cannot be understood: {error}") from error
    return Introduction(endpoints=pairs, fingerprint=fingerprint, token=token)


def _is_endpoint(host: object, port: object) -> bool:
    return isinstance(host, str) and 0 < len(host) < 256 and type(port) is int and 0 < port < 65536
