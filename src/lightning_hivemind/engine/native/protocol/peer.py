"""One peer of a run, as its driver sees it: public methods are events, :meth:`Peer.take` gives what is to be done.

``now`` is any clock in seconds that does not go back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lightning_hivemind.engine.native.protocol.actions import Action, CatchUp, Note, Send
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head, PeerId, can_be_summed, following
from lightning_hivemind.engine.native.protocol.messages import (
    Accuse,
    Ask,
    Begin,
    Call,
    Coming,
    Committed,
    Current,
    Decline,
    Done,
    Ended,
    Join,
    Message,
    Missing,
    News,
    Probe,
    Progress,
    RoundId,
    StillOn,
    Undecided,
)
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.protocol.roster import Place, Roster
from lightning_hivemind.engine.native.protocol.rounds import Rounds
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.protocol.standing import Standing

NO_WAY = "there is no way to it from here, though it lives; rounds go through who reaches both"


class Peer:
    """See the module. ``incarnation`` must be new whenever a peer with this id starts."""

    def __init__(self, settings: Settings, me: PeerId, incarnation: bytes, *, reduces: bool = True) -> None:
        self._settings, self.me = settings, me
        self._roster = Roster(settings, me, reduces)
        self._standing = Standing(self._roster, self._emit)
        self._rounds = Rounds(settings, me, incarnation, self._roster, self._standing, self._emit)
        self._reported: Head | None = None
        self._report_at = 0.0
        #: those out of reach of which the user was told
        self._noted: tuple[PeerId, ...] = ()
        #: where others are ahead, as they say, and when this peer follows whether or not it was told the way
        self._ahead: tuple[PeerId, Head, float] | None = None
        self._last = float("inf")
        self._out: list[Action] = []
        self._to_self: deque[Message] = deque()

    # ------------------------------------------------------------------ what one may ask

    def take(self) -> list[Action]:
        """What is to be done since the last call."""
        actions, self._out = self._out, []
        return actions

    @property
    def head(self) -> Head | None:
        """Where this peer stands; None before the first :meth:`adopt`."""
        return self._standing.head

    @property
    def heads(self) -> tuple[Head, ...]:
        """Where this peer stands, and stood a step before, as far as that is known."""
        return self._standing.heads

    def knows(self, heads: Iterable[Head]) -> bool:
        """Whether this peer's lineage is or was lately at one of these."""
        return any(map(self._standing.knows, heads))

    @property
    def samples(self) -> int:
        """This peer's, for the next commit."""
        return self._roster.samples

    @property
    def swarm_samples(self) -> int:
        """The swarm's, for the next commit, as far as is known."""
        return self._roster.swarm_samples(self.head) if self.head is not None else self.samples

    @property
    def due(self) -> bool:
        """Whether the swarm has the samples for a round, as far as is known."""
        return self.swarm_samples >= self._settings.target_samples

    @property
    def living(self) -> tuple[PeerId, ...]:
        """The other peers that can be reached, as far as is known."""
        return tuple(self._roster.living())

    @property
    def cut(self) -> tuple[PeerId, ...]:
        """Others that live, and cannot be reached from here."""
        return self._roster.cut

    @property
    def cuts(self) -> int:
        """As in :class:`.roster.Place`."""
        return self._roster.cuts

    @property
    def clients(self) -> frozenset[PeerId]:
        """Those of :attr:`living` that accept no connections."""
        return frozenset(peer for peer in self._roster.living() if not self._roster.reduces(peer))

    @property
    def quick(self) -> tuple[PeerId, ...]:
        """Those of :attr:`living` that can be reached by all, and whose lines are not known to be slow."""
        return tuple(self._roster.quick())

    @property
    def standstill_s(self) -> float:
        """After so long without an event the others may have gone on without this peer."""
        return self._settings.detect_s / 2

    @property
    def deadline(self) -> float:
        """When :meth:`tick` must be called at the latest."""
        ahead = self._ahead[2] if self._ahead is not None else float("inf")
        return min(self._report_at, self._last + self._settings.detect_s / 4, self._rounds.deadline, ahead)

    # ------------------------------------------------------------------ what the driver says

    def adopt(self, head: Head, commits: tuple[Commit, ...], now: float) -> None:
        """This peer's state is that of ``head`` now; ``commits`` are the last ones that led there."""
        self._begin(now)
        self._ahead = None
        self._rounds.trailing.clear()
        if head == self.head:  # others are ahead, and their state is out of reach: go on from here
            self._standing.catching_up_to = None
        else:
            self._rounds.leave("this peer has taken another state", now, head=head)
            self._standing.adopt(head, commits)
            self._roster.arrived()
            self._roster.samples = 0  # the driver says how many it has there
            for peer in self._roster.living():  # its record says so seconds later: meanwhile a worse one would lead
                self._emit(Send(to=peer, message=self._roster.progress(head)))
            self._rounds.leadership.elsewhere()
        self._settle(now)

    def give_up(self, head: Head, now: float) -> None:
        """Nobody that lives has the state of where this peer stands: go back to ``head``, and not there again for
        :data:`.standing.WITHOUT_S`, unless somebody says so who was lost until then (or was not there)."""
        if self.head is not None:
            self._standing.give_up(self.head, now)
        self.adopt(head, (), now)

    def saw(self, peer: PeerId, place: Place, now: float) -> None:
        """A peer's record was read."""
        self._begin(now)
        taken = self._roster.record(peer, place, now, outdated=self._standing.outdated(place.head))
        if taken and self._roster.reaches(peer):
            self._standing.same(peer, place.head)
        self._settle(now)

    def lost(self, peer: PeerId, now: float) -> None:
        """There is no connection to ``peer``, and none can be made.

        What it has sent before may still be read, and counts as a sign of life: so this is to be said again whenever
        sending to it fails.
        """
        self._begin(now)
        self._roster.lost(peer, now)
        self._rounds.lost(peer, now)
        self._settle(now)

    def contributed(self, samples: int, now: float) -> None:
        """This peer holds the gradients of so many samples for the next commit."""
        self._begin(now)
        self._roster.samples = samples
        self._report(now)
        self._settle(now)

    def sends_slowly(self, slow: bool) -> None:
        """Whether this peer's line is slow: then another one should lead."""
        self._roster.sends_slowly = slow

    def join(self, round_id: RoundId, offer: Offer, now: float) -> None:
        """The answer to :class:`.actions.Called`: what this peer brings is fixed now."""
        self._begin(now)
        self._rounds.join(round_id, offer)
        self._settle(now)

    def heard(self, round_id: RoundId, peer: PeerId, now: float) -> None:
        """A part of a chunk of ``peer`` has arrived."""
        self._rounds.heard(round_id, peer, now)

    def input_arrived(self, round_id: RoundId, chunk: int, peer: PeerId, now: float) -> None:
        """An input of a chunk that this peer reduces is stored. It may have overtaken the plan."""
        self._begin(now)
        self._rounds.input_arrived(round_id, chunk, peer, now)
        self._settle(now)

    def reduced(self, round_id: RoundId, chunk: int, version: int, now: float) -> None:
        """What :class:`.actions.Reduce` asked for is done."""
        self._begin(now)
        member = self._rounds.member(round_id)
        if member is not None:
            member.reduced(chunk, version)
        self._settle(now)

    def refuse(self, round_id: RoundId, peer: PeerId, reason: str, now: float) -> None:
        """What ``peer`` gave cannot be used (NaN, or it cannot be decoded)."""
        self._begin(now)
        member = self._rounds.member(round_id)
        if member is not None:
            member.accuse(peer, refused=True, reason=reason)
        self._settle(now)

    def result_arrived(
        self, round_id: RoundId, chunk: int, version: int, digest: bytes, owner: PeerId, now: float
    ) -> None:
        """A reduced chunk is here: ``digest`` is of its bytes. It may have overtaken the plan."""
        self._begin(now)
        self._rounds.result_arrived(round_id, chunk, version, digest, owner, now)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time passes."""
        self._begin(now)
        self._rounds.tick(now)
        if self._ahead is not None and now >= self._ahead[2]:
            self._follow_untold(now)
        if now >= self._report_at:
            self._report(now)
        self._settle(now)

    def awake(self, now: float) -> None:
        """Until now this process did not stand still: what took long since the last event was its own work."""
        self._last = now

    def suspended(self, now: float) -> None:
        """This process stood still until now: the others may have gone on without it."""
        self._last = now
        if self._ahead is not None:  # it may have told meanwhile
            self._ahead = *self._ahead[:2], now + self._settings.matchmaking_s
        self._rounds.suspended(now)
        self._settle(now)

    def leave(self, reason: str, now: float) -> None:
        """Get out of any round, and say so: this peer cannot go on in it.

        What was to be done may not have been done, a :class:`.actions.CatchUp` among it: others will say it again.
        """
        self._standing.catching_up_to = None
        self._rounds.leave(reason, now)
        self._rounds.trailing.clear()
        self._settle(now)

    # ------------------------------------------------------------------ what other peers say

    def receive(self, sender: PeerId, message: Message, now: float) -> None:
        """A message of another peer."""
        self._begin(now)
        returned = not self._roster.reaches(sender)
        self._roster.alive(sender)
        if returned and (head := self._roster.head_of(sender)) is not None:
            self._standing.same(sender, head)  # as its record said while it could not be reached
        self._take_in(sender, message, now)
        self._settle(now)

    def _take_in(self, sender: PeerId, message: Message, now: float) -> None:
        rounds, leadership = self._rounds, self._rounds.leadership
        match message:
            case Progress():
                self._note(sender, message.head, message.samples)
                self._roster.cuts_of(sender, message.cuts)
                if self._standing.same(sender, message.head):
                    self._roster.told(message.swarm_samples)
                    leadership.on_progress(sender)
            case Call():
                self._stands(sender, message.head)
                self._roster.cuts_of(sender, message.cuts)
                rounds.on_call(sender, message, now)
            case Join():
                leadership.on_join(sender, message)
            case Decline():
                leadership.on_decline(sender, message, now)
                self._declined(sender, message.head, now)
            case Begin():
                rounds.on_begin(sender, message, now)
            case Current():
                rounds.on_current(sender, message, now)
            case Missing():
                rounds.on_missing(sender, message, now)
            case Coming():
                if (member := rounds.member(message.round)) is not None:
                    member.collecting(sender, now)
            case Accuse():
                if (coordinator := leadership.coordinator(message.round)) is not None:
                    coordinator.accused(sender, message, now)
            case Done():
                leadership.on_done(sender, message, now)
            case Committed():
                rounds.on_committed(sender, message, now)
            case Ended():
                rounds.on_ended(sender, message, now)
            case Ask():
                rounds.on_ask(sender, message)
            case Undecided():
                rounds.on_undecided(sender, message, now)
            case StillOn():
                rounds.on_still_on(sender, message, now)
            case News():
                self._stands(sender, message.head)
                self._on_news(sender, message, now)
            case Probe():
                self._roster.cuts_of(sender, message.cuts)
                if message.asks:
                    self._probe(sender, asks=False)

    def _declined(self, sender: PeerId, head: Head | None, now: float) -> None:
        """By who is ahead, in words, at ``head``. It is asked for the way there, and has so long to tell it."""
        if self._ahead is None and head is not None and self.head is not None and head.outweighs(self.head):
            self._stands(sender, head)
            self._ahead = sender, head, now + self._settings.matchmaking_s

    def _follow_untold(self, now: float) -> None:
        """Who is ahead has not told the way: without, if this peer is not there by now, and that one still is."""
        assert self._ahead is not None
        (sender, head, _), self._ahead = self._ahead, None
        if self._roster.reaches(sender) and self._roster.stands(sender, head):
            self._on_news(sender, News(head=head, commits=()), now)

    def _on_news(self, sender: PeerId, message: News, now: float) -> None:
        head = self.head
        if head is None or self._standing.is_given_up(message.head, sender, now):
            return
        commits = following(head, message.commits)
        if not commits or commits[-1].head != message.head or not all(can_be_summed(c.contributions) for c in commits):
            commits = ()
        if commits and self._standing.catching_up_to is None and self._rounds.in_doubt(commits[0].round):
            self._rounds.commit(commits[0], now)
            head, commits = commits[0].head, commits[1:]
        goal = self._standing.catching_up_to or head
        if message.head.outweighs(head) and message.head.outweighs(goal):
            self._rounds.leave("others are ahead", now, head=message.head)
            self._standing.catching_up_to = message.head
            self._emit(CatchUp(head=message.head, commits=commits))

    # ------------------------------------------------------------------ private

    def _note(self, peer: PeerId, head: Head, samples: int) -> None:
        self._roster.note(peer, head, samples, outdated=self._standing.outdated(head))

    def _stands(self, peer: PeerId, head: Head) -> None:
        """It says where, but not with how many samples. (Its record says so seconds later.)"""
        if not self._roster.stands(peer, head):
            self._note(peer, head, 0)

    def _probe(self, peer: PeerId, *, asks: bool) -> None:
        self._emit(Send(to=peer, message=Probe(asks=asks, cuts=self._roster.cuts_besides(peer))))

    def _report(self, now: float) -> None:
        """Tell the candidate how far this peer is."""
        self._report_at = now + self._settings.resend_s
        self._reported = head = self._standing.settled
        if head is not None and (candidate := self._roster.candidate(head)) != self.me:
            self._emit(Send(to=candidate, message=self._roster.progress(head)))

    def _begin(self, now: float) -> None:
        """Before every event: was this process suspended? (It is called several times within ``detect_s``.)"""
        slept, self._last = now - self._last > self.standstill_s, now
        if slept:
            self._rounds.suspended(now)

    def _settle(self, now: float) -> None:
        """After every event: do what follows, until nothing does."""
        while True:
            while self._to_self:
                self._take_in(self.me, self._to_self.popleft(), now)
            self._rounds.settle(now)
            if not self._to_self:
                break
        self._roster.forget(now)
        for peer in self._roster.to_probe(now):
            self._probe(peer, asks=True)
        if self._reported != self._standing.settled:
            self._report(now)
        noted, self._noted = self._noted, self._roster.cut
        for peer in sorted(set(self._noted).difference(noted)):
            self._emit(Note(what=NO_WAY, peer=peer))

    def _emit(self, action: Action) -> None:
        if isinstance(action, Send) and action.to == self.me:
            self._to_self.append(action.message)
        else:
            self._out.append(action)
