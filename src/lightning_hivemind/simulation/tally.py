"""What is counted in a run: bytes, messages, rounds and steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hivemind.engine.native.protocol.lineage import Commit, Head
from lightning_hivemind.engine.native.protocol.messages import Begin, Call, Ended, Message, RoundId
from lightning_hivemind.engine.native.protocol.plan import Plan

if TYPE_CHECKING:
    from lightning_hivemind.simulation.paced import PacedPeer


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One global step.

    Attributes:
        at: when it was decided, in seconds.
        messages, message_bytes: that the coordinator sent and received since the step before.
        members: peers in the round at its end; called: peers that were called to it.
        full: all that were called were members to the end.
    """

    at: float
    messages: int
    message_bytes: int
    members: int
    called: int
    full: bool


class Tally:
    """See the module. ``sent`` and ``received`` are bytes by peer, chunks and messages with their headers.

    They are counted from the first step on, which is the warm-up, to the last one.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        #: since the last step
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.aborted: set[RoundId] = set()
        self._messages: Counter[str] = Counter()
        self._message_bytes: Counter[str] = Counter()
        self._called: defaultdict[RoundId, set[str]] = defaultdict(set)
        self._plans: dict[RoundId, Plan] = {}
        self._decided: set[Head] = set()

    def carries(self, sender: str, receiver: str, size_bytes: int, *, data: bool) -> None:
        """So many bytes leave for ``receiver``."""
        self._sent[sender] += size_bytes
        self._received[receiver] += size_bytes
        if not data:
            for peer in (sender, receiver):
                self._messages[peer] += 1
                self._message_bytes[peer] += size_bytes

    def sends(self, peer: PacedPeer, to: str, message: Message) -> None:
        """The protocol of ``peer`` says this: rounds are counted by it."""
        match message:
            case Call(round=round_id):
                self._called[round_id].add(to)
            case Begin(plan=plan):
                self._plans[plan.round] = plan
            case Ended(round=round_id, aborted=True, reason=reason) if round_id not in self.aborted:
                begun = self._plans.get(round_id)
                if begun is not None and begun.coordinator == peer.name:
                    self.aborted.add(round_id)
                    self.reason(reason)
            case _:
                pass

    def reason(self, what: str) -> None:
        """Why a round was given up, or went on without a peer; numbers and names in it do not matter."""
        self.reasons[what.split(" (says ")[0]] += 1

    def decided(self, peer: PacedPeer, commit: Commit) -> None:
        """``peer`` knows that ``commit`` is decided: the first to know is the coordinator."""
        if commit.head in self._decided:
            return
        self._decided.add(commit.head)
        plan, called = self._plans.pop(commit.round, None), self._called.pop(commit.round, set())
        members = set(plan.members) if plan is not None else {peer.name}
        self.steps.append(
            Step(
                at=peer.world.now,
                messages=self._messages[peer.name],
                message_bytes=self._message_bytes[peer.name],
                members=len(members),
                called=len(called | {peer.name}),
                full=called <= members,
            )
        )
        self._messages.clear()
        self._message_bytes.clear()
        if len(self.steps) > 1:
            self.sent.update(self._sent)
            self.received.update(self._received)
        self._sent.clear()
        self._received.clear()
