"""One typed stream of what happened in a peer: progress bars, loggers, monitors and tests all read it.

An :class:`EventBus` belongs to one strategy. Emitting is cheap and never raises into training: a subscriber that fails
is reported once and removed. Events are frozen and hold plain values only, so that each is one line of JSON.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import ClassVar

log = logging.getLogger("lightning_hivemind")

LEFT_BEHIND = "they are of a state that this peer leaves for the swarm's"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events. ``time`` is Unix time in seconds on this machine's clock."""

    level: ClassVar[int] = logging.DEBUG
    #: what a user reads, with the fields in braces; empty: the fields as they are
    sentence: ClassVar[str] = ""
    time: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, object]:
        return {"event": type(self).__name__, **asdict(self)}

    def describe(self) -> str:
        if self.sentence:
            return self.sentence.format(**asdict(self))
        values = ", ".join(f"{k}={v}" for k, v in asdict(self).items() if k != "time")
        return f"{type(self).__name__}({values})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStarted(Event):
    """The libp2p daemon and the DHT of this peer are up."""

    level: ClassVar[int] = logging.INFO
    sentence: ClassVar[str] = "this peer is {peer_id}, up after {duration_s:.1f} s"
    peer_id: str
    addresses: list[str]
    run_id: str
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmReady(Event):
    """The engine is up: this peer can contribute from ``epoch`` on. ``num_peers`` counts this peer, too."""

    level: ClassVar[int] = logging.INFO
    sentence: ClassVar[str] = "ready at global step {epoch}; peers in the run: {num_peers}"
    epoch: int
    num_peers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersChanged(Event):
    """The number of peers that are known to be alive changed (this peer included)."""

    level: ClassVar[int] = logging.INFO
    sentence: ClassVar[str] = "peers in the run: {num_peers}"
    num_peers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAccumulated(Event):
    """A micro-batch was computed. Sample counts are for the current epoch.

    Each of its samples is later in one ``EpochCommitted``, ``GradientHandedOver``, ``RoundMissed`` (at once, if it is
    too old to be added to this peer's gradient) or ``BatchDropped``.
    """

    epoch: int
    batch_samples: int
    local_samples: int
    swarm_samples: int
    target_batch_size: int
    num_peers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDropped(Event):
    """A micro-batch did not count: ``reason`` is ``"non-finite gradient"``, ``"overflow"`` (the loss scale), or
    ``"optimizer.step() was not called"`` (by an ``optimizer_step()`` of the module's own)."""

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = "global step {epoch}: {samples} samples dropped: {reason}"
    epoch: int
    samples: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundStarted(Event):
    """This peer entered the averaging round that ends ``epoch`` with ``samples`` of its own.

    With ``engine="native"`` it is said between two batches, and once for all attempts.
    """

    epoch: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCommitted(Event):
    """The optimizer made (or, delayed, was given) its step: ``epoch`` is the number of global steps made so far.

    ``contributors`` are the peers whose gradients are in it, ``samples`` those of this peer, ``duration_s`` the time
    from when this peer gave its gradient to the round until now. ``fraction`` is 1.0. With ``engine="hivemind"`` it is
    the share of the averaged values that really arrived, and ``duration_s`` the time that training waited; while the
    round is still under way (``delay_grad_averaging``, or ``use_local_updates`` with ``delay_state_averaging``)
    ``contributors`` and ``fraction`` are 0.
    """

    sentence: ClassVar[str] = (
        "global step {epoch}: peers {contributors}, samples of this one {samples}, after {duration_s:.2f} s"
    )
    epoch: int
    samples: int
    contributors: int
    fraction: float
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedRoundFinished(Event):
    """What came of the round that ended in ``epoch``, with ``engine="hivemind"`` and ``delay_grad_averaging``.

    See ``EpochCommitted`` for the fields.
    """

    sentence: ClassVar[str] = "global step {epoch}: gradients averaged with {contributors} peers"
    epoch: int
    contributors: int
    fraction: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundIncomplete(Event):
    """An averaging round came to nothing here: nothing was changed, and the next attempt has the same gradients.

    Who is left out of a round gets it, too, while the others make the step. (Not told of an attempt that failed while
    this peer computed a batch, if the next one has succeeded by its end.)

    With ``engine="hivemind"`` it may also have brought part of the values, and ``action`` says what was done about it:
    ``fraction`` is the share that arrived (0.0: none), and ``kind`` is ``"gradients"`` or ``"state"``.
    """

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = (
        "global step {epoch}: averaging {kind} brought {fraction:.1%} ({contributors} of {expected} peers): "
        "{reason}; {action}"
    )
    epoch: int
    kind: str
    reason: str
    fraction: float
    contributors: int
    expected: int
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundMissed(Event):
    """The swarm finished ``epoch`` without ``samples_lost`` of this peer, which are in no step; ``reason`` says why.

    (Of a gradient that was handed to another peer, which did not say any more whether it has it, that is not known.)
    """

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = (
        "the swarm made global step {epoch} without {samples_lost} samples of this peer, which are lost: {reason}"
    )
    epoch: int
    samples_lost: int
    reason: str = LEFT_BEHIND


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLoaded(Event):
    """Parameters, optimizer state and epoch were taken over from another peer."""

    level: ClassVar[int] = logging.INFO
    sentence: ClassVar[str] = "took the swarm's state of global step {epoch} in {duration_s:.1f} s"
    epoch: int
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientHandedOver(Event):
    """With ``engine="native"``: this peer's line is slow; ``peer`` gives the gradient of ``samples`` to the next step.

    It took ``duration_s`` to send it; nobody waited for that.
    """

    sentence: ClassVar[str] = (
        "global step {epoch}: this peer's line is slow; peer {peer} has the gradient of {samples} samples after"
        " {duration_s:.1f} s, and gives it to the next step"
    )
    epoch: int
    peer: str
    samples: int
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCarried(Event):
    """With ``engine="native"``: ``peer``, whose line is slow, has handed the gradient of ``samples`` to this peer.

    It gives them to a step with its own, and they are counted among these from now on.
    """

    sentence: ClassVar[str] = (
        "global step {epoch}: the gradient of {samples} samples of peer {peer}, whose line is slow, goes by this one"
    )
    epoch: int
    peer: str
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsUndone(Event):
    """With ``engine="native"``: the swarm had fallen apart, and this peer takes the state of who made more samples.

    Its global steps ``first`` to ``last`` are undone, and with them ``samples`` of this peer. (Of n thousand steps
    ago every n-th or so is remembered: ``first`` and ``samples`` are as exact as that.)
    """

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = (
        "global steps {first} to {last}, with {samples} samples of this peer, are undone: other peers have made steps"
        " with more samples meanwhile, and this one takes their state, of global step {epoch}"
    )
    epoch: int
    first: int
    last: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateUnavailable(Event):
    """No peer's state could be loaded; ``action`` says what happens now."""

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = "global step {epoch}: the swarm's state could not be loaded: {reason}; {action}"
    epoch: int
    reason: str
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FallingBehind(Event):
    """With ``engine="native"``: of ``states`` states in a row none was of use: averages come more slowly than steps do.

    For ``duration_s`` now the swarm has gone on from each while it came, or this peer has missed one of the next steps.
    It tries again, and contributes nothing as long as that is so.
    """

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = (
        "global step {epoch}: not in step for {duration_s:.0f} s: {states} states of the swarm were of no use, because"
        " averages come more slowly over this peer's line than the swarm makes steps. It contributes nothing;"
        " compression, a larger target_batch_size or local updates need less of a line"
    )
    epoch: int
    states: int
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ParametersDiffered(Event):
    """With ``engine="native"``: at global step ``epoch`` this peer's parameters were not those of ``num_peers`` others.

    It takes their state now. Between peers of unlike hardware or torch that is to be expected (``reason`` says so),
    between like ones it is not.
    """

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = (
        "global step {epoch}: the parameters here are not those of {num_peers} other peers ({reason}); taking theirs"
    )
    epoch: int
    num_peers: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested(Event):
    """A peer asked the whole run to stop; every peer stops once it has committed ``epoch``."""

    level: ClassVar[int] = logging.INFO
    sentence: ClassVar[str] = "the run stops at global step {epoch}"
    epoch: int
    by_this_peer: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DhtSilent(Event):
    """With ``engine="hivemind"``: the DHT did not answer in time about ``what``; this peer goes on with what it knows.

    (With ``engine="native"`` peers that are connected need no DHT.)
    """

    level: ClassVar[int] = logging.WARNING
    sentence: ClassVar[str] = "no answer from the DHT about {what} in {duration_s:.1f} s; going on with what is known"
    what: str
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting(Event):
    """Something slow is still going on; said every few seconds, so that a wait is never silent."""

    level: ClassVar[int] = logging.INFO
    sentence: ClassVar[str] = "waiting for {what}: {elapsed_s:.0f} of at most {limit_s:.0f} s"
    what: str
    elapsed_s: float
    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStopped(Event):
    """This peer has left the rounds; its daemon and its DHT process are stopped next."""

    level: ClassVar[int] = logging.INFO
    sentence: ClassVar[str] = "left the swarm at global step {epoch} in {duration_s:.1f} s"
    epoch: int
    duration_s: float


Subscriber = Callable[[Event], None]


class EventBus:
    """Hands every event to every subscriber, in order, from whichever thread emits it."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        self._lock = threading.RLock()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add a subscriber; returns the function that removes it again."""
        with self._lock:
            self._subscribers.append(subscriber)
        return lambda: self._remove(subscriber)

    def emit(self, event: Event) -> None:
        with self._lock:
            for subscriber in tuple(self._subscribers):
                try:
                    subscriber(event)
                except Exception:
                    log.exception("an event subscriber failed and was removed: %r", subscriber)
                    self._remove(subscriber)

    def _remove(self, subscriber: Subscriber) -> None:
        with self._lock:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)
