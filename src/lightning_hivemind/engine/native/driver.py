"""Joins the protocol to a clock, to connections and to tensors: one thread per peer.

Everything that happens - a frame, a lost connection, a finished batch - is an event in one queue; the thread tells the
protocol and carries out what it answers. The training thread never waits for it unless it wants to.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs import ChunkCodec
from lightning_hivemind.engine.native.exchange import Exchange, UnusableInput
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol.actions import (
    Action,
    Apply,
    Begun,
    Called,
    CatchUp,
    GiveUp,
    Note,
    Reduce,
    Send,
    SendInput,
    SendResult,
)
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.wire.encoding import MAX_MESSAGE_BYTES, decode, encode
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.errors import WireError

log = logging.getLogger("lightning_hivemind")

#: exchanges of rounds that this peer is, or was just, in; more than two is a peer that calls and never begins
MOST_EXCHANGES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What the training side brings to a round: an offer, and the values, which stay as they are until it ends."""

    offer: Offer
    values: Tensor | None


class Training(Protocol):
    """The side that computes gradients and applies averages; called from the driver's thread, must return quickly."""

    def give(self) -> Given:
        """Fix what this peer contributes now."""

    def returned(self, reason: str) -> None:
        """The round came to nothing: what was given last is this peer's own again."""

    def committed(self, commit: Commit, average: Tensor | None) -> None:
        """A step is decided. ``average`` is float32 CPU (elements,), or None if it must be fetched first."""

    def behind(self, head: Head, source: PeerId, commits: tuple[Commit, ...]) -> None:
        """Others are ahead: see :class:`.actions.CatchUp`."""

    def noted(self, note: Note) -> None:
        """Something that a user may want to know."""


class Driver:
    """One peer: see the module. Its methods may be called from any thread."""

    def __init__(self, peer: Peer, training: Training, layout: Layout, codec: ChunkCodec) -> None:
        self._peer, self._training, self._layout, self._codec = peer, training, layout, codec
        self._events: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._exchanges: dict[bytes, Exchange] = {}
        self._given: bytes | None = None
        self._links: Links | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lightning-hivemind-rounds", daemon=True)

    def start(self, links: Links) -> None:
        self._links = links
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread and its connections."""
        self._stopping = True
        self._events.put(lambda now: None)
        self._thread.join(timeout_s)
        if self._links is not None:
            self._links.close()

    # ------------------------------------------------------------------ what the training side says

    def contributed(self, samples: int) -> None:
        self._events.put(lambda now: self._peer.contributed(samples, now))

    def adopt(self, head: Head, commits: tuple[Commit, ...] = ()) -> None:
        self._events.put(lambda now: self._peer.adopt(head, commits, now))

    def saw(self, peer: PeerId, head: Head, samples: int, reduces: bool, stamp: float) -> None:
        self._events.put(lambda now: self._peer.saw(peer, head, samples, reduces, stamp, now))

    # ------------------------------------------------------------------ what the connections say (see wire.sink)

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        match header.kind:
            case Kind.MESSAGE:
                if header.length > MAX_MESSAGE_BYTES:
                    raise WireError(f"a message of {header.length} bytes; at most {MAX_MESSAGE_BYTES} are taken")
                return memoryview(bytearray(header.length))
            case Kind.INPUT | Kind.RESULT:
                exchange = self._exchanges.get(header.round)
                if exchange is None:
                    return None  # of a round that is over here, or not yet begun: it is asked for again
                if header.kind is Kind.INPUT:
                    return exchange.room_for_input(header.chunk, peer, header.length)
                return exchange.room_for_result(header.chunk, header.version, peer, header.length)
            case _:
                return None

    def moved(self, peer: PeerId, header: Header) -> None:
        if header.kind in (Kind.INPUT, Kind.RESULT):
            self._peer.heard(header.round, peer, time.monotonic())

    def arrived(self, peer: PeerId, header: Header, payload: memoryview | None) -> None:
        if payload is None:
            return
        if header.kind is Kind.MESSAGE:
            message = decode(payload)
            self._events.put(lambda now: self._peer.receive(peer, message, now))
        elif header.kind is Kind.INPUT:
            self._events.put(lambda now: self._take_input(peer, header, payload, now))
        elif header.kind is Kind.RESULT:
            self._events.put(lambda now: self._take_result(peer, header, payload, now))

    def lost(self, peer: PeerId, reason: str) -> None:
        self._events.put(lambda now: self._peer.lost(peer, now))

    def _take_input(self, peer: PeerId, header: Header, payload: memoryview, now: float) -> None:
        exchange = self._exchanges.get(header.round)
        if exchange is not None:
            exchange.keep(header.chunk, peer, payload)
            self._peer.input_arrived(header.round, header.chunk, peer, now)

    def _take_result(self, peer: PeerId, header: Header, payload: memoryview, now: float) -> None:
        exchange = self._exchanges.get(header.round)
        if exchange is not None:
            digest = header.checksum.to_bytes(4, "big")
            exchange.take(header.chunk, header.version, peer, payload)
            self._peer.result_arrived(header.round, header.chunk, header.version, digest, peer, now)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stopping:
            wait_s = max(0.0, self._peer.deadline - time.monotonic())
            try:
                event = self._events.get(timeout=min(wait_s, 1.0))
            except queue.Empty:
                event = self._peer.tick
            try:
                event(time.monotonic())
                self._carry_out()
            except Exception:
                log.exception("an event of the rounds' thread failed")

    def _carry_out(self) -> None:
        while actions := self._peer.take():
            for action in actions:
                self._do(action)

    def _do(self, action: Action) -> None:
        assert self._links is not None
        match action:
            case Send(to=to, message=message):
                data = encode(message)
                self._links.send(to, Header(kind=Kind.MESSAGE, length=len(data)), (data,))
            case Called(round=round_id):
                self._join(round_id)
            case Begun(plan=plan):
                if (exchange := self._exchanges.get(plan.round)) is not None:
                    exchange.begin(plan)
            case SendInput():
                self._send_input(action)
            case Reduce():
                self._reduce(action)
            case SendResult():
                self._send_result(action)
            case Apply(commit=commit, complete=complete):
                exchange = self._exchanges.pop(commit.round, None)
                self._given = None
                self._training.committed(commit, exchange.result if complete and exchange is not None else None)
            case GiveUp(round=round_id, reason=reason):
                self._exchanges.pop(round_id, None)
                if self._given == round_id:
                    self._given = None
                    self._training.returned(reason)
            case CatchUp(head=head, source=source, commits=commits):
                self._training.behind(head, source, commits)
            case Note():
                self._training.noted(action)

    def _join(self, round_id: bytes) -> None:
        given = self._training.give()
        result = torch.empty(self._layout.elements)
        while len(self._exchanges) >= MOST_EXCHANGES:
            self._exchanges.pop(next(iter(self._exchanges)))
        self._exchanges[round_id] = Exchange(self._layout, self._codec, self._peer.me, given.values, result)
        self._given = round_id
        self._peer.join(round_id, given.offer, time.monotonic())

    def _send_input(self, action: SendInput) -> None:
        exchange = self._exchanges.get(action.round)
        if exchange is None:
            return
        if action.to == self._peer.me:
            exchange.keep_own(action.chunk)
            self._peer.input_arrived(action.round, action.chunk, self._peer.me, time.monotonic())
            return
        assert self._links is not None
        data = exchange.input(action.chunk)
        header = Header(kind=Kind.INPUT, round=action.round, chunk=action.chunk, length=len(data))
        self._links.send(action.to, header, (data,))

    def _reduce(self, action: Reduce) -> None:
        exchange = self._exchanges.get(action.round)
        if exchange is None:
            return
        try:
            exchange.reduce(action.chunk, action.contributions)
        except UnusableInput as unusable:
            self._peer.refuse(action.round, unusable.peer, unusable.reason, time.monotonic())
        else:
            self._peer.reduced(action.round, action.chunk, action.version, time.monotonic())

    def _send_result(self, action: SendResult) -> None:
        exchange = self._exchanges.get(action.round)
        if exchange is None:
            return
        assert self._links is not None
        data, checksum = exchange.reduced(action.chunk)
        header = Header(
            kind=Kind.RESULT,
            round=action.round,
            chunk=action.chunk,
            version=action.version,
            length=len(data),
            checksum=checksum,
        )
        for peer in action.to:
            if peer != self._peer.me:
                self._links.send(peer, header, (data,))
                continue
            digest, now = checksum.to_bytes(4, "big"), time.monotonic()
            self._peer.result_arrived(action.round, action.chunk, action.version, digest, peer, now)
