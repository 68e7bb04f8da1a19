"""Starting and joining in this process: what is waited for, what is refused and why, and that it can be done again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hivemind")

import hivemind.hivemind_cli
from hivemind.p2p import p2p_daemon
from hivemind.utils.mpfuture import MPFuture

from lightning_hivemind.errors import DaemonError, JoinError
from lightning_hivemind.events import Event, EventBus, PeerStarted, Waiting
from lightning_hivemind.network import daemon
from lightning_hivemind.network.daemon import PeerNetwork
from lightning_hivemind.network.records import PeerRecords
from lightning_hivemind.network.settings import NetworkSettings
from lightning_hivemind.network.sockets import SocketDirectory
from swarm.ports import free_port
from swarm.processes import descendants, state_of

pytestmark = pytest.mark.swarm

P2PD = str(Path(hivemind.hivemind_cli.__file__).parent / "p2pd")
STRANGER = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"


def flags(network: PeerNetwork) -> set[str]:
    """With which its daemon was started."""
    assert network.sockets is not None
    (pid,) = network.sockets.daemon_pids()
    return set(Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0"))


class Bench:
    """Makes networks on loopback, and stops those that a test leaves running."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._open: list[PeerNetwork] = []

    def network(self, *join: PeerNetwork, **options: Any) -> PeerNetwork:
        bus = EventBus()
        bus.subscribe(self.events.append)
        if join:
            options["initial_peers"] = tuple(address for one in join for address in one.visible_addresses())
        options.setdefault("host_maddrs", ("/ip4/127.0.0.1/tcp/0",))
        self._open.append(PeerNetwork(NetworkSettings(run_id="run", **options), bus))
        return self._open[-1]

    def close(self) -> None:
        for network in self._open:
            network.shutdown()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Also checks that a test, however it went, left no child process and no socket directory."""
    made: list[Path] = []
    make = SocketDirectory.create

    def remember() -> SocketDirectory:
        directory = make()
        made.append(directory.path)
        return directory

    monkeypatch.setattr(SocketDirectory, "create", remember)
    before = set(descendants(os.getpid()))
    one = Bench()
    yield one
    one.close()
    left = [pid for pid in set(descendants(os.getpid())) - before if not _is_shared_memory_helper(pid)]
    assert not left
    assert not [path for path in made if path.exists()]


def _is_shared_memory_helper(pid: int) -> bool:
    """torch starts it once, and it lives as long as this process."""
    with contextlib.suppress(OSError):
        return b"torch_shm_manager" in Path(f"/proc/{pid}/cmdline").read_bytes() or state_of(pid) in ("", "Z")
    return True


def wrapper(folder: Path, body: str) -> Path:
    """A program that stands in for p2pd; ``body`` is Python that has ``start()`` to become the real one."""
    path = folder / "p2pd-wrapper"
    path.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        f"def start(): os.execv({P2PD!r}, [{P2PD!r}, *sys.argv[1:]])\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def use_daemon(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(p2p_daemon, "path", lambda *_: contextlib.nullcontext(path))


async def forget_everybody(dht: hivemind.DHT, node: Any) -> int:
    """What a request that is not answered in time does to the routing table, for all nodes."""
    known = list(node.protocol.routing_table.uid_to_peer_id.items())
    for uid, peer in known:
        del node.protocol.routing_table[uid]
        node.blacklist.register_failure(peer)
    return len(known)


def test_relays_are_what_the_daemon_is_told(bench: Bench) -> None:
    """No relay was at hand: what it does with this is libp2p's."""
    relay = f"/ip4/203.0.113.7/tcp/31330/p2p/{STRANGER}"
    plain = bench.network()
    plain.start()
    assert {"-relay=1", "-autoRelay=0"} <= flags(plain)
    seeks = bench.network(use_auto_relay=True, trusted_relays=(relay,))
    seeks.start()
    assert {"-relay=1", "-autoRelay=1", f"-trustedRelays={relay}"} <= flags(seeks)
    without = bench.network(use_relay=False)
    without.start()
    assert "-relay=0" in flags(without)


def test_peers_that_have_taken_one_another_for_dead_find_one_another_again(bench: Bench) -> None:
    first = bench.network()
    first.start()
    second = bench.network(first)
    second.start()
    for one in (first, second):
        assert one.dht.run_coroutine(forget_everybody) > 0
    records = [PeerRecords(one.dht, "run", one.peer_id) for one in (first, second)]
    for number, one in enumerate(records):
        one.publish(number=number)
    deadline = time.monotonic() + 20.0
    while not all(one.refresh(20.0) and len(one.read()) == 2 for one in records):
        assert time.monotonic() < deadline, "the DHT is split"
        time.sleep(0.1)
    for one in records:
        one.close()


def test_two_peers_see_each_others_records_until_one_leaves(bench: Bench) -> None:
    first = bench.network()
    first.start()
    second = bench.network(first)
    second.start()
    records = [PeerRecords(one.dht, "run", one.peer_id) for one in (first, second)]
    for number, one in enumerate(records):
        one.publish(number=number)
        assert one.refresh(20.0)
    everything = {first.peer_id: {"number": 0}, second.peer_id: {"number": 1}}
    for one in records:
        assert one.refresh(20.0)
        assert one.read() == everything
    records[1].close()
    assert records[0].refresh(20.0)
    assert records[0].read() == {first.peer_id: {"number": 0}}
    records[0].close()
    started = [event for event in bench.events if isinstance(event, PeerStarted)]
    assert [event.peer_id for event in started] == [first.peer_id, second.peer_id]
    assert started[0].addresses == first.visible_addresses()
    assert all(address.endswith(f"/p2p/{first.peer_id}") for address in started[0].addresses)


def test_it_can_be_stopped_and_started_again_and_used_only_in_between(bench: Bench) -> None:
    network = bench.network()
    with pytest.raises(DaemonError, match=r"call start\(\) first"):
        _ = network.dht
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for _ in range(2):
        network.start()
        dht = network.dht
        network.start()
        assert network.dht is dht
        assert network.is_alive()
        (pid,) = network.sockets.daemon_pids()
        directory = network.sockets.path
        ports = [int(address.split("/")[4]) for address in network.visible_addresses()]
        network.shutdown()
        network.shutdown()
        assert not network.is_alive()
        assert state_of(pid) == ""
        assert state_of(dht.pid) == ""
        assert not directory.exists()
        for port in ports:
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
                pass
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers


def test_by_default_it_listens_on_all_interfaces_by_tcp_alone(bench: Bench) -> None:
    network = bench.network(host_maddrs=None)
    network.start()
    addresses = network.visible_addresses()
    assert any("/tcp/" in address for address in addresses)
    assert not any("/quic" in address for address in addresses), "over QUIC the daemon loses the end of streams"


def test_a_client_joins_listens_nowhere_and_is_not_asked_by_others(bench: Bench) -> None:
    first = bench.network()
    first.start()
    client = bench.network(first, client_mode=True, host_maddrs=None)
    client.start()
    assert client.dht.client_mode is True
    assert client.visible_addresses() == []
    records = [PeerRecords(one.dht, "run", one.peer_id) for one in (client, first)]
    records[0].publish(client=True)
    assert records[0].refresh(20.0)
    assert records[1].refresh(20.0)
    assert records[1].read() == {client.peer_id: {"client": True}}
    for one in records:
        one.close()
    assert client.peer_id not in first.dht.run_coroutine(known_peers)


async def known_peers(_dht: hivemind.DHT, node: Any) -> list[str]:
    return [peer.to_base58() for peer in node.protocol.routing_table.uid_to_peer_id.values()]


def test_a_slow_daemon_is_waited_for_and_reported(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = tmp_path / "released"
    body = f"while not os.path.exists({str(released)!r}): time.sleep(0.02)\nstart()"
    use_daemon(monkeypatch, wrapper(tmp_path, body))
    monkeypatch.setattr(daemon, "_WAITING_EVERY_S", 0.2)
    network = bench.network()
    waiting = threading.Event()

    def release(event: Event) -> None:
        if isinstance(event, Waiting) and len([e for e in bench.events if isinstance(e, Waiting)]) >= 2:
            released.touch()
            waiting.set()

    network._events.subscribe(release)
    network.start()
    assert waiting.is_set()
    assert network.is_alive()
    said = [event for event in bench.events if isinstance(event, Waiting)]
    assert said[0].limit_s == 120.0
    assert 0.2 <= said[0].elapsed_s < said[1].elapsed_s


def test_a_daemon_that_never_starts_is_given_up_with_its_last_words(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_daemon(monkeypatch, wrapper(tmp_path, "print('still thinking', flush=True)\ntime.sleep(600)"))
    began = time.monotonic()
    with pytest.raises(DaemonError, match=r"(?s)startup_timeout=3.*still thinking"):
        bench.network(startup_timeout=3.0).start()
    assert time.monotonic() - began < 60.0, "far beyond startup_timeout"


def test_a_daemon_that_dies_while_starting_is_reported_with_its_last_words(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_daemon(monkeypatch, wrapper(tmp_path, "print('panic: no memory', flush=True)\nsys.exit(2)"))
    with pytest.raises(DaemonError, match="panic: no memory"):
        bench.network().start()


def test_a_dht_process_that_is_killed_while_starting_is_noticed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_daemon(monkeypatch, wrapper(tmp_path, "os.kill(os.getppid(), 9)\ntime.sleep(600)"))
    with pytest.raises(DaemonError, match=r"exit code -9"):
        bench.network().start()


@pytest.mark.parametrize("lock", ["_initialization_lock", "_update_lock"])
def test_what_a_killed_process_held_does_not_keep_the_next_network_from_starting(bench: Bench, lock: str) -> None:
    """As the process of an earlier network that was killed in the middle of a word to this one."""
    forked = multiprocessing.get_context("fork")
    holder = forked.Process(target=_hold_and_die, args=(getattr(MPFuture, lock),))
    holder.start()
    holder.join()
    assert holder.exitcode == -signal.SIGKILL
    assert not getattr(MPFuture, lock).acquire(timeout=0.1), "it gave the lock back"
    network = bench.network()
    network.start()
    assert network.visible_addresses(), "its process answers"


def _hold_and_die(lock: Any) -> None:
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_missing_daemon_binary_is_said(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_daemon(monkeypatch, tmp_path / "no-such-p2pd")
    with pytest.raises(DaemonError, match="p2pd binary not found"):
        bench.network().start()


def test_dead_initial_peers_are_named_with_what_is_wrong_at_each(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_JOIN_PAUSES_S", (0.1,))
    other = bench.network()
    other.start()
    port = int(other.visible_addresses()[0].split("/")[4])
    refused = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
    elsewhere = f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}"
    with pytest.raises(JoinError) as caught:
        bench.network(initial_peers=(refused, elsewhere)).start()
    message = str(caught.value)
    assert "None of the 2 initial_peers answered" in message
    assert f"{refused}: refused: nothing listens at this port" in message
    assert f"{elsewhere}: a program listens there, but not as this peer" in message


def test_one_live_peer_among_dead_ones_is_enough(bench: Bench) -> None:
    first = bench.network()
    first.start()
    peers = (f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}", *first.visible_addresses())
    bench.network(initial_peers=peers).start()


def test_a_peer_that_comes_up_after_the_first_attempt_is_joined(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    first = bench.network(identity_path=str(tmp_path / "key"), host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
    first.start()
    addresses = tuple(first.visible_addresses())
    first.shutdown()
    failures: list[BaseException] = []
    really = daemon.diagnosis.nobody_answered

    def nobody_answered(error: BaseException) -> bool:
        failures.append(error)
        first.start()
        return really(error)

    monkeypatch.setattr(daemon.diagnosis, "nobody_answered", nobody_answered)
    second = bench.network(initial_peers=addresses)
    second.start()
    assert len(failures) == 1
    assert second.is_alive()


def test_the_identity_makes_the_peer_id_and_two_live_peers_cannot_share_it(bench: Bench, tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    first = bench.network()
    first.start()
    second = bench.network(first, identity_path=path)
    second.start()
    peer_id = second.peer_id
    with pytest.raises(DaemonError, match="another live peer uses this identity"):
        bench.network(first, identity_path=path).start()
    second.shutdown()
    third = bench.network(first, identity_path=path)
    third.start()
    assert third.peer_id == peer_id


def test_ctrl_c_while_a_network_leaves_leaves_nothing_behind(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook lives on, and its next fit wants the same identity."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = str(tmp_path / "key")
    first = bench.network(identity_path=path)
    first.start()
    assert first.sockets is not None
    peer_id, folder, started = first.peer_id, first.sockets.path, [*first.sockets.daemon_pids(), first.dht.pid]
    monkeypatch.setattr(daemon, "_stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.shutdown()
    monkeypatch.undo()
    assert not folder.exists()
    deadline = time.monotonic() + 5.0
    while any(state_of(pid) not in ("Z", "") for pid in started):
        assert time.monotonic() < deadline, started
        time.sleep(0.05)
    again = bench.network(identity_path=path)
    again.start()
    assert again.peer_id == peer_id


@pytest.mark.parametrize("joins", [False, True], ids=["first", "told to join itself"])
def test_an_identity_in_use_on_this_machine_is_refused_though_nobody_is_asked(
    joins: bool, bench: Bench, tmp_path: Path
) -> None:
    """Both would be the first of a run of their own, and train apart without a word."""
    path = str(tmp_path / "key")
    first = bench.network(identity_path=path)
    first.start()
    own = tuple(first.visible_addresses()) if joins else ()
    with pytest.raises(DaemonError, match="another live peer uses this identity"):
        bench.network(identity_path=path, initial_peers=own).start()
    assert first.is_alive()
    first.shutdown()
    again = bench.network(identity_path=path, initial_peers=own)
    again.start()
    assert again.is_alive()


def test_a_peer_told_to_join_only_itself_is_the_first(bench: Bench, tmp_path: Path) -> None:
    network = bench.network(identity_path=str(tmp_path / "key"))
    network.start()
    own = tuple(network.visible_addresses())
    network.shutdown()
    again = bench.network(identity_path=str(tmp_path / "key"), initial_peers=own)
    again.start()
    assert again.is_alive()


def test_unusable_identity_files_are_refused_before_anything_starts(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match=r"the directory '.*/missing' does not exist"):
        bench.network(identity_path=str(tmp_path / "missing" / "key")).start()
    with pytest.raises(DaemonError, match="is a directory"):
        bench.network(identity_path=str(tmp_path)).start()
    (tmp_path / "text").write_text("not a key")
    with pytest.raises(DaemonError, match="holds no libp2p private key"):
        bench.network(identity_path=str(tmp_path / "text")).start()


def test_an_address_of_another_machine_cannot_be_listened_on(bench: Bench) -> None:
    with pytest.raises(DaemonError, match=r"(?s)host_maddrs=.*203\.0\.113\.7.*cannot assign requested address"):
        bench.network(host_maddrs=("/ip4/203.0.113.7/tcp/0",)).start()


def test_a_removed_directory_of_sockets_is_seen(bench: Bench) -> None:
    """Nothing new reaches the daemon then: rounds fail one after another, and hold up the others."""
    network = bench.network()
    network.start()
    assert network.is_alive()
    shutil.rmtree(network.sockets.path)
    assert not network.is_alive()


def test_a_temporary_directory_that_torch_cannot_use_is_said_in_words() -> None:
    module = "lightning_hivemind.network.shared_memory"
    code = f"import hivemind; from {module} import start_shared_memory; start_shared_memory()"
    roots = os.pathsep.join([str(Path(daemon.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": roots, "TMPDIR": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lightning_hivemind.errors.DaemonError"), done.stderr
    assert "TMPDIR='/nonexistent'" in last


def test_the_death_of_the_daemon_is_seen(bench: Bench) -> None:
    network = bench.network()
    network.start()
    (pid,) = network.sockets.daemon_pids()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while network.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    network.shutdown()
