"""Who gives, who reduces which chunk, who gets the results; and how that changes when somebody is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hivemind.engine.native.protocol.lineage import Contribution, Head, PeerId, can_be_summed

#: of a plan, one for each peer that was lost or refused; more than that is no plan, nor can it be said in a frame
MOST_VERSIONS = 1 << 31
#: of a bandwidth: who says that it has less has none
NOTHING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a member brings to a round.

    Attributes:
        contribution: None if it has nothing to give.
        reduces: whether it can be given chunks to reduce: others can reach it.
        bandwidth: that it can send with, for its share of the chunks; any unit, if all use the same.
        cut: to whom it has no connection, dead or alive.
        slow_to: to whom it sends much more slowly than to others.
        trails: it will be late with the results, or to say that it has them: the round need not wait for that.
        stop: it wants the run to end; last: its own ends with this step.
    """

    contribution: Contribution | None
    reduces: bool = True
    bandwidth: float = 1.0
    cut: tuple[PeerId, ...] = ()
    slow_to: tuple[PeerId, ...] = ()
    trails: bool = False
    stop: bool = False
    last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Identical at all members: it travels whole.

    Attributes:
        round: id of the round; parent: the head that its commit will extend.
        version: counts changes. A result counts if it was reduced in version ``since[chunk]`` or later.
        members: everybody who gets the results, sorted; trailing: those of them who may have them after the commit, and
            perhaps have not joined yet; slow: those for whose gradients all others would have to wait, or do.
        contributions: what is summed, in this order; of members.
        reducers: those who can be given chunks, with their share of them.
        owners: for each chunk, who reduces it.
        since: for each chunk, the version in which its contributions or its owner changed last.
        stop: a member wants the run to end; last: some end with this step, and send no results after it.
    """

    round: bytes
    parent: Head
    coordinator: PeerId
    version: int
    members: tuple[PeerId, ...]
    contributions: tuple[Contribution, ...]
    reducers: tuple[tuple[PeerId, float], ...]
    owners: tuple[PeerId, ...]
    since: tuple[int, ...]
    trailing: tuple[PeerId, ...] = ()
    slow: tuple[PeerId, ...] = ()
    stop: bool = False
    last: bool = False

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        return tuple(one.peer for one in self.contributions)

    def wants(self, chunk: int, version: int, owner: PeerId) -> bool:
        """Whether a result is one of this plan: of the chunk's owner, with the contributions that it names now."""
        known = 0 <= chunk < len(self.owners) and version <= self.version
        return known and self.owners[chunk] == owner and version >= self.since[chunk]

    def names(self, peer: PeerId, offer: Offer | None) -> bool:
        """Whether ``peer`` is a member with what it offered. (Not so if an earlier life of it did.)"""
        given = next((one for one in self.contributions if one.peer == peer), None)
        return offer is not None and peer in self.members and given in (None, offer.contribution)

    def fits(self, chunks: int, sender: PeerId) -> bool:
        """Whether it can be a plan for a vector of so many chunks, and ``sender`` the one that makes it."""
        sound = len(self.owners) == len(self.since) == chunks and {*self.owners} <= {*self.members}
        sound &= self.version <= MOST_VERSIONS and all(since <= self.version for since in self.since)
        sound &= can_be_summed(self.contributions) and {*self.contributors} <= {*self.members}
        return sound and self.coordinator == sender

    def chunks_of(self, owner: PeerId) -> list[int]:
        return [chunk for chunk, one in enumerate(self.owners) if one == owner]

    def by_turns(self, sender: PeerId) -> list[int]:
        """All chunks, in the order in which ``sender`` sends its inputs: spread over all owners, from the next one on.

        So every owner hears of every sender at once, and no owner of all senders first.
        """
        sizes, seen = Counter(self.owners), Counter[PeerId]()
        turns = []
        for chunk, owner in enumerate(self.owners):
            turns.append((seen[owner] / sizes[owner], owner <= sender, owner, chunk))
            seen[owner] += 1
        return [chunk for *_, chunk in sorted(turns)]

    def without(self, lost: frozenset[PeerId], refused: frozenset[PeerId] = frozenset()) -> Plan:
        """The next version: ``lost`` peers give, reduce and get nothing more, ``refused`` ones give nothing.

        Contributions that are taken out leave every chunk, so all of them are reduced anew. Chunks of lost owners go to
        the reducers that are left; if none is left, the coordinator (whom everybody reaches) reduces.
        """
        version = self.version + 1
        contributions = tuple(one for one in self.contributions if one.peer not in lost | refused)
        reducers = tuple(one for one in self.reducers if one[0] not in lost)
        orphans = [chunk for chunk, owner in enumerate(self.owners) if owner in lost]
        heirs = share_chunks(len(orphans), reducers or ((self.coordinator, 1.0),))
        owners, since = list(self.owners), list(self.since)
        for chunk, heir in zip(orphans, heirs, strict=True):
            owners[chunk], since[chunk] = heir, version
        if contributions != self.contributions:
            since = [version] * len(since)
        return replace(
            self,
            version=version,
            members=tuple(one for one in self.members if one not in lost),
            contributions=contributions,
            reducers=reducers,
            owners=tuple(owners),
            since=tuple(since),
        )


def make_plan(
    round_id: bytes,
    parent: Head,
    coordinator: PeerId,
    *,
    members: Sequence[PeerId],
    contributions: Sequence[Contribution],
    bandwidths: Mapping[PeerId, float],
    chunks: int,
    trailing: Sequence[PeerId] = (),
    slow: Sequence[PeerId] = (),
    stop: bool,
    last: bool = False,
) -> Plan:
    """The first version. ``bandwidths`` are of those who can reduce; the others only give and get."""
    reducers = tuple(sorted(shares(bandwidths, len(members)).items()))
    return Plan(
        round=round_id,
        parent=parent,
        coordinator=coordinator,
        version=0,
        members=tuple(sorted(members)),
        contributions=tuple(sorted(contributions)),
        reducers=reducers,
        owners=tuple(share_chunks(chunks, reducers or ((coordinator, 1.0),))),
        since=(0,) * chunks,
        trailing=tuple(sorted(trailing)),
        slow=tuple(sorted(slow)),
        stop=stop,
        last=last,
    )


def reducers_of(offers: Mapping[PeerId, Offer]) -> dict[PeerId, float]:
    """Which members can be given chunks, with their bandwidths: those to whom all others have a connection.

    Of these not those that receive slowly, as most others say, or as they have found: all would wait for their inputs.
    """
    without = {one for peer, offer in offers.items() for other in offer.cut if other in offers for one in (peer, other)}
    found = {peer: one.bandwidth for peer, one in offers.items() if one.reduces and peer not in without}
    said = Counter(other for offer in offers.values() for other in offer.slow_to)
    quick = [peer for peer in found if not offers[peer].trails and 2 * said[peer] < max(2, len(offers) - 1)]
    return {peer: found[peer] for peer in quick or found}


def shares(bandwidths: Mapping[PeerId, float], members: int) -> dict[PeerId, float]:
    """Which part of the vector each should reduce so that all have sent what they must at the same time.

    Who reduces the part s of it sends 1 - s to the other owners, and s to each of the other members. A line that is so
    slow that its peer's own values take longer than that is given nothing to reduce.
    """
    if members <= 2 or not any(bandwidths.values()):
        return dict(bandwidths)  # between two, whoever reduces, either sends the vector once
    reducers, time = _quick(bandwidths, members)
    parts = {peer: (time * bandwidth - 1.0) / (members - 2) for peer, bandwidth in reducers.items()}
    return {peer: parts.get(peer, 0.0) for peer in bandwidths}


def slow_lines(bandwidths: Mapping[PeerId, float], reducers: Collection[PeerId]) -> list[PeerId]:
    """Whose own vector takes more than twice as long to send as the round would take the others.

    ``bandwidths`` of all members; those who are among ``reducers`` can be given chunks.
    """
    _, time = _quick({peer: bandwidths[peer] for peer in reducers}, len(bandwidths))
    return [peer for peer, bandwidth in bandwidths.items() if 2 * time * bandwidth < 1.0]


def _quick(bandwidths: Mapping[PeerId, float], members: int) -> tuple[dict[PeerId, float], float]:
    """Those of the reducers that are worth it, and how long all of it takes them, for a vector of length 1."""
    reducers = {peer: bandwidth for peer, bandwidth in bandwidths.items() if bandwidth > NOTHING}
    if not reducers:
        return {}, float("inf")
    if members <= 2:
        return reducers, 1 / max(reducers.values())
    while True:
        time = (members - 2 + len(reducers)) / sum(reducers.values())
        left = {peer: bandwidth for peer, bandwidth in reducers.items() if time * bandwidth > 1.0}
        if len(left) in (0, len(reducers)):
            return reducers, time
        reducers = left


def share_chunks(count: int, reducers: Sequence[tuple[PeerId, float]]) -> list[PeerId]:
    """Owners of ``count`` chunks in order: runs of neighbours, as long as the owner's share."""
    if sum(share for _, share in reducers) <= 0.0:
        reducers = [(peer, 1.0) for peer, _ in reducers]
    total = sum(share for _, share in reducers)
    owners: list[PeerId] = []
    reached = 0.0
    for peer, share in reducers:
        reached += share / total * count
        owners += [peer] * (round(reached) - len(owners))
    return owners + [reducers[-1][0]] * (count - len(owners))
