"""The ranks of one peer, and how they speak beside torch.distributed.

Rank 0 speaks to the swarm; what it decides there the others hear from it. Waiting for a word ends with Ctrl+C, and
when the other end is gone, which waiting in a collective does not; and a rank that is somewhere else than the others is
found by what it says.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from lightning_hivemind.errors import RanksError
from lightning_hivemind.network.inherited import not_inherited
from lightning_hivemind.peer.link import Link
from lightning_hivemind.peer.words import Failed, Item, Shared, Waiting, Word, decode, encode

#: how often who waits looks whether it should end
POLL_S = 0.5
#: how long ranks of one machine, or of neighbours, may take to find rank 0's socket
CONNECT_S = 60.0
#: after which a rank says for whom it waits
TELL_S = 30.0
#: how long a rank that fails waits for rank 0 to end: launchers kill rank 0 once another one has
PATIENCE_S = 10.0
#: of why rank 0 has failed, that the others tell; it tells all
REASON_CHARS = 200
_RANK_BYTES = 4
#: where ranks meet after a failure
_END = "the end"

T = TypeVar("T", bound=Word)

log = logging.getLogger("lightning_hivemind")
_KEPT: list[Link] = []


class Group(Protocol):
    """What is needed of a Lightning strategy for several processes."""

    global_rank: int
    world_size: int
    num_nodes: int
    cluster_environment: Any

    def broadcast(self, obj: Any, src: int = 0) -> Any: ...


class Ranks:
    """See the module; alone, everything is said to nobody.

    Attributes:
        rank: of this process in its peer, from 0 on.
        size: how many processes are this peer.
    """

    def __init__(self, rank: int = 0, size: int = 1, links: list[Link] | None = None) -> None:
        self.rank, self.size, self._links = rank, size, links or []
        #: what rank 0 says with its next word
        self._held: list[bytes] = []
        #: how many words rank 0 has said, and how many this rank has heard
        self._said = self._heard = 0
        self._failed = False
        #: whether this rank comes when all meet at the end; and whether they have
        self._comes = rank == 0
        self._met: bool | None = None
        for one in self._links:
            not_inherited(one)

    @classmethod
    def connect(cls, group: Group) -> Ranks:
        """Those of a process group that is there; a collective.

        Raises:
            RanksError: rank 0 cannot be reached.
        """
        rank, size = group.global_rank, group.world_size
        if size == 1:
            return cls()
        return cls(rank, size, _listen(group, size) if rank == 0 else [_dial(group, rank)])

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that speaks to the swarm."""
        return self.rank == 0

    # ------------------------------------------------------------------ all ranks at once

    def share(self, what: str, value: Any, *, more: bool = False) -> list[Any]:
        """Everybody's ``value``, by rank; all call this with the same ``what``. Plain values only (JSON).

        ``more``: as in :meth:`tell`.

        Raises:
            RanksError: a rank has gone, or does something else.
        """
        if not self._links:
            return [value]
        if not self.leads:
            self._send(self._links[0], [encode(Item(what, value))], 0)
            return self.expect(Shared, what, self.hear(what)).values
        self._say()
        items = [self.expect(Item, what, self._answer(one, rank, what)) for rank, one in self._others()]
        values = [value, *(item.value for item in items)]
        self.tell(Shared(what, values), more=more)
        return values

    # ------------------------------------------------------------------ from rank 0 to the others

    def tell(self, word: Word, *, more: bool = False) -> None:
        """Rank 0: say it to all others. Raises RanksError.

        ``more``: another word comes, before this rank waits for any other or ends, and takes this one along.
        """
        self._said += 1
        self._held.append(encode(word))
        if not more:
            self._say()

    def hear(self, what: str) -> Word:
        """The others, which are at ``what``: what rank 0 says next. Raises RanksError."""
        link, began, patience_s = self._links[0], time.monotonic(), TELL_S
        word = self._receive(link, 0)
        if word is None:  # perhaps rank 0 waits, too, for something else
            self._send(link, [encode(Waiting(what, self._heard))], 0)
        while word is None:
            word = self._receive(link, 0)
            if time.monotonic() > began + patience_s:
                patience_s *= 2
                log.warning(
                    "rank %d of this peer waits in %r for rank 0, which has said nothing for %.0f s: it is busy with"
                    " the swarm, or in the midst of a batch that this rank has left",
                    self.rank,
                    what,
                    time.monotonic() - began,
                )
        self._heard += 1
        if isinstance(word, Failed):
            self._failed = True
            self._comes = True
            raise RanksError(f"rank 0 of this peer has ended: {word.reason}")
        return word

    def expect(self, kind: type[T], what: str, word: Word) -> T:
        """``word``, if it is of that kind and of ``what``. Raises RanksError."""
        if isinstance(word, kind) and getattr(word, "what", None) == what:
            return word
        there = getattr(word, "what", type(word).__name__)
        raise RanksError(
            f"the ranks of this peer are not at the same place: rank {self.rank} at {what!r}, another one at {there!r}."
            " Each needs as many batches as the others (a sampler that pads, or drop_last=True), and what one of them"
            " calls of the strategy all must call."
        )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is raised within ends the other ranks, too."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """This rank ends by that, so all others do, before they wait for it in a collective."""
        if self._failed:
            return
        self._failed = True
        if self.leads:
            gone = [rank for rank, link in self._others() if link.has_ended()]
            self._comes = not gone
            if gone and not isinstance(error, RanksError):  # perhaps it says only that a connection has broken
                log.error("%s", _gone(gone[0]))
            with contextlib.suppress(RanksError):
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self.tell(Failed(reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]}..."))
        else:
            for one in self._links:
                with contextlib.suppress(OSError):
                    one.say_no_more()

    def meet(self) -> bool:
        """After a failure: whether all ranks are here, to do something together; who is in a collective is not.

        They are not if it is another rank's than rank 0's.
        """
        if self._met is None:
            self._met = False
            with contextlib.suppress(RanksError):
                self._met = self._all_come()
        return self._met

    def close(self) -> None:
        """Safe to call twice. Who has failed leaves rank 0 the time to end as it should."""
        links, self._links = self._links, []
        if self._failed and self.leads:
            _KEPT.extend(links)  # until this process has ended, which the others wait for
            return
        deadline = time.monotonic() + PATIENCE_S
        for one in links:
            with contextlib.suppress(OSError, EOFError):
                while self._failed and time.monotonic() < deadline:
                    one.receive()
            one.close()

    # ------------------------------------------------------------------ private

    def _others(self) -> Iterator[tuple[int, Link]]:
        return enumerate(self._links, start=1)

    def _say(self) -> None:
        held, self._held = self._held, []
        gone = None
        for rank, one in self._others() if held else ():
            try:
                self._send(one, held, rank)
            except RanksError as error:  # the others are told all the same
                gone = gone or error
        if gone is not None:
            raise gone

    def _send(self, link: Link, words: list[bytes], rank: int) -> None:
        try:
            link.send(words)
        except OSError as error:
            raise _gone(rank) from error

    def _all_come(self) -> bool:
        if not self._links:
            return True
        deadline = time.monotonic() + (PATIENCE_S if self.leads else 2 * PATIENCE_S)
        if self.leads:
            here = self._comes and all(self._comes_to(Item, one, rank, deadline) for rank, one in self._others())
            self.tell(Shared(_END, [here]))
            return here
        if not self._comes:
            return False
        self._send(self._links[0], [encode(Item(_END, None))], 0)
        told = self._comes_to(Shared, self._links[0], 0, deadline)
        return told is not None and told.values == [True]

    def _comes_to(self, kind: type[T], link: Link, rank: int, deadline: float) -> T | None:
        """What a rank says at the end, whatever it has said before."""
        while time.monotonic() < deadline:
            word = self._receive(link, rank)
            if isinstance(word, kind) and getattr(word, "what", None) == _END:
                return word
        return None

    def _answer(self, link: Link, rank: int, what: str) -> Word:
        """At rank 0: what a rank says that should say something."""
        told = time.monotonic() + TELL_S
        while True:
            while (word := self._receive(link, rank)) is None:
                if time.monotonic() > told:
                    told = time.monotonic() + TELL_S
                    log.warning("rank 0 of this peer waits for rank %d, which has not come to %r", rank, what)
            if not isinstance(word, Waiting) or word.heard == self._said:  # else it has heard what it waited for
                return word

    def _receive(self, link: Link, rank: int) -> Word | None:
        """What comes within :data:`POLL_S`. Ends with Ctrl+C."""
        try:
            came = link.receive()
        except (OSError, EOFError) as error:
            raise _gone(rank) from error
        return None if came is None else decode(came)


def _listen(group: Group, size: int) -> list[Link]:
    """Rank 0: a link to each other rank, in order."""
    host, secret = group.cluster_environment.main_address, secrets.token_bytes(32)
    with _server(host, neighbours=group.num_nodes > 1) as server:
        group.broadcast((host, server.getsockname()[1], secret.hex()))
        found: dict[int, Link] = {}
        deadline = time.monotonic() + CONNECT_S
        while len(found) < size - 1:
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                joined, _ = server.accept()
            except OSError as error:
                missing = sorted(set(range(1, size)) - set(found))
                raise RanksError(f"ranks {missing} of this peer did not come within {CONNECT_S:.0f} s") from error
            rank = _greeted(joined, secret)
            if rank is None or not 0 < rank < size or rank in found:
                joined.close()  # a stranger
            else:
                found[rank] = Link(joined, POLL_S)
    return [found[rank] for rank in range(1, size)]


def _dial(group: Group, rank: int) -> Link:
    host, port, secret = group.broadcast(None)
    try:
        joined = socket.create_connection((host, port), timeout=CONNECT_S)
        joined.sendall(bytes.fromhex(secret) + rank.to_bytes(_RANK_BYTES, "big"))
    except OSError as error:
        raise RanksError(f"rank {rank} of this peer cannot reach rank 0 at {host}:{port}: {error}") from error
    return Link(joined, POLL_S)


def _server(host: str, *, neighbours: bool) -> socket.socket:
    """``neighbours``: ranks on other machines, which know this one by a name that may be its loopback's here."""
    if not neighbours:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _greeted(joined: socket.socket, secret: bytes) -> int | None:
    """The rank at the other end, if it is one of this peer."""
    joined.settimeout(POLL_S)
    with contextlib.suppress(OSError):
        said = joined.recv(len(secret) + _RANK_BYTES, socket.MSG_WAITALL)
        if hmac.compare_digest(said[:-_RANK_BYTES], secret):
            return int.from_bytes(said[-_RANK_BYTES:], "big")
    return None


def _gone(rank: int) -> RanksError:
    return RanksError(
        f"rank {rank} of this peer has ended: see its own messages above. A peer needs all of its ranks; start it"
        " again, and it takes the swarm's state."
    )
