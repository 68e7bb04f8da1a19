"""The taking side: asks several donors for a description, then fetches ranges from all that have the very same bytes.

The training thread runs it and waits; frames come in the connections' threads.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId
from lightning_hivemind.engine.native.state import questions
from lightning_hivemind.engine.native.state.donor import SendFrame
from lightning_hivemind.engine.native.state.questions import Done, Question, WantsDescription, WantsRange
from lightning_hivemind.engine.native.state.snapshot import MAX_DESCRIPTION_BYTES, Description, verify
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.errors import StateError, WireError

log = logging.getLogger("lightning_hivemind")

#: ranges that one donor is asked for at a time: enough that its line never idles
WINDOW = 3
POLL_S = 0.2
#: that a copy of a state and its digest may take, or a helper to fetch it
DESCRIPTION_S = 300.0
#: once there is one description, how much longer the other donors' are waited for
PATIENCE_S = 0.3
ASK_AGAIN_S = 15.0

Reader = Callable[[memoryview], Description]


@dataclass(slots=True)
class _Attempt:
    """One download. ``expected`` says which range of the memory a donor may write to."""

    number: bytes
    donors: set[PeerId]
    #: who may keep a copy for this download until it hears that it has ended
    keeping: set[PeerId]
    described: dict[PeerId, memoryview] = field(default_factory=dict)
    memory: Tensor | None = None
    missing: list[int] = field(default_factory=list)
    expected: dict[PeerId, set[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    moved_at: dict[PeerId, float] = field(default_factory=dict)


class Downloads:
    """One at a time. ``silence_s``: a donor that sends nothing for so long is not waited for."""

    def __init__(self, send: SendFrame, silence_s: float) -> None:
        self._send, self._silence_s = send, silence_s
        self._changed = threading.Condition()
        self._attempt: _Attempt | None = None

    # ------------------------------------------------------------------ the training thread

    def fetch(
        self,
        donors: Sequence[PeerId],
        read: Reader,
        timeout_s: float,
        should_abort: Callable[[], bool],
        known: tuple[Head, bytes] | None = None,
    ) -> tuple[Description, Tensor] | None:
        """The newest state that ``donors`` have, from all that have it, verified; None if nobody has any to give.

        Args:
            read: checks a description against this peer's model; raises StateError.
            known: head and digest of a state that is not fetched again: it comes back without its bytes.

        Raises:
            StateError: what was offered does not fit, or did not arrive whole.
        """
        deadline = time.monotonic() + timeout_s
        attempt = _Attempt(secrets.token_bytes(16), set(donors), set(donors))
        with self._changed:
            self._attempt = attempt
            attempt.moved_at = dict.fromkeys(donors, time.monotonic())
        try:
            chosen = self._choose(attempt, read, deadline, should_abort)
            if chosen is None:
                return None
            if (chosen.head, chosen.digest) == known:
                return chosen, torch.empty(0, dtype=torch.uint8)
            description, memory = chosen, torch.zeros(chosen.size, dtype=torch.uint8)
            if not self._gather(attempt, description, memory, deadline, should_abort):
                raise StateError("the peers that sent their state went on, or left, before it was here.")
        finally:
            with self._changed:
                self._attempt = None
            self._release(attempt, attempt.keeping)
        if not verify(description, memory):
            raise StateError("the state that peers sent is not the one that they described.")
        return description, memory

    def _choose(
        self, attempt: _Attempt, read: Reader, deadline: float, should_abort: Callable[[], bool]
    ) -> Description | None:
        """Wait for descriptions; the one that most donors have. Afterwards only they are donors."""
        since: float | None = None
        asked = -math.inf
        deadline = min(deadline, time.monotonic() + DESCRIPTION_S)
        with self._changed:
            while attempt.donors - set(attempt.described):
                now = time.monotonic()
                if attempt.described and since is None:
                    since = now
                if now >= deadline or should_abort() or (since is not None and now - since > PATIENCE_S):
                    break
                if now - asked > ASK_AGAIN_S:  # a question may be lost with a connection that is made again
                    asked = now
                    for donor in sorted(attempt.donors - set(attempt.described)):
                        self._ask(donor, attempt, WantsDescription())
                self._changed.wait(min(POLL_S, PATIENCE_S / 2))
            described = {donor: data for donor, data in attempt.described.items() if donor in attempt.donors}
        if not described or should_abort():
            return None
        read_by_donor: dict[PeerId, Description] = {}
        problem: StateError | None = None
        for donor, data in described.items():
            try:
                read_by_donor[donor] = read(data)
            except StateError as error:
                problem = error
                log.warning("peer %s: %s", donor, error)
        if not read_by_donor:
            assert problem is not None
            raise problem
        votes = Counter(one.digest for one in read_by_donor.values())
        best = max(read_by_donor.values(), key=lambda one: (one.head.samples, votes[one.digest], one.digest))
        with self._changed:
            attempt.donors &= {donor for donor, one in read_by_donor.items() if one.digest == best.digest}
        self._release(attempt, attempt.keeping - attempt.donors)
        return best

    def _release(self, attempt: _Attempt, donors: set[PeerId]) -> None:
        """These need not keep a copy any more."""
        for donor in sorted(donors):
            self._ask(donor, attempt, Done())
        attempt.keeping -= donors

    def _gather(
        self,
        attempt: _Attempt,
        description: Description,
        memory: Tensor,
        deadline: float,
        should_abort: Callable[[], bool],
    ) -> bool:
        """Ask for ranges until all are here."""
        with self._changed:
            attempt.memory = memory
            attempt.missing = list(range(questions.ranges(description.size)))
            attempt.expected = {donor: set() for donor in attempt.donors}
            attempt.moved_at = dict.fromkeys(attempt.donors, time.monotonic())
            total = len(attempt.missing)
            while len(attempt.done) < total:
                now = time.monotonic()
                for donor in sorted(attempt.donors):
                    if attempt.expected[donor] and now - attempt.moved_at[donor] > self._silence_s:
                        self._drop(attempt, donor)
                if not attempt.donors or now >= deadline or should_abort():
                    return False
                for donor in sorted(attempt.donors, key=lambda one: (len(attempt.expected[one]), one)):
                    while attempt.missing and len(attempt.expected[donor]) < WINDOW:
                        number = attempt.missing.pop(0)
                        if not attempt.expected[donor]:
                            attempt.moved_at[donor] = now
                        attempt.expected[donor].add(number)
                        self._ask(donor, attempt, WantsRange(description.digest, number))
                self._changed.wait(POLL_S)
        return True

    def _ask(self, donor: PeerId, attempt: _Attempt, question: Question) -> None:
        data = questions.write(question)
        self._send(donor, Header(kind=Kind.REQUEST, round=attempt.number, length=len(data)), (data,))

    @staticmethod
    def _drop(attempt: _Attempt, donor: PeerId) -> None:
        attempt.donors.discard(donor)
        attempt.keeping.discard(donor)
        attempt.missing += sorted(attempt.expected.pop(donor, set()))

    @property
    def share(self) -> float:
        """How much is here of the state that is being fetched, from 0 to 1."""
        attempt = self._attempt
        if attempt is None or attempt.memory is None:
            return 0.0
        return len(attempt.done) / max(1, questions.ranges(attempt.memory.numel()))

    # ------------------------------------------------------------------ the connections' threads

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        """Where an answer goes; None if it is not waited for."""
        with self._changed:
            attempt = self._attempt
            if attempt is None or header.round != attempt.number or peer not in attempt.donors:
                return None
            if header.chunk == 0:
                if header.length > MAX_DESCRIPTION_BYTES:
                    raise WireError(f"a description of {header.length} bytes; at most {MAX_DESCRIPTION_BYTES} are read")
                return memoryview(bytearray(header.length))
            if attempt.memory is None or header.chunk - 1 not in attempt.expected.get(peer, ()):
                return None
            place = questions.span(header.chunk - 1, attempt.memory.numel())
            if header.length != place.stop - place.start:
                raise WireError(f"{header.length} bytes of a state, {place.stop - place.start} were asked for")
            return memory_of(attempt.memory[place])

    def moved(self, peer: PeerId, header: Header) -> None:
        """Some of it has arrived."""
        attempt = self._attempt
        if attempt is not None and header.round == attempt.number:
            attempt.moved_at[peer] = time.monotonic()

    def arrived(self, peer: PeerId, header: Header, payload: memoryview) -> None:
        """All of it is where :meth:`room` said."""
        with self._changed:
            attempt = self._attempt
            if attempt is None or header.round != attempt.number:
                return
            if header.chunk:
                attempt.expected.get(peer, set()).discard(header.chunk - 1)
                attempt.done.add(header.chunk - 1)
            elif len(payload):
                attempt.described[peer] = payload
            else:
                self._drop(attempt, peer)
            self._changed.notify_all()

    def lost(self, peer: PeerId) -> None:
        with self._changed:
            if self._attempt is not None and peer in self._attempt.donors:
                self._drop(self._attempt, peer)
                self._changed.notify_all()
