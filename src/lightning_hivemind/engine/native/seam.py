"""What passes between the driver, which averages, and the side that computes gradients and makes steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Offer


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What the training side brings to a round: an offer, and the values, which stay as they are until it ends."""

    offer: Offer
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class Parcel:
    """A gradient that one peer hands to another one: ``values`` float32 CPU (elements,), of ``samples``.

    ``epoch``: of the parameters with which the oldest of it was computed; ``until``: the last one from which a step
    with it may lead on, as the ``max_staleness`` of that peer says.
    """

    values: Tensor
    samples: int
    epoch: int
    until: int


class Outcome(Enum):
    """What became of a parcel."""

    TAKEN = "the other peer gives it to a round"
    BACK = "it is this peer's own again"
    TOO_OLD = "no peer can use it"
    LOST = "the other peer was lost, perhaps with it"


class Training(Protocol):
    """The side that computes gradients and applies averages; called from the driver's thread, must return quickly."""

    @property
    def samples(self) -> int:
        """That this peer has for the next commit."""

    def called(self, now: float) -> float:
        """A round calls: :meth:`ready_at`."""

    def ready_at(self, now: float) -> float:
        """When to join a round that calls: ``now``, or a little later, when a batch will be finished."""

    def give(self) -> Given:
        """Fix what this peer contributes now."""

    def returned(self, reason: str, *, begun: bool) -> None:
        """The round came to nothing: what was given last is this peer's own again. ``begun``: it had a plan."""

    def committed(
        self, commit: Commit, average: Tensor | None, left_out: Tensor | None, *, coming: bool = False
    ) -> None:
        """A step is decided. ``average`` is float32 CPU (elements,), nobody else's any more, or None: a state is to be
        fetched, unless it is still ``coming``.

        ``left_out``: see :meth:`.Exchange.left_out`.
        """

    def arrived(self, round_id: bytes, average: Tensor | None) -> None:
        """The average of a step that was decided without it; None: it does not come, and a state is to be fetched."""

    def refused(self) -> None:
        """What was given last cannot be used, as a member found: it is in no step, and must not be given again."""

    def failed(self, reason: str) -> None:
        """An error in the driver, and perhaps a step with it: as :meth:`returned`, and a state is to be fetched."""

    def behind(self, head: Head, commits: tuple[Commit, ...]) -> None:
        """This peer follows the others to ``head``, by ``commits`` if they are known; its state is still to come."""

    #: hand what there is to another peer, between rounds, instead of giving it to them; set by the driver
    hands_over: bool

    @property
    def carries(self) -> bool:
        """Whether this peer gives to rounds now, and can give others' gradients with its own."""

    @property
    def can_hand_over(self) -> bool:
        """Whether this peer's gradients can go that way now; else they go by rounds."""

    def hand_over(self, takes_s: float) -> Parcel | None:
        """Fix what this peer hands to another one, with :attr:`hands_over`, in so many seconds; one at a time."""

    def hands_over_in(self, after_s: float, takes_s: float) -> None:
        """This peer's line will be free so much later, and takes so long for what is handed over then."""

    def handed_over(self, to: PeerId, parcel: Parcel, outcome: Outcome, duration_s: float) -> None:
        """What became of it."""

    def carry(self, of: PeerId, parcel: Parcel) -> bool:
        """Give another peer's gradient with this one's; False if that cannot be (any more)."""

    def too_old(self, until: int) -> bool:
        """Whether no step can have any more what may be in steps ``until`` that epoch."""

    def adopted(self, head: Head) -> None:
        """This peer stands at ``head``, with the state that it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What the training side may want to know, as of a moment ago.

    Attributes:
        head: where the protocol is; None before the first adoption.
        samples: of this peer, for the next commit; and those of the whole swarm.
        due: whether the swarm has the samples for a round.
        living: the other peers that can be reached, as far as is known.
        clients: those of them that accept no connections.
        cut: more peers, that live and cannot be reached.
        cuts: see :class:`.roster.Place`.
        members: of the round that this peer is in, once that is planned.
    """

    head: Head | None = None
    due: bool = False
    samples: int = 0
    swarm_samples: int = 0
    living: tuple[PeerId, ...] = ()
    clients: frozenset[PeerId] = frozenset()
    cut: tuple[PeerId, ...] = ()
    cuts: int = 0
    members: frozenset[PeerId] = frozenset()

    @classmethod
    def of(cls, peer: Peer, members: frozenset[PeerId]) -> Status:
        return cls(
            head=peer.head,
            due=peer.due,
            samples=peer.samples,
            swarm_samples=peer.swarm_samples,
            living=peer.living,
            clients=peer.clients,
            cut=peer.cut,
            cuts=peer.cuts,
            members=members,
        )
