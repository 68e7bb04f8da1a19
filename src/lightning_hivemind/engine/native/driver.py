"""Joins the protocol to a clock, to connections and to tensors: one thread per peer.

Everything that happens - a frame, a lost connection, a finished batch - is an event in one queue; the thread tells the
protocol and carries out what it answers. The training thread never waits for it unless it wants to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lightning_hivemind.engine.native.carrying.ends import KINDS, Ends
from lightning_hivemind.engine.native.chunks import Chunks, digest_from_checksum
from lightning_hivemind.engine.native.codecs import ChunkCodec
from lightning_hivemind.engine.native.exchange import UnusableInput
from lightning_hivemind.engine.native.greetings import Greetings
from lightning_hivemind.engine.native.inbox import WAITING_BYTES, Inbox
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.actions import (
    Action,
    Apply,
    Arrived,
    Begun,
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
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId
from lightning_hivemind.engine.native.protocol.messages import Message, Missing
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.seam import Status, Training
from lightning_hivemind.engine.native.state.donor import Donor
from lightning_hivemind.engine.native.state.download import Downloads
from lightning_hivemind.engine.native.state.questions import MAX_QUESTION_BYTES
from lightning_hivemind.engine.native.state.questions import read as read_question
from lightning_hivemind.engine.native.wakefulness import Wakefulness
from lightning_hivemind.engine.native.wire.encoding import MAX_MESSAGE_BYTES, decode, encode
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.errors import EngineStuckError, WireError

log = logging.getLogger("lightning_hivemind")

#: for the training thread's words to be seen to; the rounds' thread is never busy for a second
ANSWER_S = 30.0
LINGER_S = 0.02


class Driver:
    """One peer: see the module. Its methods may be called from any thread. ``codecs``: one for each chunk."""

    def __init__(
        self,
        peer: Peer,
        training: Training,
        layout: Layout,
        codecs: Sequence[ChunkCodec],
        memory: Memory | None = None,
    ) -> None:
        self._peer, self._training, self._layout, self._codecs = peer, training, layout, codecs
        self._memory = memory or Memory()
        self._events = Inbox(max(WAITING_BYTES, 8 * layout.elements))  # two vectors
        self._chunks: Chunks | None = None
        self._given: bytes | None = None
        #: of the round that this peer is in
        self._members: frozenset[PeerId] = frozenset()
        self._greetings = Greetings()
        #: a round that has called, and until when this peer may finish its batch first
        self._called: tuple[bytes, float] | None = None
        self._links: Links | None = None
        self._carrying: Ends | None = None
        self._whole_line = False  # whether all of it is there for the round that this peer has joined
        self._donor: Donor | None = None
        self._downloads: Downloads | None = None
        self.status = Status()
        #: what the protocol has asked for, and was not done yet
        self._to_do: deque[Action] = deque()
        self._wakefulness = Wakefulness(peer.standstill_s)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lightning-hivemind-rounds", daemon=True)

    def start(self, links: Links, donor: Donor | None = None, downloads: Downloads | None = None) -> None:
        """Begin; without ``donor`` and ``downloads`` nothing is said about states."""
        self._links, self._donor, self._downloads = links, donor, downloads
        self._chunks = Chunks(self._layout, self._codecs, self._peer.me, self._memory, links)
        self._carrying = Ends(links, self._peer, self._training, self._layout, self._codecs, self._memory)
        self._wakefulness.start()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread and its connections; who is late with the results of the last steps gets them first."""
        deadline = time.monotonic() + timeout_s
        try:
            while self._traffic.owes and time.monotonic() < deadline - timeout_s / 2:
                time.sleep(LINGER_S)
        finally:  # also of Ctrl+C
            self._stopping = True
            self._wakefulness.stop()
            self._events.put(lambda now: None)
            try:
                self._thread.join(max(0.0, deadline - time.monotonic()))
            finally:
                self._events.close()
                self._connections.close(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------ what the training side says

    # These three wait until it was seen to, if nothing else is said, and raise EngineStuckError if it never is.

    def contributed(self, *, wait: bool = True) -> None:
        """The training side has other samples than before, or is between two batches."""
        (self._tell if wait else self._events.put)(self._count)

    def adopt(self, head: Head, *, gives_up: bool = False) -> None:
        """This peer's state is that of ``head``. ``gives_up``: see :meth:`.peer.Peer.give_up`."""

        def adopted(now: float) -> None:
            self._training.adopted(head)
            if gives_up:
                self._peer.give_up(head, now)
            else:
                self._peer.adopt(head, (), now)
            self._count(now)

        self._tell(adopted)

    def follow(self, head: Head) -> None:
        """Take part in the rounds of those at ``head``, whose state this peer does not have yet."""
        self._tell(lambda now: self._follow(head, (), now))

    def saw(self, peer: PeerId, place: Place) -> None:
        """A peer's record was read; see :meth:`.peer.Peer.saw`. A connection to it is warm before the first round.

        (One that cannot be dialled is waited for: it greets this peer.)
        """
        if place.reduces and self._links is not None and self._greetings.due(peer, time.monotonic()):
            self._links.send(peer, Header(kind=Kind.PING))
        self._events.put(lambda now: self._peer.saw(peer, place, now))

    # ------------------------------------------------------------------ what the connections say (see wire.sink)

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        match header.kind:
            case Kind.MESSAGE | Kind.REQUEST:
                most = MAX_MESSAGE_BYTES if header.kind is Kind.MESSAGE else MAX_QUESTION_BYTES
                if header.length > most:
                    raise WireError(f"a {header.kind.name} of {header.length} bytes; at most {most} are taken")
                return memoryview(bytearray(header.length))
            case Kind.INPUT | Kind.RESULT if self._chunks is not None:
                return self._chunks.room(peer, header)
            case kind if kind in KINDS and self._carrying is not None:
                return self._carrying.room(peer, header)
            case Kind.STATE if self._downloads is not None:
                return self._downloads.room(peer, header)
            case _:
                return None

    def moved(self, peer: PeerId, header: Header) -> None:
        if header.kind in (Kind.INPUT, Kind.RESULT):
            self._peer.heard(header.round, peer, time.monotonic())
        if header.kind is Kind.PARCEL and self._carrying is not None:
            self._carrying.moved(peer, time.monotonic())
        if self._downloads is not None:
            self._downloads.moved(peer, header)

    def arrived(self, peer: PeerId, header: Header, payload: memoryview | None) -> None:
        if payload is None:
            return
        if header.kind is Kind.MESSAGE:
            message, came = decode(payload), time.monotonic()
            self._events.put_from(peer, header.length, lambda now: self._receive(peer, message, came, now))
        elif header.kind in (Kind.INPUT, Kind.RESULT):
            self._events.put_from(peer, header.length, lambda now: self._take(peer, header, payload, now))
        elif header.kind in KINDS and self._carrying is not None:
            self._events.put_from(peer, header.length, self._carrying.read(peer, header, payload))
        elif header.kind is Kind.REQUEST and self._donor is not None:
            self._donor.asked(peer, header.round, read_question(payload))
        elif header.kind is Kind.STATE and self._downloads is not None:
            self._downloads.arrived(peer, header, payload)

    def lost(self, peer: PeerId, reason: str, *, connects: bool = False) -> None:
        log.info("no connection to peer %s: %s", peer, reason)
        self._events.put(lambda now: self._lost(peer, now))
        for part in (self._donor, self._downloads):
            if part is not None and not connects:
                part.lost(peer)

    def _lost(self, peer: PeerId, now: float) -> None:
        self._peer.lost(peer, now)
        if self._carrying is not None:
            self._carrying.lost(peer, now)

    def _receive(self, peer: PeerId, message: Message, came: float, now: float) -> None:
        if isinstance(message, Missing) and self._traffic.sent_since(came, message.round, peer):
            return  # it asked while this thread was making what it lacks: what does not come, it asks for again
        self._peer.receive(peer, message, now)

    def _take(self, peer: PeerId, header: Header, payload: memoryview, now: float) -> None:
        if not self._traffic.take(peer, header, payload):
            return
        if header.kind is Kind.INPUT:
            self._peer.input_arrived(header.round, header.chunk, peer, now)
        else:
            digest = digest_from_checksum(header.checksum)
            self._peer.result_arrived(header.round, header.chunk, header.version, digest, peer, now)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        ticked = time.monotonic()
        while not self._stopping:
            until = self._peer.deadline if self._called is None else min(self._peer.deadline, self._called[1])
            event = self._events.take(max(ticked, min(until, time.monotonic() + 1.0)))
            if event is None:
                event, ticked = self._peer.tick, time.monotonic()
            try:
                self._see_to(event)
            except Exception as error:
                log.exception("an event of the rounds' thread failed: leaving the round, and taking a state")
                self._fail(f"{type(error).__name__}: {error}")

    def _see_to(self, event: Callable[[float], None]) -> None:
        event(self._now())
        self._carry_out()
        self._answer_call(self._now())
        self._connections.look(self._now())
        if self._carrying is not None and self._carrying.look(self._now()):
            self._count(self._now())
            self._carry_out()
        self.status = Status.of(self._peer, self._members)

    def _tell(self, event: Callable[[float], None]) -> None:
        done = threading.Event()

        def told(_: float) -> None:
            try:
                self._see_to(event)
            finally:
                done.set()

        self._events.put(told)
        if not done.wait(ANSWER_S):
            raise EngineStuckError(
                f"the thread that averages did not answer in {ANSWER_S:.0f} s. Parameters are those of the last"
                " global step. Restart this peer: it will take the swarm's state."
            )

    def _count(self, now: float) -> None:
        self._peer.contributed(self._training.samples, now)

    def _answer_call(self, now: float) -> None:
        """Join the round that has called, once this peer's batch is finished or not worth waiting for."""
        if self._called is not None and (now >= self._called[1] or self._training.ready_at(now) <= now):
            (round_id, _), self._called = self._called, None
            self._join(round_id)
            self._carry_out()

    def _follow(self, head: Head, commits: tuple[Commit, ...], now: float) -> None:
        self._training.behind(head, commits)
        self._peer.adopt(head, commits, now)
        self._count(now)

    def _leave(self) -> None:
        """This peer is in no round."""
        self._given, self._called, self._members = None, None, frozenset()

    def _fail(self, reason: str) -> None:
        """Leave everything; the others hear so with the next event. A step that is decided is one all the same."""
        undone, training = list(self._to_do), self._training
        self._to_do.clear()
        self._leave()
        parts: list[Callable[[], None]] = [self._traffic.drop_all]
        parts += [partial(training.committed, one.commit, None, None) for one in undone if isinstance(one, Apply)]
        parts += [partial(training.arrived, one.round, None) for one in undone if isinstance(one, Arrived)]
        parts += [partial(training.failed, reason), partial(self._peer.leave, reason, time.monotonic())]
        for part in parts:
            try:
                part()
            except Exception:  # the next of them must come about all the same
                log.exception("the round could not be left in order: the others find that this peer is silent in it")

    def _refused(self) -> None:
        self._training.refused()
        self._count(self._now())

    def _carry_out(self) -> None:
        while True:
            self._to_do.extend(self._peer.take())
            if not self._to_do:
                return
            self._do(self._to_do[0])
            self._to_do.popleft()

    def _now(self) -> float:
        """The time of an event: what took long since the last was this thread's work, or the process stood still."""
        now = time.monotonic()
        if self._wakefulness.stood_still():
            self._peer.suspended(now)
            if self._carrying is not None:
                self._carrying.suspended(now)
        else:
            self._peer.awake(now)
        return now

    def _do(self, action: Action) -> None:
        match action:
            case Send(to=to, message=message):
                data = encode(message)
                self._connections.send(to, Header(kind=Kind.MESSAGE, length=len(data)), (data,))
            case Called(round=round_id):
                now = self._now()
                self._called = (round_id, self._training.called(now))
            case Begun(plan=plan):
                if (exchange := self._traffic.of(plan.round)) is not None:
                    counted = exchange.counts
                    exchange.begin(plan)
                    self._members = frozenset(plan.members)
                    if not plan.version and self._whole_line and self._carrying is not None:
                        self._carrying.begun(plan, self._now())
                    if counted and not exchange.counts:
                        self._refused()
            case SendInput(round=round_id, chunk=chunk):
                if self._traffic.send_input(action):
                    self._peer.input_arrived(round_id, chunk, self._peer.me, self._now())
            case Reduce():
                self._reduce(action)
            case SendResult(round=round_id, chunk=chunk, version=version):
                if (digest := self._traffic.send_result(action)) is not None:
                    self._peer.result_arrived(round_id, chunk, version, digest, self._peer.me, self._now())
            case Apply(commit=commit, complete=complete, coming=coming):
                self._leave()
                left_out = self._traffic.left_out(commit, complete=complete or coming)
                average = None if coming else self._traffic.result(commit.round, complete=complete)
                self._training.committed(commit, average, left_out, coming=coming)
                self._count(self._now())
            case Arrived(round=round_id, complete=complete):
                self._training.arrived(round_id, self._traffic.result(round_id, complete=complete))
                self._count(self._now())
            case TellGone(to=to, ended=ended):
                if not self._connections.sends(ended.round, Kind.RESULT, to):
                    self._do(Send(to=to, message=ended))
            case GiveUp(round=round_id, reason=reason):
                exchange = self._traffic.drop(round_id)
                if round_id == self._given or (self._called is not None and self._called[0] == round_id):
                    self._leave()
                    self._training.returned(reason, begun=exchange is not None and exchange.begun)
                    self._count(self._now())
            case CatchUp(head=head, commits=commits):
                self._follow(head, commits, self._now())
            case Note(what=what, peer=peer):
                log.info("%s: %s", f"peer {peer}" if peer else "a round came to nothing here, another follows", what)

    def _join(self, round_id: bytes) -> None:
        given = self._training.give()
        early = self._traffic.open(round_id, given.values)
        self._given = round_id
        self._whole_line = given.offer.bandwidth >= 1.0
        links, offer = self._connections, given.offer
        offer = replace(offer, bandwidth=offer.bandwidth * links.upload_rate, slow_to=links.slow_to)
        self._peer.join(round_id, offer, self._now())
        for frame in early:
            self._take(*frame, self._now())
        if given.values is None:
            self._count(self._now())  # it may have less than it said

    @property
    def _connections(self) -> Links:
        assert self._links is not None, "the driver was not started"
        return self._links

    @property
    def _traffic(self) -> Chunks:
        assert self._chunks is not None, "the driver was not started"
        return self._chunks

    def _reduce(self, action: Reduce) -> None:
        exchange = self._traffic.of(action.round)
        if exchange is None:
            return
        try:
            exchange.reduce(action.chunk, action.contributions)
        except UnusableInput as unusable:
            if unusable.peer == self._peer.me:
                self._refused()  # also where nobody is left who gives, and there is no other plan
            self._peer.refuse(action.round, unusable.peer, unusable.reason, self._now())
        else:
            self._peer.reduced(action.round, action.chunk, action.version, self._now())
