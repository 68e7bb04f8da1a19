"""What the protocol wants done. The driver carries it out, in this order, and reports back where it says so."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head, PeerId
from lightning_hivemind.engine.native.protocol.messages import Ended, Message, RoundId
from lightning_hivemind.engine.native.protocol.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message. It need not arrive."""

    to: PeerId
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """A round waits for this peer. Answer with :meth:`.peer.Peer.join`, at once or when a batch is finished."""

    round: RoundId
    coordinator: PeerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """This peer is in a round with this plan, or a newer version of it: what older versions brought may be void."""

    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class SendInput:
    """Send this peer's contribution to a chunk to its owner, encoded; to itself: store it.

    The owner's driver reports :meth:`.peer.Peer.input_arrived`.
    """

    round: RoundId
    chunk: int
    to: PeerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduce:
    """Average a chunk over these contributions, in this order, and encode it once.

    The driver reports :meth:`.peer.Peer.reduced`, or :meth:`.peer.Peer.refuse` for an input that cannot be used. Inputs
    stay: a newer version of the plan may need them again.
    """

    round: RoundId
    version: int
    chunk: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendResult:
    """Send a reduced chunk to these members; to itself: take it.

    The receiver's driver reports :meth:`.peer.Peer.result_arrived`.
    """

    round: RoundId
    version: int
    chunk: int
    to: tuple[PeerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """The round is committed: the head is ``commit.head`` now.

    Attributes:
        complete: this peer has all the bytes.
        coming: those that it lacks are on their way: :class:`Arrived` follows. If neither, a state must be fetched.
        mine: the contribution of this peer that is in it, if it is.
    """

    commit: Commit
    complete: bool
    coming: bool
    mine: Contribution | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """All bytes of a round that was committed before they were here; or not, and the rest will not come."""

    round: RoundId
    complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TellGone:
    """``to`` asks for results of a round that was committed: send :attr:`ended`, unless they are still on their way."""

    to: PeerId
    ended: Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """The round is over for this peer, and nothing of it is used: what it offered is its own again."""

    round: RoundId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CatchUp:
    """Others are ahead of this peer (or of a lineage that outweighs its own): get there, then call ``adopt``.

    ``commits`` lead from this peer's head to ``head``, if they are known: then their bytes are enough.
    """

    head: Head
    commits: tuple[Commit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something that a user may want to know; changes nothing."""

    what: str
    peer: PeerId | None = None
    round: RoundId | None = None


Action = Send | Called | Begun | SendInput | Reduce | SendResult | Apply | Arrived | TellGone | GiveUp | CatchUp | Note
