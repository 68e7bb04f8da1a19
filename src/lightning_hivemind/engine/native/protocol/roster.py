"""The peers that this one knows of: where they stand, who is gone, who calls the next round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_hivemind.engine.native.protocol.lineage import MOST_SAMPLES, Head, PeerId, rank
from lightning_hivemind.engine.native.protocol.messages import Progress
from lightning_hivemind.engine.native.protocol.settings import Settings

NEVER = float("-inf")
#: steps with a peer since it was lost here: the round of the last was called after this peer had told its coordinator
#: that the one before is done, which was after that loss
SURELY_LIVES = 3
#: counted among the cuts of a peer with a slow line, to receive or to send: among equals it does not lead
RECEIVES_SLOWLY, SENDS_SLOWLY = 1 << 20, 1 << 21
#: the same, where a peer has come from elsewhere and does not know yet whether those that it had lost live: for so many
#: steps
MAY_BE_CUT, ARRIVES_STEPS = 1 << 19, SURELY_LIVES + 1
#: who was lost so long ago, and has published nothing since, will not: whoever comes back is as one that is new
FORGET_S = 600.0
#: who calls, and begins nothing for as long as one waits for that, is not followed for so many times as long
SHUNNED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a peer stands, as it publishes it for all others.

    Attributes:
        reduces: others can connect to it.
        cuts: to how many peers that live it has no connection; see :data:`MAY_BE_CUT`, :data:`SENDS_SLOWLY`.
        stamp: when it was made, in any one clock of that peer.
    """

    head: Head
    samples: int
    stamp: float
    reduces: bool = True
    cuts: int = 0


@dataclass(kw_only=True, slots=True)
class Seen:
    """What is known of another peer: its last :class:`Place`, and what it has said since.

    ``silent``: it was lost and has published since, but has said nothing.
    """

    head: Head
    samples: int
    reduces: bool = True
    cuts: int = 0
    stamp: float = NEVER
    silent: bool = False


@dataclass(kw_only=True, slots=True)
class Gone:
    """A peer that was lost, at ``since``.

    ``stamp`` is of the last record before that: older ones do not bring it back. ``steps`` were made with it since.
    """

    stamp: float
    since: float
    steps: int = 0


@dataclass(kw_only=True, slots=True)
class Cut:
    """A peer that lives, since it publishes records or makes steps with others, and cannot be reached.

    ``doubtful``: it was lost, and one record came since, which may be older than its death: it is asked first.
    ``steps``: see :class:`Gone`.
    """

    lived_at: float
    doubtful: bool = False
    steps: int = 0
    probed_at: float = NEVER


class Roster:
    """See the module. ``samples`` are this peer's own for the next commit."""

    def __init__(self, settings: Settings, me: PeerId, reduces: bool) -> None:
        self._run, self._target, self._me, self._reduces = settings.run, settings.target_samples, me, reduces
        self._probe_s, self._lives_s, self._resend_s = settings.probe_s, settings.lives_s, settings.resend_s
        self.samples = 0
        #: whether this peer's own line is slow, to receive and to send
        self.receives_slowly = self.sends_slowly = False
        #: steps since this peer has taken the state of where it stands
        self._steps_here = 0
        self._seen: dict[PeerId, Seen] = {}
        self._gone: dict[PeerId, Gone] = {}
        self._cut: dict[PeerId, Cut] = {}
        #: candidates that let a round pass at this epoch
        self._idle: set[PeerId] = set()
        #: until when whose calls are declined; see :data:`SHUNNED`
        self._shunned: dict[PeerId, float] = {}
        #: what others say that the swarm has; nothing where it was found not to have it
        self._told = 0
        self._mistold = False

    # ------------------------------------------------------------------ what is heard of others

    def record(self, peer: PeerId, place: Place, now: float, *, outdated: bool) -> bool:
        """Take a record in; False if it is older than what is known. ``outdated``: see :meth:`note`."""
        known = self._seen.get(peer)
        gone = self._gone.get(peer)
        last = max(gone.stamp if gone is not None else NEVER, known.stamp if known is not None else NEVER)
        if peer == self._me or place.stamp <= last:
            return False
        self.note(peer, place.head, place.samples, outdated=outdated)
        seen = self._seen[peer]
        if gone is not None:
            self._cut_off(peer, now, doubtful=not seen.silent)
        elif peer in self._cut:
            self._cut_off(peer, now, doubtful=False)
        seen.silent = seen.silent or gone is not None
        seen.reduces, seen.cuts, seen.stamp = place.reduces, place.cuts, place.stamp
        return True

    def note(self, peer: PeerId, head: Head, samples: int, *, outdated: bool) -> None:
        """Remember where a peer says that it stands.

        ``outdated``: it names a head that this peer's lineage has left behind. If it is known to have left it, too,
        this was said before and arrives late.
        """
        known, samples = self._seen.get(peer), min(samples, MOST_SAMPLES)
        if peer == self._me:
            return
        if known is None:
            self._seen[peer] = Seen(head=head, samples=samples)
        elif not outdated or known.head.epoch <= head.epoch:
            known.head, known.samples = head, samples

    def told(self, swarm_samples: int) -> None:
        """Another peer knows of so many samples in the swarm."""
        if not self._mistold:
            self._told = max(self._told, min(swarm_samples, MOST_SAMPLES))

    def came(self, samples: Mapping[PeerId, int]) -> None:
        """Peers were called to where this one stands, and brought so many: too few, whatever had been said of them."""
        self._told, self._mistold = 0, True
        for peer in samples.keys() & self._seen.keys():
            self._seen[peer].samples = samples[peer]

    def lost(self, peer: PeerId, now: float) -> None:
        if (cut := self._cut.get(peer)) is None or cut.doubtful:
            self._cut.pop(peer, None)
            stamp = self._seen[peer].stamp if peer in self._seen else NEVER
            self._gone.setdefault(peer, Gone(stamp=stamp, since=now, steps=cut.steps if cut is not None else 0))

    def forget(self, now: float) -> None:
        """Who is gone for good: a run may see very many peers come and go."""
        while self._gone:
            peer, gone = next(iter(self._gone.items()))  # who was lost first
            if now - gone.since < FORGET_S:
                return
            del self._gone[peer]
            self._seen.pop(peer, None)

    def alive(self, peer: PeerId) -> None:
        """It has just said something."""
        self._gone.pop(peer, None)
        self._cut.pop(peer, None)
        if peer in self._seen:
            self._seen[peer].silent = False

    def to_probe(self, now: float) -> list[PeerId]:
        """Whom to try to reach now, of those that live and cannot be reached. Who publishes no more has died since."""
        for peer in [peer for peer, one in self._cut.items() if now - one.lived_at > self._lives_s]:
            del self._cut[peer]
            self.lost(peer, now)
        found = sorted(peer for peer, one in self._cut.items() if now - one.probed_at >= self._again_s(one))
        for peer in found:
            self._cut[peer].probed_at = now
        return found

    def _again_s(self, cut: Cut) -> float:
        """After how long to ask again: whether a peer lives must be known soon, and a question may be lost."""
        return self._resend_s if cut.doubtful else self._probe_s

    def cuts_of(self, peer: PeerId, cuts: int) -> None:
        """It says to how many it has no connection."""
        if peer in self._seen:
            self._seen[peer].cuts = cuts

    def moved(
        self, peers: set[PeerId], parent: Head, head: Head, now: float, *, silent: Collection[PeerId] = ()
    ) -> None:
        """A commit leads from ``parent`` to ``head``, and these were in its round: they stood at ``parent``.

        (Their last records may say where they stood seconds ago.) ``silent``: of whom perhaps nobody has heard in it.
        Whose turn it is begins anew.
        """
        self._steps_here += 1
        for peer in peers & set(self._seen):
            if self._seen[peer].head.epoch <= parent.epoch:
                self._seen[peer].head, self._seen[peer].samples = head, 0
        for peer in peers.difference(silent):
            away = self._gone.get(peer) or self._cut.get(peer)
            if away is not None:
                away.steps += 1
                if away.steps >= SURELY_LIVES:
                    self._cut_off(peer, now, doubtful=False)
        self.begin_anew()

    def _cut_off(self, peer: PeerId, now: float, *, doubtful: bool) -> None:
        """It lives, or does so perhaps, and cannot be reached from here."""
        gone = self._gone.pop(peer, None)
        cut = self._cut.setdefault(peer, Cut(lived_at=now, steps=gone.steps if gone is not None else 0))
        cut.lived_at, cut.doubtful = now, doubtful

    def arrived(self) -> None:
        """This peer has taken the state of where it stands now."""
        self._steps_here = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what held only for the round that has just ended."""
        self._told, self._mistold = 0, False
        self._idle.clear()

    def let_pass(self, peer: PeerId) -> None:
        """It should have called a round, and did not, or led one for long that came to nothing."""
        self._idle.add(peer)

    def shun(self, coordinator: PeerId, waited_s: float, now: float) -> None:
        """It has called for so long, and begun nothing; but who is fitter to lead than this peer is followed."""
        self._shunned = {peer: until for peer, until in self._shunned.items() if until > now}
        if coordinator != self._me and not self.is_fitter(coordinator):
            self._shunned[coordinator] = now + SHUNNED * waited_s

    def shuns(self, peer: PeerId, now: float) -> bool:
        """Whether its calls are declined."""
        return now < self._shunned.get(peer, now)

    # ------------------------------------------------------------------ what follows from it

    def stands(self, peer: PeerId, head: Head) -> bool:
        """Whether it is known to stand there."""
        return peer in self._seen and self._seen[peer].head == head

    def head_of(self, peer: PeerId) -> Head | None:
        """Where it is known to stand."""
        return self._seen[peer].head if peer in self._seen else None

    def reduces(self, peer: PeerId) -> bool:
        """Whether all others can reach it."""
        return self._seen[peer].reduces

    @property
    def cut(self) -> tuple[PeerId, ...]:
        """Those that live, and cannot be reached from here."""
        return tuple(sorted(peer for peer, one in self._cut.items() if not one.doubtful))

    @property
    def slow(self) -> bool:
        """Whether this peer has the results of a round later than others, or says so later."""
        return self.receives_slowly or self.sends_slowly

    @property
    def cuts(self) -> int:
        """How little this peer can lead a round: see :class:`Place`."""
        return self.cuts_besides(self._me)

    def cuts_besides(self, peer: PeerId) -> int:
        """:attr:`cuts`, without that to this one."""
        cut = set(self.cut) - {peer}
        may_be = self._steps_here < ARRIVES_STEPS and bool(set(self.out_of_reach) - cut - {peer})
        slow = self.receives_slowly * RECEIVES_SLOWLY + self.sends_slowly * SENDS_SLOWLY
        return len(cut) + may_be * MAY_BE_CUT + slow

    @property
    def out_of_reach(self) -> tuple[PeerId, ...]:
        """Those that cannot be reached from here, whether they live or not."""
        return tuple(sorted({*self._cut, *self._gone}))

    def living(self) -> list[PeerId]:
        """All others that can be reached, in a fixed order."""
        return sorted(filter(self.reaches, self._seen))

    def quick(self) -> list[PeerId]:
        """Those of :meth:`living` that all can reach, over lines that are not slow, as far as is known."""
        return [peer for peer in self.living() if self._seen[peer].reduces and self._seen[peer].cuts < RECEIVES_SLOWLY]

    def gives_nothing(self, peer: PeerId) -> bool:
        """Whether it is known to hand what it has to another peer, as it sends slowly: nobody needs to wait for it."""
        return peer in self._seen and self._seen[peer].cuts >= SENDS_SLOWLY

    def reaches(self, peer: PeerId) -> bool:
        """Whether it can be reached from here, as far as is known."""
        return peer not in self._gone and peer not in self._cut

    def candidate(self, head: Head) -> PeerId:
        """Who calls the next round: the first of those at ``head`` that can be reached."""
        here = [peer for peer in self.living() if self._seen[peer].head == head and peer not in self._idle]
        return min((self._me, *here), key=lambda peer: self._order(peer, head.epoch))

    def outranks(self, one: PeerId, other: PeerId, epoch: int) -> bool:
        """Whether to follow ``one`` if both call. (Not if it could have led before, and came to nothing.)"""
        return (one in self._idle, self._order(one, epoch)) < (other in self._idle, self._order(other, epoch))

    def is_fitter(self, one: PeerId) -> bool:
        """Than this peer, to lead a round."""
        return self._unfit(one) < self._unfit(self._me)

    def _order(self, peer: PeerId, epoch: int) -> tuple[tuple[bool, int, bool, bool], bytes]:
        """Of candidates: by fitness, then by rank."""
        return self._unfit(peer), rank(self._run, epoch, peer)

    def _unfit(self, peer: PeerId) -> tuple[bool, int, bool, bool]:
        """How little it can lead: nobody can reach it, it is cut off from so many, it is slow, or may be cut."""
        if peer == self._me:
            reduces, cuts = self._reduces, self.cuts
        elif (seen := self._seen.get(peer)) is not None:
            reduces, cuts = seen.reduces, seen.cuts
        else:
            return True, 0, True, True  # it was forgotten since
        return not reduces, cuts % MAY_BE_CUT, cuts >= RECEIVES_SLOWLY, bool(cuts & MAY_BE_CUT)

    def enough(self, head: Head) -> bool:
        """Whether a round is due."""
        return self.swarm_samples(head) >= self._target

    def swarm_samples(self, head: Head) -> int:
        """For the next commit after ``head``: this peer's, and what is known of the others'."""
        return max(self._counted(head), self._told)

    def progress(self, head: Head) -> Progress:
        return Progress(head=head, samples=self.samples, swarm_samples=self._counted(head), cuts=self.cuts)

    def _counted(self, head: Head) -> int:
        here = (one.samples for peer, one in self._seen.items() if one.head == head and self.reaches(peer))
        return self.samples + sum(here)
