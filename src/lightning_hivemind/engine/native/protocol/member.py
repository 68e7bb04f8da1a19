"""One peer's part in a round that has a plan: give inputs, reduce the chunks that it owns, gather the results."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence

from lightning_hivemind.engine.native.protocol.actions import Action, Begun, Reduce, Send, SendInput, SendResult
from lightning_hivemind.engine.native.protocol.lineage import PeerId
from lightning_hivemind.engine.native.protocol.messages import Accuse, Coming, Done, Message, Missing
from lightning_hivemind.engine.native.protocol.plan import MOST_VERSIONS, Plan
from lightning_hivemind.engine.native.protocol.settings import Settings


class Member:
    """From the plan to the end of a round. ``emit`` takes what is to be done."""

    def __init__(self, settings: Settings, me: PeerId, plan: Plan, emit: Callable[[Action], None], now: float) -> None:
        self._settings, self._me, self._emit = settings, me, emit
        self.plan = plan
        #: who has given which chunk that this peer owns; kept for newer versions of the plan
        self._inputs: defaultdict[int, set[PeerId]] = defaultdict(set)
        #: version in which each chunk was last given to the driver to reduce, and in which it came back
        self._asked: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        #: version and digest of each result
        self._results: dict[int, tuple[int, bytes]] = {}
        #: the same, and the owner, of versions that are not known here yet
        self._early_results: dict[int, tuple[int, bytes, PeerId]] = {}
        #: when bytes of a peer arrived last, and when an owner said last that its inputs are arriving
        self._heard: dict[PeerId, float] = {}
        self._collecting: dict[PeerId, float] = {}
        #: whom this peer accuses in this version of the plan, and why; said again until there is a newer one
        self._accused: dict[PeerId, tuple[bool, str]] = {}
        self._resend_at = now + settings.resend_s
        self._gives = me in plan.contributors
        self._begin(set(), now)

    # ------------------------------------------------------------------ the plan

    def replan(self, plan: Plan, now: float) -> None:
        """A newer version: who is lost is not waited for any more, and their chunks have new owners."""
        if plan.version <= self.plan.version:
            return
        before = {chunk for chunk, owner in enumerate(self.plan.owners) if owner == plan.owners[chunk]}
        self.plan = plan
        early, self._early_results = self._early_results, {}
        for chunk, result in early.items():
            self.take(chunk, *result)
        self._accused = {peer: one for peer, one in self._accused.items() if one[0] and peer in plan.contributors}
        self._begin(before, now)

    def _begin(self, known: set[int], now: float) -> None:
        """Send inputs to the owners that did not get them, and reduce what can be reduced."""
        self._emit(Begun(plan=self.plan))
        self._heard = dict.fromkeys((*self.plan.members, *self.plan.contributors), now)
        self._collecting = {}
        if self._gives:  # also if refused: what the others decide about its input is not this peer's to judge
            for chunk in self.plan.by_turns(self._me):
                if chunk not in known:
                    self._emit(SendInput(round=self.plan.round, chunk=chunk, to=self.plan.owners[chunk]))
        for chunk in self.plan.chunks_of(self._me):
            self._reduce(chunk)
        self._finish()

    # ------------------------------------------------------------------ what arrives

    def heard(self, peer: PeerId, now: float) -> None:
        """Bytes of ``peer`` are arriving."""
        self._heard[peer] = now

    def heard_at(self, peer: PeerId) -> float:
        """When they did last, or the plan came."""
        return self._heard[peer]

    def collecting(self, owner: PeerId, now: float) -> None:
        """``owner`` has no result yet, but its inputs are arriving."""
        self._collecting[owner] = now

    def input_arrived(self, chunk: int, peer: PeerId) -> None:
        if 0 <= chunk < len(self.plan.owners):
            self._inputs[chunk].add(peer)
            self._reduce(chunk)

    def reduced(self, chunk: int, version: int) -> None:
        """The driver has the average of ``chunk`` as of ``version``."""
        self._reduced[chunk] = max(version, self._reduced.get(chunk, -1))
        if self.plan.owners[chunk] == self._me and version >= self.plan.since[chunk]:
            self._emit(SendResult(round=self.plan.round, version=version, chunk=chunk, to=self.plan.members))

    def result_arrived(self, chunk: int, version: int, digest: bytes, owner: PeerId) -> None:
        if self.take(chunk, version, digest, owner):
            self._finish()

    def take(self, chunk: int, version: int, digest: bytes, owner: PeerId) -> bool:
        """A result counts if the plan's owner reduced it in a version that counts, and if it is newer than the last."""
        if self.plan.version < version <= MOST_VERSIONS and 0 <= chunk < len(self.plan.owners):
            self._early_results[chunk] = version, digest, owner
            return False
        counts = self.plan.wants(chunk, version, owner) and version > self._results.get(chunk, (-1, b""))[0]
        if counts:
            self._results[chunk] = (version, digest)
        return counts

    def asked_again(self, message: Missing, sender: PeerId, now: float) -> None:
        """Send once more what ``sender`` lacks, if it is here to be sent, or say that it will be."""
        coming = False
        for chunk in sorted(set(message.chunks)):
            if not 0 <= chunk < len(self.plan.owners):
                continue
            owner = self.plan.owners[chunk]
            if message.inputs and self._gives and owner == sender:
                self._emit(SendInput(round=self.plan.round, chunk=chunk, to=sender))
            elif not message.inputs and owner == self._me and sender in self.plan.members:
                version = self._reduced.get(chunk, -1)
                if version >= self.plan.since[chunk]:
                    self._emit(SendResult(round=self.plan.round, version=version, chunk=chunk, to=(sender,)))
                else:
                    coming |= self._collects(chunk, now)
        if coming:
            self._emit(Send(to=sender, message=Coming(round=self.plan.round)))

    # ------------------------------------------------------------------ what is done

    def _reduce(self, chunk: int) -> None:
        plan = self.plan
        if plan.owners[chunk] != self._me or self._asked.get(chunk, -1) >= plan.since[chunk]:
            return
        if self._inputs[chunk].issuperset(plan.contributors):
            self._asked[chunk] = plan.version
            self._emit(Reduce(round=plan.round, version=plan.version, chunk=chunk, contributions=plan.contributions))

    @property
    def digest(self) -> bytes | None:
        """Of all results, in order; None while one is missing."""
        if len(self._results) < len(self.plan.since):
            return None  # asked after every result: nothing is hashed before the last one
        state = hashlib.sha256()
        for chunk, since in enumerate(self.plan.since):
            version, digest = self._results.get(chunk, (-1, b""))
            if version < since:
                return None
            state.update(digest)
        return state.digest()[:16]

    def _finish(self) -> None:
        digest = self.digest
        if digest is not None:
            self._tell(Done(round=self.plan.round, version=self.plan.version, digest=digest))

    def _tell(self, message: Message) -> None:
        self._emit(Send(to=self.plan.coordinator, message=message))

    # ------------------------------------------------------------------ what does not arrive

    def tick(self, now: float) -> None:
        """Ask again for what is owed, and accuse who does not deliver."""
        owed = self.owed()
        for peer, (inputs, _) in owed.items():
            # an owner may itself wait for an input: until that one's peer is out, its own silence means nothing
            patience_s = self._settings.stall_s * (1 if inputs else 2)
            heard = self._heard[peer]
            if not inputs:
                heard = max(heard, self._collecting.get(peer, heard))
            if now - heard >= patience_s and peer not in self._accused:
                self.accuse(peer, refused=False, reason=f"silent for {patience_s:.1f} s")
        if now < self._resend_at:
            return
        self._resend_at = now + self._settings.resend_s
        self._finish()
        for peer, (refused, reason) in self._accused.items():
            self.accuse(peer, refused=refused, reason=reason)
        for peer, (inputs, results) in owed.items():
            if now - self._heard[peer] < self._settings.resend_s:
                continue  # it is on its way
            for is_inputs, chunks in ((True, inputs), (False, results)):
                if chunks:
                    self.ask(peer, inputs=is_inputs, chunks=chunks)

    def ask(self, peer: PeerId, *, inputs: bool, chunks: Sequence[int]) -> None:
        """Have ``peer`` send inputs, or results, of these again."""
        missing = Missing(round=self.plan.round, version=self.plan.version, inputs=inputs, chunks=tuple(chunks))
        self._emit(Send(to=peer, message=missing))

    def accuse(self, peer: PeerId, *, refused: bool, reason: str) -> None:
        """Tell the coordinator that ``peer`` does not deliver, or delivers what cannot be used (``refused``)."""
        self._accused[peer] = (refused, reason)
        self._tell(Accuse(round=self.plan.round, version=self.plan.version, peer=peer, refused=refused, reason=reason))

    def owed(self) -> dict[PeerId, tuple[list[int], list[int]]]:
        """Who else owes this peer inputs of which chunks, and results of which."""
        owed: defaultdict[PeerId, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for chunk, since in enumerate(self.plan.since):
            owner = self.plan.owners[chunk]
            if owner == self._me:
                for peer in self._lacks(chunk):
                    owed[peer][0].append(chunk)
            elif self._results.get(chunk, (-1, b""))[0] < since:
                owed[owner][1].append(chunk)
        return dict(owed)

    def _lacks(self, chunk: int) -> list[PeerId]:
        """Whose input of a chunk that this peer reduces is not here."""
        given = self._inputs[chunk]
        return [peer for peer in self.plan.contributors if peer not in given and peer != self._me]

    def _collects(self, chunk: int, now: float) -> bool:
        """Whether the inputs that are not here are on their way, as far as is known."""
        return all(now - self._heard[peer] < self._settings.stall_s for peer in self._lacks(chunk))

    @property
    def deadline(self) -> float:
        """When :meth:`tick` has something to do at the latest."""
        return self._resend_at
