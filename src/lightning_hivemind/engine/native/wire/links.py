"""All connections of this peer: made when first needed, kept across rounds, given up when the other end is dead."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field

from lightning_hivemind.engine.native.wire.connection import TOKEN_BYTES, close, read_exactly, tune, wake, why
from lightning_hivemind.engine.native.wire.dial import dial
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.lanes import MOST as MOST_LANES
from lightning_hivemind.engine.native.wire.outlet import Outlet
from lightning_hivemind.engine.native.wire.reach import Gone, Reach, Way
from lightning_hivemind.engine.native.wire.reader import Reader
from lightning_hivemind.engine.native.wire.sink import Introduce, Introduction, OpenStream, Payload, PeerId, Sink
from lightning_hivemind.engine.native.wire.speed import Speed
from lightning_hivemind.engine.native.wire.tls import Certificate, client_context
from lightning_hivemind.errors import LightningHivemindError, WireError
from lightning_hivemind.network.inherited import not_inherited

log = logging.getLogger("lightning_hivemind")

HANDSHAKE_S = 10.0
#: connections that have not said who they are, at most; and of one peer, which has :mod:`.lanes` and makes some anew.
#: For one more, the oldest goes
STRANGERS, MOST_OF_ONE = 64, 4 * MOST_LANES
ACCEPT_AGAIN_S, WARN_AGAIN_S = 0.5, 60.0
LOOK_S = 0.1
#: of one peer that have not been used
MOST_TOKENS = 64


@dataclass(eq=False, slots=True)
class _Inlet:
    """A connection to read from, and whose it is, once it has said so."""

    sock: socket.socket
    peer: PeerId | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Expected:
    """Who may come with a token, until when."""

    peer: PeerId
    until: float


class Links:
    """Sends frames to peers by id, and hands over what they send.

    Args:
        certificate: None sends everything in the clear, values with a checksum: TCP's own has 16 bits.
        introduce: see :data:`.sink.Introduce`.
        stream: see :data:`.sink.OpenStream`; the last way, tried where no other leads to a peer that libp2p reaches.
        detect_s: a peer that sends nothing for so long is lost.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        certificate: Certificate | None,
        introduce: Introduce,
        detect_s: float,
        stream: OpenStream | None = None,
    ) -> None:
        self._sink, self._certificate, self._introduce, self._detect_s = sink, certificate, introduce, detect_s
        self._stream = stream
        self._client = client_context() if certificate is not None else None
        self._lock = threading.Lock()
        self._outlets: dict[PeerId, Outlet] = {}
        #: to peers whose outlet is gone, where it is not the first
        self._ways: dict[PeerId, Way] = {}
        self._inlets: set[_Inlet] = set()
        self._expected: dict[bytes, _Expected] = {}
        self._listener: socket.socket | None = None
        self._inviting: set[PeerId] = set()
        self._speed, self._looked_at = Speed(), 0.0
        self._warned: dict[tuple[str, str], float] = {}
        self._closed = False

    # ------------------------------------------------------------------ the way in

    def listen(self, host: str = "0.0.0.0", port: int = 0) -> int:
        """Accept connections from now on; returns the port. Raises OSError where nobody can listen."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = listener = not_inherited(socket.create_server((host, port), family=family, backlog=128))
        listener.settimeout(None)  # whatever socket.setdefaulttimeout() was told
        threading.Thread(target=self._accept, args=(listener,), name="accepts", daemon=True).start()
        return int(listener.getsockname()[1])

    def take(self, sock: socket.socket) -> None:
        """A connection that somebody has made, by another way than to the port; it is closed if it is none of ours."""
        self._take_in(_Inlet(sock))

    def expect(self, peer: PeerId) -> bytes:
        """A token with which ``peer``, which libp2p has authenticated, may connect once."""
        token, now = secrets.token_bytes(TOKEN_BYTES), time.monotonic()
        with self._lock:
            self._expected = {known: one for known, one in self._expected.items() if one.until > now}
            of_peer = [known for known, one in self._expected.items() if one.peer == peer]
            for oldest in of_peer[: max(0, len(of_peer) + 1 - MOST_TOKENS)]:
                del self._expected[oldest]
            self._expected[token] = _Expected(peer, now + 3 * HANDSHAKE_S)
        return token

    def invite(self, peer: PeerId) -> None:
        """Dial ``peer`` for it to send on, since it cannot dial this one. Returns at once; it asks again if need be."""
        with self._lock:
            if peer in self._inviting or self._closed:
                return
            self._inviting.add(peer)
        try:
            threading.Thread(target=self._invite, args=(peer,), name=f"from {peer[-6:]}", daemon=True).start()
        except RuntimeError as error:
            log.warning("no connection for %s to send on: %s", peer, why(error))
            self._inviting.discard(peer)

    def _invite(self, peer: PeerId) -> None:
        try:
            introduction = self._introduce(peer, False)
            sock, _ = dial(introduction, Kind.REVERSED, context=self._client, timeout_s=self._detect_s)
        except (OSError, LightningHivemindError) as error:
            log.debug("no connection for %s to send on: %s", peer, why(error))
            return
        finally:
            self._inviting.discard(peer)
        inlet = _Inlet(sock, peer)
        with self._lock:
            if self._closed:
                close(sock)
            self._make_room(peer, MOST_OF_ONE)
            self._inlets.add(inlet)
        self._read(inlet)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
                self._take_in(_Inlet(sock))
            except (OSError, RuntimeError) as error:
                if self._closed:
                    return
                log.warning("a connection could not be accepted: %s", error)  # too many open files, or threads
                time.sleep(ACCEPT_AGAIN_S)

    def _take_in(self, inlet: _Inlet) -> None:
        with self._lock:
            if self._closed:
                close(inlet.sock)
                return
            self._make_room(None, STRANGERS)  # to say who one is takes milliseconds
            self._inlets.add(inlet)
        try:
            threading.Thread(target=self._receive, args=(inlet,), name="from ?", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._inlets.discard(inlet)
            close(inlet.sock)
            raise

    def _make_room(self, peer: PeerId | None, most: int) -> None:
        """For one more connection of ``peer``, or of a stranger: the oldest goes."""
        found = sorted((one for one in self._inlets if one.peer == peer), key=lambda one: one.since)
        for oldest in found[: max(0, len(found) + 1 - most)]:
            self._inlets.discard(oldest)
            wake(oldest.sock)

    def _receive(self, inlet: _Inlet) -> None:
        """A connection that somebody has made."""
        try:
            self._handshake(inlet)
            greeting, peer = self._identify(inlet.sock)
            self._still_wanted(inlet)
            inlet.sock.settimeout(self._detect_s)
        except Exception as error:
            self._ended(inlet, error)
            close(inlet.sock)
            return
        if greeting is Kind.REVERSED:
            with self._lock:
                self._inlets.discard(inlet)
            if (outlet := self._outlet(peer)) is not None:
                outlet.reach.give(inlet.sock)
            else:
                close(inlet.sock)
            return
        with self._lock:
            self._make_room(peer, MOST_OF_ONE)
            inlet.peer = peer
        threading.current_thread().name = f"from {peer[-6:]}"
        self.send(peer, Header(kind=Kind.PING))  # there are always both directions: each hears that the other lives
        self._read(inlet)

    def _read(self, inlet: _Inlet) -> None:
        """A connection of a known peer, to its end."""
        assert inlet.peer is not None
        try:
            reader = Reader(inlet.sock, inlet.peer, self._sink, verifies=self._certificate is None)
            while True:
                reader.read()
        except Exception as error:
            self._ended(inlet, error)
        finally:
            close(inlet.sock)

    def _ended(self, inlet: _Inlet, error: Exception) -> None:
        with self._lock:
            self._inlets.discard(inlet)
            outlet = self._outlets.get(inlet.peer) if inlet.peer is not None else None
            since = [one.since for one in self._inlets if one.peer == inlet.peer]
        if self._closed:
            return
        if not isinstance(error, OSError):
            self._warn(inlet.peer or "a stranger", error)
        if inlet.peer is None:
            return
        if isinstance(error, TimeoutError):
            # it sends nothing, not even pings: frozen or cut off, whatever becomes of what is sent to it
            if since and min(since) < time.monotonic() - self._detect_s:
                return  # but on another one it was heard all the while: these starve one another
            if outlet is not None:
                self._forget(outlet)  # also if it is heard again: it may have gone the way of the inlet
            if since:
                self.send(inlet.peer, Header(kind=Kind.PING))  # both directions again
            else:
                self._sink.lost(inlet.peer, why(error))
        elif not since and (outlet := self._outlet(inlet.peer)) is not None:
            outlet.probe()  # it connects again, or this finds that it is dead

    def _warn(self, who: str, error: Exception) -> None:
        """Once a minute of the same kind: who sends garbage may do so all day, and each time other garbage."""
        reason, kind, now = why(error), type(error).__name__, time.monotonic()
        with self._lock:
            self._warned = {one: at for one, at in self._warned.items() if now - at < WARN_AGAIN_S}
            if (who, kind) in self._warned:
                return
            self._warned[who, kind] = now
        unforeseen = None if isinstance(error, WireError) else error
        log.warning("a connection of %s was closed: %s", who, reason, exc_info=unforeseen)

    def _handshake(self, inlet: _Inlet) -> None:
        tune(inlet.sock, HANDSHAKE_S)
        if self._certificate is None:
            return
        wrap = self._certificate.server.wrap_socket
        try:
            inlet.sock = sock = not_inherited(wrap(inlet.sock, server_side=True, do_handshake_on_connect=False))
            self._still_wanted(inlet)  # whoever ended it before now had no socket of it to wake
            sock.do_handshake()
        except ssl.SSLEOFError:
            raise ConnectionResetError("closed before the handshake") from None
        except ssl.SSLError as error:
            raise WireError(f"no TLS handshake: {why(error)}") from None

    def _still_wanted(self, inlet: _Inlet) -> None:
        with self._lock:
            if self._closed or inlet not in self._inlets:
                raise ConnectionAbortedError("closing, or others came")

    def _identify(self, sock: socket.socket) -> tuple[Kind, PeerId]:
        """What this connection is for, and whose it is, by the token in its first frame."""
        frame = memoryview(bytearray(HEADER_BYTES + TOKEN_BYTES))
        read_exactly(sock, frame)
        header, token = Header.unpack(frame[:HEADER_BYTES]), bytes(frame[HEADER_BYTES:])
        if header.kind not in (Kind.HELLO, Kind.REVERSED) or header.length != TOKEN_BYTES:
            raise WireError("a connection that does not begin with a token")
        with self._lock:
            match = next((known for known in self._expected if hmac.compare_digest(known, token)), None)
            expected = self._expected.pop(match) if match is not None else None
        if expected is None or expected.until < time.monotonic():
            raise WireError("a token that was not given, was used before, or is too old")
        return header.kind, expected.peer

    # ------------------------------------------------------------------ the way out

    def send(self, peer: PeerId, header: Header, payload: Payload = ()) -> None:
        """Queue a frame for ``peer``; connects if there is no connection yet. Never blocks."""
        if (outlet := self._outlet(peer)) is not None:
            outlet.send(header, payload)

    @property
    def upload_rate(self) -> float:
        """Bytes per second that this peer can send, as far as was seen; see :mod:`.speed`. From one thread only."""
        return self._speed.of_line(self._in_use.values())

    def look(self, now: float) -> None:
        """At what goes out, for :attr:`upload_rate`: often, as long as there is something. From the same thread."""
        if now >= self._looked_at + LOOK_S:
            self._looked_at, in_use = now, self._in_use
            self._speed.look(in_use.values())
            for peer, outlet in self._ways_out().items() if in_use else ():
                if outlet.becomes_late(now, self._detect_s):  # frozen, say: rounds need not wait to know
                    self._sink.lost(peer, "it has not answered yet", connects=True)

    @property
    def _in_use(self) -> dict[PeerId, list[socket.socket]]:
        """The connections to each peer to which there are any."""
        return {peer: found for peer, outlet in self._ways_out().items() if (found := outlet.connections)}

    def connected(self) -> frozenset[PeerId]:
        """To whom there is a connection: none to who was dead or frozen when this peer came."""
        return frozenset(self._in_use)

    @property
    def slow_to(self) -> tuple[PeerId, ...]:
        """To whom this peer sends at less than a quarter of the speed to another one. From one thread only."""
        return tuple(sorted(self._speed.slow_to(self._in_use)))

    def forget(self, number: bytes, kind: Kind | None = None) -> None:
        """That round, or download, is over: what still waits of it, or of one kind, is not sent any more."""
        for outlet in self._ways_out().values():
            outlet.forget(number, kind)

    def sends(self, number: bytes, kind: Kind | None = None, to: PeerId | None = None) -> bool:
        """Whether something of that round, or download, is being sent, or waits to be: all of it, or less."""
        return any(one.sends(number, kind) for peer, one in self._ways_out().items() if to in (None, peer))

    def _ways_out(self) -> dict[PeerId, Outlet]:
        with self._lock:
            return dict(self._outlets)

    def _outlet(self, peer: PeerId) -> Outlet | None:
        """The way to ``peer``; None when all is closed, or if there is none: then it is lost."""
        try:
            return self._made_outlet(peer)
        except RuntimeError as error:  # no more threads
            self._sink.lost(peer, why(error))
            return None

    def _made_outlet(self, peer: PeerId) -> Outlet | None:
        with self._lock:
            if self._closed:
                return None
            outlet = self._outlets.get(peer)
            if outlet is None:
                reach = Reach(
                    peer,
                    introduce=self._introduced,
                    stream=self._stream,
                    context=self._client,
                    patience_s=self._detect_s,
                    listens=self._listener is not None,
                    way=self._ways.pop(peer, Way.DIAL),
                )
                outlet = self._outlets[peer] = Outlet(
                    reach, self._outlet_lost, lambda: len(self._outlets), sums=self._certificate is None
                )
            return outlet

    def _introduced(self, peer: PeerId, dials: bool) -> Introduction:
        introduction = self._introduce(peer, dials)
        if not introduction.endpoints and self._listener is None:
            raise Gone("neither of the two accepts connections (client_mode)")
        return introduction

    def _outlet_lost(self, outlet: Outlet, reason: str) -> None:
        self._forget(outlet)
        if not self._closed:
            self._sink.lost(outlet.peer, reason)

    def _forget(self, outlet: Outlet) -> None:
        outlet.close()  # first: as long as it sends, it is asked what (see forget)
        with self._lock:
            if self._outlets.get(outlet.peer) is outlet:
                del self._outlets[outlet.peer]
                if outlet.reach.way is not Way.DIAL:
                    self._ways[outlet.peer] = outlet.reach.way

    # ------------------------------------------------------------------ the end

    def close(self, timeout_s: float = 2.0) -> None:
        """Close everything; threads end within ``timeout_s``. Safe to call twice."""
        with self._lock:
            self._closed = True
            outlets, inlets = list(self._outlets.values()), list(self._inlets)
            self._outlets.clear()
        if self._listener is not None:
            close(self._listener)
        for outlet in outlets:
            outlet.close()
        for inlet in inlets:
            wake(inlet.sock)
        deadline = time.monotonic() + timeout_s
        for outlet in outlets:
            with contextlib.suppress(RuntimeError):  # closed from its own thread
                outlet.join(max(0.0, deadline - time.monotonic()))
