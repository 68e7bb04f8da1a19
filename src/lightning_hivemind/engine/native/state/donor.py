"""The giving side: describes this peer's state when somebody asks, and hands it out by ranges.

Questions come in the connections' threads. The description is made in a thread of its own, also while a batch is
computed (which changes no parameter). So is a copy, where one is needed: who still fetches when the next step is due
goes on from that; see :mod:`.content`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_hivemind.engine.native.protocol.lineage import PeerId
from lightning_hivemind.engine.native.state.content import Content
from lightning_hivemind.engine.native.state.questions import Done, Question, WantsDescription
from lightning_hivemind.engine.native.state.snapshot import Snapshot
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.sink import Payload
from lightning_hivemind.errors import StateError

log = logging.getLogger("lightning_hivemind")

#: a copy that nobody has asked for is dropped after so long
KEPT_S = 60.0
#: who asks while another peer is downloading does not take its copy away
MOST_COPIES = 2
#: who has asked for a part of a copy so recently reads it, unless it says that it has done: a part may take as long
IN_USE_S = 30.0

#: who waits for a copy to make room looks so often, and whether one is to be made
LOOK_S, CHANGE_LOOK_S = 1.0, 0.05

SendFrame = Callable[[PeerId, Header, Payload], None]


class Donor:
    """See the module.

    Args:
        copy: of the state as it is now, given the copy that is there (and may still be right); None if this peer's
            state is not worth giving. Raises StateError.
        forget: what still waits to be sent of a download that has ended.
        changes: whether the state will change soon.
    """

    def __init__(
        self,
        send: SendFrame,
        copy: Callable[[Snapshot | None], Snapshot | None],
        forget: Callable[[bytes], object] = lambda download: None,
        changes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._send, self._make_copy, self._forget_frames, self._changes = send, copy, forget, changes
        self._changed = threading.Condition()
        self._waiting: dict[PeerId, bytes] = {}
        #: copies and when they were asked for last, oldest first; one before the newest may still be on its way
        self._copies: dict[bytes, tuple[Snapshot, float]] = {}
        #: whom the copy is for that is being made
        self._copying: dict[PeerId, bytes] = {}
        #: which copy each of the others reads, in which download, and when it asked last
        self._readers: dict[PeerId, tuple[bytes, bytes, float]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="donor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer nobody any more."""
        with self._changed:
            self._stopped = True
            self._copies.clear()
            self._changed.notify()

    @property
    def askers(self) -> frozenset[PeerId]:
        """For whom a copy is being made."""
        with self._changed:
            return frozenset(self._copying)

    # ------------------------------------------------------------------ the connections' threads

    def asked(self, peer: PeerId, download: bytes, question: Question) -> None:
        """A question has arrived."""
        with self._changed:
            if isinstance(question, WantsDescription):
                if self._copying.get(peer) == download:
                    return  # it asks again, for the copy that is being made
                self._forget(peer)
                self._waiting[peer] = download
                return
            if isinstance(question, Done):
                self._forget(peer, download)
                return
            copy, _ = self._copies.get(question.digest, (None, 0.0))
            if copy is not None and not self._stopped:
                self._readers[peer] = (question.digest, download, time.monotonic())
                copy.content.wanted = True
                self._changed.notify()
                self._copies.pop(question.digest)  # to the end of the order
                self._copies[question.digest] = (copy, time.monotonic())
        data = None
        if copy is not None and question.number < len(copy.spans):
            data = copy.content.read(copy.spans[question.number])
        if data is None:
            self._answer(peer, download, 0, b"")  # it is gone: the other peer has to begin anew
        else:
            self._answer(peer, download, 1 + question.number, data)

    def lost(self, peer: PeerId) -> None:
        with self._changed:
            self._forget(peer)

    def _forget(self, peer: PeerId, download: bytes | None = None) -> None:
        """That download of it, or whichever it is, has ended."""
        for asked in (self._waiting, self._copying):
            if download in (None, asked.get(peer)):
                asked.pop(peer, None)
        if peer in self._readers and download in (None, self._readers[peer][1]):
            self._forget_frames(self._readers.pop(peer)[1])
            self._mark()
        self._changed.notify()

    def _mark(self) -> None:
        """Say which copies are wanted."""
        read = {digest for digest, _, _ in self._readers.values()}
        for key, (copy, _) in self._copies.items():
            copy.content.wanted = key in read

    # ------------------------------------------------------------------ the donor's thread

    def _run(self) -> None:
        told = ""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped or self._at_risk, KEPT_S / 2)
                at_risk = self._at_risk
                if at_risk and not self._waiting:
                    self._changed.wait(CHANGE_LOOK_S)
                if self._stopped:
                    return
            self._save(at_risk)
            with self._changed:
                now = time.monotonic()
                if self._waiting and len(self._in_use(now)) >= MOST_COPIES:
                    self._changed.wait(CHANGE_LOOK_S if at_risk else LOOK_S)
                    continue
                self._copying, self._waiting = self._waiting, {}
                oldest = now - KEPT_S
                self._copies = {digest: one for digest, one in self._copies.items() if one[1] > oldest}
                copy = next((copy for copy, _ in reversed(self._copies.values())), None)
                if not self._copying:
                    continue
            try:
                copy = self._make_copy(copy)
            except StateError as error:
                log.log(
                    logging.DEBUG if str(error) == told else logging.WARNING, "who joins gets no state here: %s", error
                )
                told = str(error)
                copy = None
            except Exception:  # memory, say: the next peer that asks may have better luck
                log.exception("this peer's state could not be copied for a peer that joins")
                copy = None
            with self._changed:
                waiting, self._copying = self._copying, {}
                if copy is not None and not self._stopped:
                    self._keep(copy, waiting, time.monotonic())
            for peer, download in waiting.items():
                self._answer(peer, download, 0, copy.description if copy is not None else b"")

    @property
    def _at_risk(self) -> list[Content]:
        return [copy.content for copy, _ in self._copies.values() if copy.content.is_at_risk]

    def _save(self, at_risk: Sequence[Content]) -> None:
        """Copy what somebody fetches, so that the step that will change it need not."""
        for content in at_risk if at_risk and self._changes() else ():
            if content.is_at_risk:  # still
                try:
                    content.copy()
                except Exception:  # the step tries again, and warns: :meth:`.Content.change`
                    log.debug("no copy of this peer's state can be made yet", exc_info=True)

    def _keep(self, copy: Snapshot, waiting: Mapping[PeerId, bytes], now: float) -> None:
        self._readers.update({peer: (copy.key, download, now) for peer, download in waiting.items()})
        self._copies.pop(copy.key, None)
        self._copies[copy.key] = (copy, now)
        if len(self._copies) > MOST_COPIES:
            in_use = self._in_use(now)  # or all of them are, since somebody has begun to ask again
            oldest = next(iter(self._copies))
            del self._copies[next((digest for digest in self._copies if digest not in in_use), oldest)]
        self._mark()

    def _in_use(self, now: float) -> set[bytes]:
        """Digests of the copies that somebody reads."""
        self._readers = {peer: one for peer, one in self._readers.items() if one[2] > now - KEPT_S}
        return {digest for digest, _, at in self._readers.values() if at > now - IN_USE_S} & set(self._copies)

    def _answer(self, peer: PeerId, download: bytes, number: int, data: bytes | memoryview) -> None:
        self._send(peer, Header(kind=Kind.STATE, round=download, chunk=number, length=len(data)), (data,))
