"""The taking side: asks donors for a description, then fetches each range from whoever has the very same one.

One donor is asked first, since to copy its state costs it time; while that is not enough, others follow: also those
that are known by then, since who was known first may be dead, or frozen. The training thread runs it, and checks each
range as it comes; frames come in the connections' threads, which ask for the next ones.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import secrets
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.host import host_bytes
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId
from lightning_hivemind.engine.native.state import questions
from lightning_hivemind.engine.native.state.attempt import Attempt, Donors
from lightning_hivemind.engine.native.state.donor import SendFrame
from lightning_hivemind.engine.native.state.questions import Done, Question, WantsDescription, WantsRange
from lightning_hivemind.engine.native.state.ranges import RANGE_BYTES, RangePace, digest_of
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.state.snapshot import MAX_DESCRIPTION_BYTES, Description
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.errors import StateError, WireError

log = logging.getLogger("lightning_hivemind")

#: ranges that one donor is asked for at a time: enough that its line never idles. At first, and one more for each that
#: came so soon: where one takes milliseconds, threads that wait for a processor take longer
WINDOW, MOST_AT_ONCE, SOON_S = 3, 8, 0.1
#: ranges that have come and wait to be checked, each in memory of its own
MOST_UNCHECKED = 4 * WINDOW
POLL_S = 0.1
#: donors of one download, but for more in the place of those that do not answer
MOST_DONORS = 4
#: another donor is asked when those before have not sent everything after so long, and will take so much longer: what
#: it costs that one is to be worth it
STAGGER_S, WORTH_S = 1.0, 1.0
#: that a copy of a state and its digest may take, or a helper to fetch it
DESCRIPTION_S = 300.0
#: once there is a description that is not enough, how much longer the other donors' are waited for
PATIENCE_S = 0.3
#: a question, or its answer, may be lost with a connection that breaks
ASK_AGAIN_S = 15.0

Reader = Callable[[memoryview], Description]


class Downloads:
    """One at a time.

    Args:
        silence_s: a donor that sends nothing for so long is not waited for.
        memory: for states.
    """

    def __init__(self, send: SendFrame, silence_s: float, memory: StateMemory) -> None:
        self._send, self._silence_s = send, silence_s
        self._changed = threading.Condition()
        self._attempt: Attempt | None = None
        self._memory = Memory(kept_bytes=MOST_UNCHECKED * RANGE_BYTES)
        self.memory = memory
        #: how often the swarm, or all who had it, have gone on from a state while it was being fetched
        self.overtaken = 0

    # ------------------------------------------------------------------ the training thread

    def fetch(
        self,
        donors: Donors,
        read: Reader,
        timeout_s: float,
        should_abort: Callable[[], bool],
        *,
        enough: Callable[[Head], bool],
        known: tuple[Head, bytes] | None = None,
    ) -> tuple[Description, Tensor] | None:
        """A state that a donor has, from all that have the same bytes, checked; None if nobody has any.

        Args:
            donors: whom to ask.
            read: checks a description against this peer's model; raises StateError.
            enough: whether a state of this head would do now. Where none would, the one of most samples is fetched. If
                the one that is being fetched would not do any more, this begins anew.
            known: head and digest of a state that is not fetched again: it comes back without its bytes.

        Raises:
            StateError: what was offered does not fit, or did not arrive whole.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            attempt = Attempt(secrets.token_bytes(16), donors)
            with self._changed:
                self._attempt = attempt
            try:
                chosen = self._choose(attempt, read, deadline, should_abort, enough)
                if chosen is None:
                    return None
                if (chosen.head, chosen.digest) == known:
                    return chosen, host_bytes(0)
                memory = self._gather(attempt, chosen, read, deadline, should_abort, enough)
                if memory is not None:
                    return chosen, memory
            finally:
                with self._changed:
                    self._attempt = None
                self._release(attempt)
            self.overtaken += 1
            log.info("the swarm has gone on from the state that was being fetched: asking for a newer one")

    def _choose(
        self,
        attempt: Attempt,
        read: Reader,
        deadline: float,
        should_abort: Callable[[], bool],
        enough: Callable[[Head], bool],
    ) -> Description | None:
        """Ask, and wait for a description that is enough; if none comes, the best."""
        since: float | None = None
        deadline = min(deadline, time.monotonic() + DESCRIPTION_S)
        while True:
            now = time.monotonic()
            self._ask_around(attempt, now, hurries=since is not None)
            self._read(attempt, read)
            with self._changed:
                offers = list(attempt.offers.values())
            best = max(offers, key=lambda one: (enough(one.head), one.head.samples), default=None)
            if should_abort():
                return None
            if best is not None and enough(best.head):
                attempt.is_enough = True
                return best
            if best is not None and since is None:
                since = now
                continue  # the others are asked at once
            waiting = attempt.asked or attempt.spare
            if not waiting or now >= deadline or (since is not None and now - since > PATIENCE_S):
                break
            self._wait(attempt, min(POLL_S, deadline - now))
        if best is None and attempt.problem is not None:
            raise attempt.problem
        return best

    def _gather(
        self,
        attempt: Attempt,
        chosen: Description,
        read: Reader,
        deadline: float,
        should_abort: Callable[[], bool],
        enough: Callable[[Head], bool],
    ) -> Tensor | None:
        """Fetch all ranges; None if it is not worth it any more.

        Raises:
            StateError: they do not come.
        """
        memory, stuck, pace = self.memory.take(chosen.size), math.inf, RangePace(time.monotonic())
        with self._changed:
            attempt.chosen = chosen
            # from the end, where those lie that only this donor has
            attempt.missing = list(reversed(range(len(chosen.ranges))))
            attempt.left = len(attempt.missing)
        while True:
            now = time.monotonic()
            self._read(attempt, read)
            self._check(attempt, chosen, memory)
            with self._changed:
                heads = [one.head for one in attempt.offers.values()]
            if enough(chosen.head):
                attempt.is_enough = True
            elif attempt.is_enough or any(map(enough, heads)):
                return None  # the swarm has gone on from it, or somebody has one from which it has not
            if not attempt.left:
                return memory
            comes = self._ask_for_ranges(attempt, chosen, now)
            stuck = math.inf if comes else min(stuck, now)  # who had what is missing has gone, but others may have it
            hopeless = now - stuck > self._silence_s or not (comes or attempt.asked or attempt.spare)
            if hopeless or now >= deadline or should_abort():
                self.overtaken += hopeless
                gone = "the peers that sent their state went on, or left, before it was here."
                raise attempt.problem or StateError(gone)
            here = len(chosen.ranges) - attempt.left
            if attempt.missing and (not comes or pace.range_s(here, now) * len(attempt.missing) > WORTH_S):
                self._ask_around(attempt, now, hurries=not comes)
            self._wait(attempt, POLL_S)

    def _ask_around(self, attempt: Attempt, now: float, *, hurries: bool = False) -> None:
        """Ask for descriptions: those that were not asked, one after another, and those that do not answer, again."""
        with self._changed:
            more = _how_many_more(attempt, now, hurries)
            if attempt.asked:  # else who has something by now would wait for those that say nothing
                attempt.forget_empty(now - STAGGER_S)
        asks = attempt.spare[:more] if more else []
        with self._changed:
            attempt.met.update(asks)
            attempt.asked_at = now if asks else attempt.asked_at
            asks += [donor for donor, at in attempt.asked.items() if now - at > ASK_AGAIN_S]
            attempt.asked.update(dict.fromkeys(asks, now))
        for donor in asks:
            self._ask(donor, attempt, WantsDescription())

    def _read(self, attempt: Attempt, read: Reader) -> None:
        """The descriptions that have come."""
        with self._changed:
            attempt.news, described = False, list(attempt.described.items())
            attempt.described.clear()
        for donor, data in described:
            try:
                offer = read(data)
            except StateError as error:
                log.warning("peer %s: %s", donor, error)
                with self._changed:
                    attempt.problem = error
                    attempt.asked.pop(donor, None)
                self._ask(donor, attempt, Done())
                continue
            with self._changed:
                if attempt.asked.pop(donor, None) is not None:  # else it has gone meanwhile
                    attempt.offers[donor] = offer
                    attempt.answers += 1

    def _ask_for_ranges(self, attempt: Attempt, chosen: Description, now: float) -> bool:
        """Ask whoever has them; False if ranges are missing and nobody has any of them."""
        asks: list[tuple[PeerId, Question]] = []
        with self._changed:
            if self._attempt is not attempt:
                return False
            for donor in [one for one, expected in attempt.expected.items() if expected]:
                if now - attempt.moved_at[donor] > self._silence_s:
                    attempt.drop(donor)
                    asks.append((donor, Done()))
            for donor, offer in sorted(attempt.offers.items(), key=lambda one: len(attempt.expected.get(one[0], ()))):
                if donor not in attempt.expected and not _have_some_in_common(offer, chosen):
                    attempt.drop(donor)
                    asks.append((donor, Done()))
                    continue
                expected = attempt.expected.setdefault(donor, {})
                if not expected:
                    attempt.moved_at[donor] = attempt.came_at[donor] = now
                elif now - attempt.came_at[donor] > ASK_AGAIN_S:
                    # with a connection that was made again; what its donor is still sending is not sent twice
                    attempt.came_at[donor] = now
                    asks += [(donor, WantsRange(offer.key, number)) for number in sorted(expected)]
                has = (number for number in attempt.missing if offer.ranges[number] == chosen.ranges[number])
                at_once = attempt.window.get(donor, WINDOW) if len(attempt.unchecked) < MOST_UNCHECKED else 0
                for number in list(itertools.islice(has, max(0, at_once - len(expected)))):
                    expected[number] = now
                    attempt.missing.remove(number)
                    asks.append((donor, WantsRange(offer.key, number)))
            for donor, question in asks:
                self._ask(donor, attempt, question)
            return not attempt.missing or any(attempt.expected.values()) or bool(attempt.unchecked)

    def _check(self, attempt: Attempt, chosen: Description, memory: Tensor) -> None:
        """Put the ranges that have come in their place."""
        with self._changed:
            arrived, attempt.unchecked = attempt.unchecked, []
        for peer, number, data in arrived:
            if digest_of(data) == chosen.ranges[number]:
                memory[chosen.spans[number]] = torch.frombuffer(data, dtype=torch.uint8)
                attempt.left -= 1
                continue
            log.warning("peer %s sent a part of a state that is not what it described: others are asked for it", peer)
            with self._changed:
                attempt.problem = StateError("the state that peers sent is not the one that they described.")
                attempt.missing.append(number)
                attempt.drop(peer)
            self._ask(peer, attempt, Done())

    def _wait(self, attempt: Attempt, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: attempt.news, timeout_s)

    def _release(self, attempt: Attempt) -> None:
        """They need not keep a copy any more."""
        for donor in sorted({*attempt.asked, *attempt.offers}):
            self._ask(donor, attempt, Done())

    def _ask(self, donor: PeerId, attempt: Attempt, question: Question) -> None:
        data = questions.write(question)
        self._send(donor, Header(kind=Kind.REQUEST, round=attempt.number, length=len(data)), (data,))

    @property
    def share(self) -> float:
        """How much is here of the state that is being fetched, from 0 to 1."""
        attempt = self._attempt
        if attempt is None or attempt.chosen is None:
            return 0.0
        return 1 - attempt.left / max(1, len(attempt.chosen.ranges))

    # ------------------------------------------------------------------ the connections' threads

    def room(self, peer: PeerId, header: Header) -> memoryview | None:
        """Where an answer goes; None if it is not waited for."""
        with self._changed:
            attempt = self._attempt
            if attempt is None or header.round != attempt.number:
                return None
            if header.chunk == 0:
                if peer not in attempt.asked and peer not in attempt.offers:
                    return None
                if header.length > MAX_DESCRIPTION_BYTES:
                    raise WireError(f"a description of {header.length} bytes; at most {MAX_DESCRIPTION_BYTES} are read")
                return memoryview(bytearray(header.length))
            number = header.chunk - 1
            if attempt.chosen is None or number not in attempt.expected.get(peer, ()):
                return None
            place = attempt.chosen.spans[number]
            if header.length != place.stop - place.start:
                raise WireError(f"{header.length} bytes of a state, {place.stop - place.start} were asked for")
            # not in its place: a donor that was given up may still be writing when another one has sent the range
            return memory_of(self._memory.bytes(header.length))

    def moved(self, peer: PeerId, header: Header) -> None:
        """Something is arriving, be it a chunk of a round: its line is busy, and it is not silent."""
        attempt = self._attempt
        if attempt is not None:
            attempt.moved_at[peer] = now = time.monotonic()
            if header.round == attempt.number:
                attempt.came_at[peer] = now

    def arrived(self, peer: PeerId, header: Header, payload: memoryview) -> None:
        """All of it is where :meth:`room` said."""
        with self._changed:
            attempt = self._attempt
            if attempt is None or header.round != attempt.number:
                return
            if header.chunk:
                number, expected = header.chunk - 1, attempt.expected.get(peer, {})
                if number in expected:  # else it has been asked of another one meanwhile
                    if time.monotonic() - expected.pop(number) < SOON_S:
                        attempt.window[peer] = min(MOST_AT_ONCE, attempt.window.get(peer, WINDOW) + 1)
                    attempt.unchecked.append((peer, number, payload))
            elif not len(payload):
                attempt.drop(peer)
                attempt.empty[peer] = time.monotonic()
            elif peer in attempt.asked:
                attempt.described[peer] = payload
            attempt.news, chosen = True, attempt.chosen
            self._changed.notify_all()
        if chosen is not None:
            self._ask_for_ranges(attempt, chosen, time.monotonic())  # its line must not idle until somebody has looked

    def lost(self, peer: PeerId) -> None:
        with self._changed:
            if self._attempt is not None:
                self._attempt.drop(peer)
                self._changed.notify_all()


def _how_many_more(attempt: Attempt, now: float, hurries: bool) -> int:
    """Donors to ask now: one, if those before take long; in a hurry, as many as there may be.

    (Those that have described something else than what is being fetched have made a copy, too.)
    """
    if len(attempt.offers) >= MOST_DONORS or (attempt.chosen and attempt.answers >= MOST_DONORS and not hurries):
        return 0
    at_work = len(attempt.asked) + len(attempt.offers)
    one = not at_work or now - attempt.asked_at >= STAGGER_S
    return max(int(one), MOST_DONORS - at_work if hurries else 0)


def _have_some_in_common(one: Description, other: Description) -> bool:
    return one.spans == other.spans and any(map(operator.eq, one.ranges, other.ranges))
