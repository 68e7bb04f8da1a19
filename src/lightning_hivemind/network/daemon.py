"""A peer's place in the network: the libp2p daemon and the DHT process above it, started, watched and stopped.

Processes: the trainer forks the DHT process (``hivemind.DHT``), which starts ``p2pd`` in a session of its own. Ctrl+C
reaches only the trainer; if the trainer is killed the DHT process ends itself, ``p2pd`` and the sockets; if the DHT
process is killed the kernel ends ``p2pd`` (Linux), or :meth:`PeerNetwork.shutdown` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar, cast

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from torch import Tensor

from lightning_hivemind.errors import DaemonError, JoinError, NetworkError
from lightning_hivemind.events import EventBus, PeerStarted, Waiting
from lightning_hivemind.network import diagnosis
from lightning_hivemind.network.answers import survive_late_answers
from lightning_hivemind.network.forking import kept_from_children
from lightning_hivemind.network.identity import LEAVE_S, IdentityLock, check_identity, without_self
from lightning_hivemind.network.inherited import not_inherited
from lightning_hivemind.network.lifetime import die_with_parent, settle_child
from lightning_hivemind.network.locks import free_locks
from lightning_hivemind.network.neighbours import keep_neighbours
from lightning_hivemind.network.ports import await_free
from lightning_hivemind.network.settings import LISTEN_EVERYWHERE, NetworkSettings
from lightning_hivemind.network.shared_memory import start_shared_memory
from lightning_hivemind.network.sockets import SocketDirectory
from lightning_hivemind.network.tasks import keep_tasks_alive

log = logging.getLogger("lightning_hivemind")
T = TypeVar("T")

_POLL_S = 0.05
_WAITING_EVERY_S = 5.0
_CALL_TIMEOUT_S = 10.0
#: A peer that is joined may itself be starting, or be too busy to answer one ping: pauses before further attempts.
_JOIN_PAUSES_S = (1.0, 3.0)
_LOG_BYTES = 64 * 1024
#: After SIGTERM to a whole process group, or an error, how long to see whether the trainer ended, too.
_SHARED_END_S = 0.4


#: what :meth:`PeerNetwork.is_alive` looks after
NETWORK_PARTS = "DHT process, libp2p daemon or directory of sockets"


class PeerDHT(hivemind.DHT):  # type: ignore[misc] # hivemind has no types
    """hivemind's DHT whose process and daemon end with the trainer, and whose sockets lie in one directory.

    ``replicate_p2p`` of a process forked later (an averager) puts its sockets into the same directory.
    """

    def __init__(self, sockets: SocketDirectory, **options: Any) -> None:
        self._sockets = sockets
        super().__init__(start=False, **options)

    def run(self) -> None:
        """The DHT process."""
        settle_child(self._parent_pid, cleanup=self._clean_up)
        keep_tasks_alive()
        signal.signal(signal.SIGTERM, self._terminated)
        P2P._UNIX_SOCKET_PREFIX = self._sockets.maddr_prefix
        # P2P.create's check that an identity is free starts another daemon, with the default timeout of 15 s.
        P2P.create.__func__.__kwdefaults__["startup_timeout"] = self.kwargs["startup_timeout"]
        P2P._log_p2pd_message = staticmethod(_keep_output(self._sockets.log_path, P2P._log_p2pd_message))
        subprocess: Any = asyncio.subprocess
        subprocess.create_subprocess_exec = _bound_to_this_process(subprocess.create_subprocess_exec)
        try:
            super().run()
        except BaseException:
            if self._parent_ends():  # killed in the middle of a word to us, and we may see that before the watch does
                self._clean_up()
            raise
        finally:
            self._sockets.kill_daemons(timeout_s=1.0)

    async def replicate_p2p(self) -> P2P:
        before = P2P._UNIX_SOCKET_PREFIX
        P2P._UNIX_SOCKET_PREFIX = self._sockets.maddr_prefix
        try:
            return await super().replicate_p2p()
        finally:
            P2P._UNIX_SOCKET_PREFIX = before

    def _terminated(self, *_: object) -> None:
        self._sockets.kill_daemons(timeout_s=1.0)
        self._parent_ends()
        self._sockets.remove()
        os._exit(128 + signal.SIGTERM)

    def _parent_ends(self) -> bool:
        """Whether the trainer is gone, or ends in the next moments."""
        deadline = time.monotonic() + _SHARED_END_S
        while (lives := os.getppid() == self._parent_pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not lives

    def _clean_up(self) -> None:
        self._sockets.kill_daemons(timeout_s=1.0)
        self._sockets.remove()


class PeerNetwork:
    """One peer's daemon and DHT. Call from one thread; several may exist one after another in a process.

    Attributes:
        settings: as given.
    """

    def __init__(self, settings: NetworkSettings, events: EventBus) -> None:
        self.settings = settings
        self._events = events
        self._dht: PeerDHT | None = None
        self._sockets: SocketDirectory | None = None
        self._peer_id: str | None = None
        #: somebody else, that is; else it is the first peer. Known once it is started
        self.joins = bool(settings.initial_peers)
        self._daemon_pid: int | None = None
        self._identity = IdentityLock(settings.identity_path)

    def start(self, without: Iterable[Tensor] = ()) -> None:
        """Start and, if there are ``initial_peers``, join. Does nothing if started already.

        ``without``: what its process does not need; see :mod:`.forking`.

        Emits :class:`Waiting` every 5 s, and :class:`PeerStarted` once up.

        Raises:
            AddressError: a port of ``host_maddrs`` is in use.
            DaemonError: the daemon did not start within ``startup_timeout``, or died, or the identity is unusable.
            JoinError: none of ``initial_peers`` answered. After either, nothing is left running.
        """
        if self._dht is not None:
            return
        began = time.monotonic()
        check_identity(self.settings.identity_path)
        peers = without_self(self.settings.initial_peers, self.settings.identity_path)
        self.joins = bool(peers)
        await_free(self.settings.host_maddrs or (), LEAVE_S)
        start_shared_memory()
        survive_late_answers()
        self._identity.take()
        try:
            self._sockets = SocketDirectory.create()
            self._join(self._sockets, peers, began, list(without))
            self._identity.take()  # a new one is there only now
            not_inherited(self._identity)  # but by the DHT process, which ends with this one
            self._peer_id, self._daemon_pid, addresses = self._call(_describe)
            self._call(keep_neighbours)
            self._sockets.note_listener()
        except BaseException:
            self.shutdown()
            raise
        duration_s = time.monotonic() - began
        run_id = self.settings.run_id
        self._events.emit(PeerStarted(peer_id=self._peer_id, addresses=addresses, run_id=run_id, duration_s=duration_s))

    @property
    def dht(self) -> hivemind.DHT:
        """The running DHT. Raises DaemonError before :meth:`start` and after :meth:`shutdown`."""
        return self._running()

    @property
    def peer_id(self) -> str:
        """This peer's id in base58. Raises DaemonError if not started."""
        self._running()
        return cast(str, self._peer_id)

    @property
    def sockets(self) -> SocketDirectory:
        """The directory of this peer's unix sockets; for ``settle_child(..., cleanup=network.sockets.remove)``."""
        self._running()
        return cast(SocketDirectory, self._sockets)

    def visible_addresses(self) -> list[str]:
        """Full addresses at which the daemon believes to be reachable, asked anew; empty in client mode.

        Raises:
            DaemonError: the DHT process does not answer.
        """
        return self._call(_describe)[2]

    def is_alive(self) -> bool:
        """True while both the DHT process and the daemon run, and their sockets can be reached."""
        if self._dht is None or not self._dht.is_alive() or self._daemon_pid is None:
            return False
        if self._sockets is None or not self._sockets.path.is_dir():
            return False  # removed under us: nothing new can reach the daemon
        try:
            os.kill(self._daemon_pid, 0)
        except ProcessLookupError:
            return False
        return True

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Leave the network and stop everything, within ``timeout_s``: politely, then SIGTERM, then SIGKILL.

        Afterwards no process, socket or port is left. Safe to call twice, and after a failed start.
        """
        dht, sockets = self._dht, self._sockets
        self._dht = self._sockets = self._daemon_pid = None
        with contextlib.ExitStack() as left:  # all of it, also if Ctrl+C comes meanwhile: a notebook lives on
            left.callback(self._identity.release)
            if sockets is not None:
                left.callback(sockets.release)
                left.callback(sockets.kill_daemons, timeout_s=max(1.0, 0.1 * timeout_s))
            if dht is not None:
                left.callback(_kill, dht)
                _stop(dht, timeout_s)

    def _running(self) -> PeerDHT:
        if self._dht is None or self._peer_id is None:
            raise DaemonError("The peer's network is not running: call start() first.")
        return self._dht

    def _join(self, sockets: SocketDirectory, peers: tuple[str, ...], began: float, without: list[Tensor]) -> None:
        """Start the DHT; where no peer answered, start it again after a pause."""
        for pause_s in (*_JOIN_PAUSES_S, None):
            free_locks()
            self._dht = PeerDHT(sockets, **_dht_options(self.settings, peers))
            try:
                with kept_from_children(without):
                    self._dht.start()
                self._await_ready(self._dht, sockets, peers, began)
                return
            except NetworkError:
                raise
            except Exception as error:  # whatever hivemind sent from its process
                _stop(self._dht, 5.0)
                sockets.kill_daemons(1.0)
                if not diagnosis.nobody_answered(error):
                    output = sockets.daemon_output(diagnosis.LINES)
                    raise diagnosis.explain(error, self.settings, peers, output) from error
                left_s = self.settings.startup_timeout - (time.monotonic() - began)
                log.debug("none of initial_peers answered: %s", error)
                if pause_s is None or left_s < pause_s:
                    raise JoinError(diagnosis.describe_unreachable(peers, self.settings)) from None  # it says all
                log.info("none of initial_peers answered; trying again in %.0f s", pause_s)
                time.sleep(pause_s)

    def _await_ready(self, dht: PeerDHT, sockets: SocketDirectory, peers: tuple[str, ...], began: float) -> None:
        limit_s = self.settings.startup_timeout
        what = "the libp2p daemon and an answer of initial_peers" if peers else "the libp2p daemon"
        said = time.monotonic()
        while True:
            try:
                dht.wait_until_ready(timeout=_POLL_S)
                return
            except FutureTimeoutError:
                if dht._ready.done():  # the future holds a timeout of hivemind's own, or came in this very moment
                    dht.wait_until_ready(timeout=0)
                    return
            now = time.monotonic()
            if not dht.is_alive() and not dht._ready.done():
                output = sockets.daemon_output(diagnosis.LINES)
                raise DaemonError(diagnosis.describe_death(dht.exitcode, output))
            if now - began > limit_s:
                output = sockets.daemon_output(diagnosis.LINES)
                raise diagnosis.too_slow(now - began, self.settings, peers, output)
            if now - said >= _WAITING_EVERY_S:
                said = now
                self._events.emit(Waiting(what=what, elapsed_s=now - began, limit_s=limit_s))

    def _call(self, coroutine: Callable[[hivemind.DHT, DHTNode], Awaitable[T]]) -> T:
        """Run it in the DHT process, with a deadline."""
        if self._dht is None:
            raise DaemonError("The peer's network is not running: call start() first.")
        try:
            future = self._dht.run_coroutine(coroutine, return_future=True)
            return cast(T, future.result(timeout=_CALL_TIMEOUT_S))
        except (FutureTimeoutError, OSError) as error:
            raise DaemonError(
                f"The DHT process (pid={self._dht.pid}, alive={self._dht.is_alive()}) did not answer within "
                f"{_CALL_TIMEOUT_S:.0f} s. The peer cannot go on; restart it."
            ) from error


def _dht_options(settings: NetworkSettings, peers: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of ``hivemind.DHT``. The daemon's own timeouts are longer than ours, which decides."""
    options: dict[str, Any] = {
        "initial_peers": list(peers) or None,
        "announce_maddrs": list(settings.announce_maddrs) if settings.announce_maddrs else None,
        "host_maddrs": list(settings.host_maddrs or LISTEN_EVERYWHERE),
        "identity_path": settings.identity_path and os.path.expanduser(settings.identity_path),
        "client_mode": settings.client_mode,
        "use_relay": settings.use_relay,
        "use_auto_relay": settings.use_auto_relay,
        "use_ipfs": settings.use_ipfs,
        "trusted_relays": list(settings.trusted_relays) or None,
        "wait_timeout": settings.wait_timeout,
        "bootstrap_timeout": settings.bootstrap_timeout,
        "startup_timeout": settings.startup_timeout + 30.0,
        "idle_timeout": settings.startup_timeout + 60.0,
    }
    if settings.client_mode and settings.host_maddrs is None:
        options["no_listen"] = True
    return options


async def _describe(_dht: hivemind.DHT, node: DHTNode) -> tuple[str, int, list[str]]:
    """(peer id, the daemon's pid, visible addresses); runs in the DHT process."""
    await node.p2p._ping_daemon()
    addresses = [f"{maddr}/p2p/{node.peer_id.to_base58()}" for maddr in node.p2p._visible_maddrs]
    return node.peer_id.to_base58(), node.p2p._child.pid, addresses


def _bound_to_this_process(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``create_subprocess_exec`` whose processes die with this one, and get no signals from the terminal."""

    async def create_bound(*command: Any, **options: Any) -> Any:
        return await create(*command, preexec_fn=die_with_parent(), start_new_session=True, **options)

    return create_bound


def _keep_output(path: Path, then: Callable[[str], None]) -> Callable[[str], None]:
    """Also append each line to a file, which loses its older half when it grows beyond 64 KiB."""

    def keep(line: str) -> None:
        try:
            if path.exists() and path.stat().st_size > _LOG_BYTES:
                path.write_bytes(path.read_bytes()[-_LOG_BYTES // 2 :])
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:  # a full disk must not stop the daemon's reader
            log.warning("the daemon's output cannot be kept in %s: %s", path, error)
        then(line)

    return keep


def _stop(dht: PeerDHT, timeout_s: float) -> None:
    """End the DHT process. It is asked from a thread: its pipe may be full, and nobody may be reading it."""
    if dht.pid is None:
        return
    dht.shutdown_timeout = 0.6 * timeout_s
    asking = threading.Thread(target=_ask_to_stop, args=(dht,), name="dht-shutdown", daemon=True)
    asking.start()
    asking.join(0.7 * timeout_s)
    if dht.is_alive():
        dht.terminate()
        dht.join(0.15 * timeout_s)
    _kill(dht)
    dht.join(0.1 * timeout_s)


def _kill(dht: PeerDHT) -> None:
    if dht.pid is not None and dht.is_alive():
        dht.kill()


def _ask_to_stop(dht: PeerDHT) -> None:
    try:
        dht.shutdown()
    except OSError as error:  # its end of the pipe is gone
        log.debug("the DHT process cannot be asked to stop: %s", error)
