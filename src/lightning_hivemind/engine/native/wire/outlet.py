"""Everything that this peer sends to one other peer: one thread that connects, and connects again when it must.

Where the line is long, what is long goes over several connections (:mod:`.lanes`), each with a thread of its own.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_hivemind.engine.native.wire.connection import (
    Follower,
    break_if_unheard,
    close,
    has_ended,
    pieces,
    wake,
    why,
    write,
)
from lightning_hivemind.engine.native.wire.frames import PIECE_BYTES, VALUES, Header, Kind
from lightning_hivemind.engine.native.wire.lanes import Lanes
from lightning_hivemind.engine.native.wire.reach import Gone, Reach
from lightning_hivemind.engine.native.wire.sink import Payload

log = logging.getLogger("lightning_hivemind")

#: bytes of chunks for one of a state: who takes a state must keep up with the rounds meanwhile, or take another one
CHUNKS_SHARE = 3
#: messages, or bytes of them, that wait for a peer that reads so slowly is lost: it is asked, or asks, for ever more
MOST_WAITING, MOST_WAITING_BYTES = 1 << 14, 1 << 28
#: a connection on which nothing is to be sent says so often that it lives
PING_S = 0.5
#: until the system of a peer whose process has ended has said so
RESET_S = 0.05

Frame = tuple[Header, Payload]
PING: Frame = (Header(kind=Kind.PING), ())


class Outlet:
    """Sends messages in order, and before all that is long (which may go over several connections); never blocks.

    Of what is long, a state's ranges and a round's chunks share the line: neither waits until the other is gone.

    Frames that were handed over while a connection broke may be lost: the protocol asks for them again. What is asked
    for again while it waits, or is being sent, over a slow line, is sent once.

    Args:
        reach: makes the connections; this outlet closes it.
        outlets: how many peers this one sends to.
        sums: values are sent with their checksum.
    """

    def __init__(
        self, reach: Reach, lost: Callable[[Outlet, str], None], outlets: Callable[[], int], *, sums: bool
    ) -> None:
        self.peer, self.reach, self._lost, self._sums = reach.peer, reach, lost, sums
        self._urgent, self._urgent_bytes = deque[Frame](), 0
        self._chunks: deque[Frame] = deque()
        self._ranges: deque[Frame] = deque()
        #: bytes of chunks that were sent while ranges waited, less what chunks may send for those of ranges
        self._ahead = 0
        #: of chunks and ranges that wait or are being sent
        self._unsent: set[Header | None] = set()
        lock = threading.Lock()
        #: there is something for the first connection, or for another one
        self._changed, self._long = threading.Condition(lock), threading.Condition(lock)
        self._lanes = Lanes(reach, self._pump_long, outlets)
        self._connects_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"to {self.peer[-6:]}", daemon=True)
        self._thread.start()

    def send(self, header: Header, payload: Payload = ()) -> None:
        """Queue a frame. ``payload`` must not change until the round is over."""
        with self._changed:
            queue = self._queue_of(header)
            if queue is self._urgent:
                self._urgent_bytes += header.length
            elif header in self._unsent or (queue is self._ranges and len(queue) >= MOST_WAITING):
                return
            else:
                self._unsent.add(header)
            if queue is self._ranges and not header.chunk:
                queue.appendleft((header, payload))  # a long description
            else:
                queue.append((header, payload))
            self._changed.notify()
            if queue is not self._urgent:
                self._long.notify()
            too_many = len(self._urgent) > MOST_WAITING or self._urgent_bytes > MOST_WAITING_BYTES
        if too_many and not self.reach.closed:
            self._lost(self, f"{MOST_WAITING} messages wait for it, or {MOST_WAITING_BYTES} bytes of them")

    def probe(self) -> None:
        """Find out whether the other end lives. Blocks for a moment."""
        self.send(*PING)
        time.sleep(RESET_S)  # if nobody is there, that is the answer to the first, and found with the second
        for sock in self.connections:
            if has_ended(sock):
                wake(sock)  # on a busy machine the first may not have been sent yet
        self.send(*PING)

    def becomes_late(self, now: float, after_s: float) -> bool:
        """Whether a connection has been in the making for so long; said once of each."""
        since = self._connects_since
        if since is None or now - since < after_s:
            return False
        self._connects_since = None
        return True

    @property
    def connections(self) -> list[socket.socket]:
        """Those that there are now."""
        first = self.reach.sock
        return [*self._lanes.connections, *([first] if first is not None else [])]

    def sends(self, number: bytes, kind: Kind | None = None) -> bool:
        """Whether something long of that round, or download, is being sent, or waits to be; all, or of one kind."""
        with self._changed:
            return any(header is not None and _is_of(header, number, kind) for header in self._unsent)

    def forget(self, number: bytes, kind: Kind | None = None) -> None:
        """That round, or download, is over: what is long of it, or of one kind, need not be sent any more."""
        with self._changed:
            for queue in (self._chunks, self._ranges):
                kept = [frame for frame in queue if not _is_of(frame[0], number, kind)]
                self._unsent.difference_update(header for header, _ in queue if _is_of(header, number, kind))
                queue.clear()
                queue.extend(kept)

    def close(self) -> None:
        self.reach.close()
        with self._changed:
            for sock in self.connections:
                wake(sock)
            self._changed.notify()
            self._long.notify_all()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        reason = ""
        try:
            while not self.reach.closed:
                self._connects_since = time.monotonic()
                sock = self.reach.connect()
                self._connects_since = None
                try:
                    self._pump(sock)
                finally:
                    close(sock)
        except Gone as error:
            reason = str(error)
        except Exception as error:  # whatever it is, the peer must not wait for ever for what is sent to it
            reason = f"{type(error).__name__}: {error}"
        if not self.reach.closed:
            self._lost(self, reason)

    def _pump(self, sock: socket.socket) -> None:
        """Send until the connection breaks, or there is a better way than the one it was made by."""
        header: Header | None = None
        line = Follower(sock)
        try:
            break_if_unheard(sock)
            while not self.reach.closed and not self.reach.improved:
                header, payload = self._next(header)
                if header in self._unsent:
                    line.look()
                    self._lanes.open_more(sock)
                waits = self._queue_of(header) is not self._urgent
                for piece in pieces(header, payload, line.piece_bytes if waits else PIECE_BYTES, sums=self._sums):
                    while waits and self._urgent and (message := self._message()) is not None:
                        write(sock, *message)
                    write(sock, *piece)
        except OSError as error:  # connected again, or found to be gone, by the caller
            log.debug("the connection to %s broke: %s", self.reach.peer, why(error))
        finally:
            self._sent(header)  # or lost

    def _pump_long(self, sock: socket.socket) -> None:
        """Send what is long until the connection breaks."""
        header: Header | None = None
        line = Follower(sock)
        try:
            break_if_unheard(sock)
            while not self.reach.closed:
                header, payload = self._next_long(header)
                line.look()
                for piece in pieces(header, payload, sums=self._sums):
                    write(sock, *piece)
        except OSError as error:
            log.debug("a further connection to %s broke: %s", self.reach.peer, why(error))
        finally:
            self._sent(header)

    def _next(self, sent: Header | None) -> Frame:
        """The next frame, after ``sent``: a ping if there is none for a while."""
        with self._changed:
            self._unsent.discard(sent)
            if not (self._urgent or self._chunks or self._ranges or self.reach.closed):
                self._changed.wait(PING_S)
            if self._urgent:
                return self._pop()
            queue = self._in_turn()
            return queue.popleft() if queue else PING

    def _next_long(self, sent: Header | None) -> Frame:
        with self._long:
            self._unsent.discard(sent)
            if not (self._chunks or self._ranges or self.reach.closed):
                self._long.wait(PING_S)
            queue = self._in_turn()
            return queue.popleft() if queue else PING

    def _in_turn(self) -> deque[Frame]:
        """Of the two queues of what is long, the next."""
        if not (self._chunks and self._ranges):
            self._ahead = 0
            return self._chunks or self._ranges
        queue = self._ranges if self._ahead > 0 else self._chunks
        self._ahead += queue[0][0].length if queue is self._chunks else -CHUNKS_SHARE * queue[0][0].length
        return queue

    def _queue_of(self, header: Header) -> deque[Frame]:
        if header.kind in VALUES:
            return self._chunks
        is_long = header.chunk or header.length > PIECE_BYTES
        return self._ranges if header.kind is Kind.STATE and is_long else self._urgent

    def _message(self) -> Frame | None:
        """One that may go between two pieces, because it is no more than one itself."""
        with self._changed:
            fits = self._urgent and self._urgent[0][0].length <= PIECE_BYTES
            return self._pop() if fits else None

    def _pop(self) -> Frame:
        frame = self._urgent.popleft()
        self._urgent_bytes -= frame[0].length
        return frame

    def _sent(self, header: Header | None) -> None:
        with self._changed:
            self._unsent.discard(header)


def _is_of(header: Header, number: bytes, kind: Kind | None) -> bool:
    return header.round == number and kind in (None, header.kind)
