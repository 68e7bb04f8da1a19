"""The ranks of one peer, and how they speak beside torch.distributed.

Rank 0 speaks to the swarm; what it decides there the others hear from it. Waiting for a word ends with Ctrl+C, and
when the other end is gone, which waiting in a collective does not; and a rank that is somewhere else than the others is
found by what it says.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from lightning_hivemind.errors import RanksError
from lightning_hivemind.network.inherited import not_inherited
from lightning_hivemind.peer.words import Failed, Item, Shared, Waiting, Word, decode, encode

#: how often who waits looks whether it should end
POLL_S = 0.5
#: how long ranks of one machine, or of neighbours, may take to find rank 0's socket
CONNECT_S = 60.0
#: after which rank 0 says for whom it waits, again and again
TELL_S = 30.0
#: how long a rank that fails waits for rank 0 to end: launchers kill rank 0 once another one has
PATIENCE_S = 10.0
_RANK_BYTES = 4

T = TypeVar("T", bound=Word)

log = logging.getLogger("lightning_hivemind")
_KEPT: list[Connection] = []


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

    def __init__(self, rank: int = 0, size: int = 1, connections: list[Connection] | None = None) -> None:
        self.rank, self.size, self._connections = rank, size, connections or []
        #: how many words rank 0 has said, and how many this rank has heard
        self._said = self._heard = 0
        self._failed = False
        for one in self._connections:
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

    def share(self, what: str, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank; all call this with the same ``what``. Plain values only (JSON).

        Raises:
            RanksError: a rank has gone, or does something else.
        """
        if not self._connections:
            return [value]
        if not self.leads:
            self._send(self._connections[0], Item(what, value), 0)
            return self.expect(Shared, what, self.hear(what)).values
        items = [self.expect(Item, what, self._answer(one, rank, what)) for rank, one in self._others()]
        values = [value, *(item.value for item in items)]
        self.tell(Shared(what, values))
        return values

    # ------------------------------------------------------------------ from rank 0 to the others

    def tell(self, word: Word) -> None:
        """Rank 0: say it to all others. Raises RanksError."""
        self._said += 1
        for rank, one in self._others():
            self._send(one, word, rank)

    def hear(self, what: str) -> Word:
        """The others, which are at ``what``: what rank 0 says next. Raises RanksError."""
        connection = self._connections[0]
        if not self._comes(connection, 0):  # perhaps rank 0 waits, too, for something else
            self._send(connection, Waiting(what, self._heard), 0)
        word = self._receive(connection, 0)
        self._heard += 1
        if isinstance(word, Failed):
            self._failed = True
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
            with contextlib.suppress(RanksError):
                self.tell(Failed(f"{type(error).__name__}: {error}"))
        else:
            for one in self._connections:
                with contextlib.suppress(OSError):
                    _half_closed(one)

    def close(self) -> None:
        """Safe to call twice. Who has failed leaves rank 0 the time to end as it should."""
        connections, self._connections = self._connections, []
        if self._failed and self.leads:
            _KEPT.extend(connections)  # until this process has ended, which the others wait for
            return
        deadline = time.monotonic() + PATIENCE_S
        for one in connections:
            with contextlib.suppress(OSError, EOFError):
                while self._failed and time.monotonic() < deadline:
                    if one.poll(POLL_S):
                        one.recv_bytes()
            one.close()

    # ------------------------------------------------------------------ private

    def _others(self) -> Iterator[tuple[int, Connection]]:
        return enumerate(self._connections, start=1)

    def _send(self, connection: Connection, word: Word, rank: int) -> None:
        try:
            connection.send_bytes(encode(word))
        except OSError as error:
            raise _gone(rank) from error

    def _answer(self, connection: Connection, rank: int, what: str) -> Word:
        """At rank 0: what a rank says that should say something."""
        told = time.monotonic() + TELL_S
        while True:
            while not self._comes(connection, rank):
                if time.monotonic() > told:
                    told = time.monotonic() + TELL_S
                    log.warning("rank 0 of this peer waits for rank %d, which has not come to %r", rank, what)
            word = self._receive(connection, rank)
            if not isinstance(word, Waiting) or word.heard == self._said:  # else it has heard what it waited for
                return word

    def _comes(self, connection: Connection, rank: int) -> bool:
        """Whether there is something to receive, within :data:`POLL_S`. Ends with Ctrl+C."""
        try:
            return connection.poll(POLL_S)
        except OSError as error:
            raise _gone(rank) from error

    def _receive(self, connection: Connection, rank: int) -> Word:
        while not self._comes(connection, rank):
            pass
        try:
            return decode(connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise _gone(rank) from error


def _listen(group: Group, size: int) -> list[Connection]:
    """Rank 0: a connection to each other rank, in order."""
    host, secret = group.cluster_environment.main_address, secrets.token_bytes(32)
    with _server(host, neighbours=group.num_nodes > 1) as server:
        group.broadcast((host, server.getsockname()[1], secret.hex()))
        found: dict[int, Connection] = {}
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
                found[rank] = _connection(joined)
    return [found[rank] for rank in range(1, size)]


def _dial(group: Group, rank: int) -> Connection:
    host, port, secret = group.broadcast(None)
    try:
        joined = socket.create_connection((host, port), timeout=CONNECT_S)
        joined.sendall(bytes.fromhex(secret) + rank.to_bytes(_RANK_BYTES, "big"))
    except OSError as error:
        raise RanksError(f"rank {rank} of this peer cannot reach rank 0 at {host}:{port}: {error}") from error
    return _connection(joined)


def _server(host: str, *, neighbours: bool) -> socket.socket:
    """``neighbours``: ranks on other machines, which know this one by a name that may be its loopback's here."""
    if not neighbours:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _connection(joined: socket.socket) -> Connection:
    joined.settimeout(None)
    joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(joined.detach())


def _greeted(joined: socket.socket, secret: bytes) -> int | None:
    """The rank at the other end, if it is one of this peer."""
    joined.settimeout(POLL_S)
    with contextlib.suppress(OSError):
        said = joined.recv(len(secret) + _RANK_BYTES, socket.MSG_WAITALL)
        if hmac.compare_digest(said[:-_RANK_BYTES], secret):
            return int.from_bytes(said[-_RANK_BYTES:], "big")
    return None


def _half_closed(connection: Connection) -> None:
    """The other end hears that nothing comes any more, and can be heard."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_WR)


def _gone(rank: int) -> RanksError:
    return RanksError(
        f"rank {rank} of this peer has ended: see its own messages above. A peer needs all of its ranks; start it"
        " again, and it takes the swarm's state."
    )
