"""What peers say to one another about a round. Data (inputs and results of chunks) travel beside these messages.

Any of them may be lost, repeated, delayed or overtaken; none changes anything twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId
from lightning_hivemind.engine.native.protocol.plan import Offer, Plan

RoundId = bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """To the candidate for coordinator: how far the sender is, and how many samples it knows of in the swarm.

    ``cuts``: as in :class:`.roster.Place`; the candidate should be one that reaches all.
    """

    head: Head
    samples: int
    swarm_samples: int
    cuts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The coordinator asks a peer to come to a round. Repeated until it is answered. ``cuts``: as in Progress."""

    round: RoundId
    head: Head
    cuts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A peer comes. Repeated until the plan arrives."""

    round: RoundId
    offer: Offer


@dataclass(frozen=True, kw_only=True, slots=True)
class Decline:
    """A peer does not come, or leaves: it goes to ``better`` instead, or stands elsewhere, at ``head``."""

    round: RoundId
    better: PeerId | None = None
    head: Head | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The plan of a round, or a newer version of it."""

    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Current:
    """The coordinator to a member that is not done: the version of the plan. Who has another one asks for the plan.

    It stands for the plan itself, which is large where there are many peers.
    """

    round: RoundId
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Send again: inputs of chunks that the sender reduces (``inputs``), or results that it waits for."""

    round: RoundId
    version: int
    inputs: bool
    chunks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coming:
    """Answer to Missing: the result is not there yet, but its inputs are arriving."""

    round: RoundId


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuse:
    """To the coordinator: ``peer`` does not deliver; or what it delivered cannot be used (``refused``)."""

    round: RoundId
    version: int
    peer: PeerId
    refused: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The sender has all results of this version of the plan. Repeated until the round ends."""

    round: RoundId
    version: int
    digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The round succeeded. Only the coordinator decides it; whoever knows may pass it on.

    ``late``: half of the others have waited for the receiver, or would have.
    """

    commit: Commit
    late: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The round is over for the receiver. ``aborted``: for everybody, and it never was nor will be committed."""

    round: RoundId
    reason: str
    aborted: bool
    better: PeerId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """The sender has lost the coordinator: what became of the round? Or, to that one: does it go on?"""

    round: RoundId
    head: Head


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecided:
    """Answer to Ask: the sender saw no commit, has lost the coordinator, too, and from now on takes none from it.

    (The coordinator says so if it has started again, and knows of no such round.)
    """

    round: RoundId


@dataclass(frozen=True, kw_only=True, slots=True)
class StillOn:
    """Answer to Ask: the sender is with the coordinator, and will pass on what becomes of the round."""

    round: RoundId


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """To a peer that is behind: the commits that follow the head that it named, or none if they are forgotten."""

    head: Head
    commits: tuple[Commit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """To a peer that lives, but to which there was no connection: is there one now? ``asks`` for the same in return.

    ``cuts``: as in Progress, without the receiver.
    """

    asks: bool
    cuts: int = 0


Message = (
    Progress
    | Call
    | Join
    | Decline
    | Begin
    | Current
    | Missing
    | Coming
    | Accuse
    | Done
    | Committed
    | Ended
    | Ask
    | Undecided
    | StillOn
    | News
    | Probe
)
