"""Starts, watches, hurts and cleans up the peers of a swarm test. The fixture ``swarm`` (conftest.py) is the way in.

    def test_two_peers_agree(swarm):
        first, second = swarm.start(2, model={"lr": 0.1}, trainer={"max_steps": 5})
        swarm.finish()
        assert first.commits[5].digest == second.commits[5].digest

Everything that a peer says goes to one file of JSON lines: the strategy's events, and the records that the callbacks
in ``peer_main.py`` add. Waiting is always for a condition and with a deadline; a peer that ends while it is waited for
fails the test at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm.processes import Footprint, descendants, footprint, parent_of, state_of, still_there, wait_until
from swarm.spec import ENDLESS, PeerSpec, file_of

#: how long a test waits for a peer to end and for nothing of it to be left. No promise: on a busy machine all takes
#: several times as long. Leaving within PROMISED_S is one, judged by what the peer itself measured (``left``).
CLEAN_S = 30.0
PROMISED_S = 10.0
#: bound of the imports of a zygote
ZYGOTE_S = 120.0
#: bound of a start: daemon, DHT, averagers, on a busy machine
START_S = 60.0
#: bound of one global step on a busy machine, at the settings of :data:`QUICK`
STEP_S = 40.0

#: short rounds for loopback; tests of defaults do not use it
QUICK: dict[str, Any] = {"matchmaking_time": 2.0, "averaging_timeout": 15.0}

Record = dict[str, Any]


class PeerFailed(AssertionError):
    """A peer ended, or said something else, than the test waited for."""


@dataclass(frozen=True)
class Commit:
    """What a peer recorded at the end of the batch after which it was at ``epoch``.

    Of a step that came together with a later one, in one batch, what was recorded when it was made: ``global_step`` is
    then that before the batch.

    ``samples`` are the indices of all samples that this peer has in that step, by batch; ``of`` the epoch whose
    parameters each batch saw; ``lost`` the samples that it had gathered for the step and dropped. ``adopted``: the
    state came from another peer.
    """

    epoch: int
    digest: str
    samples: list[list[int]]
    of: list[int]
    lost: list[list[int]]
    lr: float
    global_step: int
    adopted: bool
    loss: float
    time: float

    @property
    def indices(self) -> list[int]:
        return [index for batch in self.samples for index in batch]


class Zygotes:
    """One zygote per set of imports, started when first needed."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}

    def submit(self, flavour: str, job: dict[str, Any]) -> None:
        """Hand a job over; the zygote forks at once."""
        zygote = self._running.get(flavour)
        if zygote is None:
            here = Path(__file__).resolve().parents[1]
            roots = [str(here), *filter(None, [os.environ.get("PYTHONPATH")]), str(here.parent / "src")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}
            zygote = subprocess.Popen(
                [sys.executable, "-m", "swarm.zygote", flavour],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True,
            )  # fmt: skip
            self._running[flavour] = zygote
            try:
                _await_ready(zygote, flavour)
            except BaseException:
                del self._running[flavour]
                zygote.kill()
                zygote.wait()
                raise
        assert zygote.stdin is not None
        zygote.stdin.write(json.dumps(job) + "\n")
        zygote.stdin.flush()

    def close(self) -> None:
        for zygote in self._running.values():
            assert zygote.stdin is not None
            zygote.stdin.close()  # ends its loop; its supervisors get SIGTERM and kill what is left
            try:
                zygote.wait(10)
            except subprocess.TimeoutExpired:
                zygote.kill()
                zygote.wait()


def _await_ready(zygote: subprocess.Popen[str], flavour: str) -> None:
    assert zygote.stdout is not None
    if not select.select([zygote.stdout], [], [], ZYGOTE_S)[0]:
        raise RuntimeError(f"the zygote for {flavour!r} still imports after {ZYGOTE_S:.0f} s")
    if zygote.stdout.readline() != "ready\n":
        raise RuntimeError(f"the zygote for {flavour!r} did not start: see its output above")


class Peer:
    """One process tree of a test: a trainer with all that it starts."""

    def __init__(self, name: str, folder: Path, spec: PeerSpec) -> None:
        self.name, self.folder, self.spec = name, folder, spec
        self.seen = Footprint()
        self._records: list[Record] = []
        self._read = 0
        self._closed = False
        self.pid = self.supervisor = self.rank = 0

    # -- what it says -------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[Record]:
        """Everything said so far, events and records, in order."""
        path = self.folder / file_of(self.rank, "records.jsonl")
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._read)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            self._records += [json.loads(line) for line in whole.splitlines()]
        return self._records

    def said(self, name: str, **fields: Any) -> list[Record]:
        """All records called ``name`` whose fields have these values."""
        return [r for r in self.records if r["event"] == name and all(r.get(k) == v for k, v in fields.items())]

    def waits_in_a_round(self, seconds: float) -> bool:
        """Whether its last round began so long ago, and has not ended."""
        started = self.said("RoundStarted")
        open_ = started and not self.said("EpochCommitted", epoch=started[-1]["epoch"] + 1)
        return bool(open_) and started[-1]["time"] < time.time() - seconds

    @property
    def commits(self) -> dict[int, Commit]:
        """By epoch. An epoch that the peer skipped (it took the swarm's state) is missing."""
        keys = Commit.__dataclass_fields__
        last = max((r["epoch"] for r in self.said("commit")), default=-1)
        records = [r for r in self.said("step") if r["epoch"] < last] + self.said("commit")
        found = {r["epoch"]: Commit(**{k: r[k] for k in keys}) for r in records}
        return dict(sorted(found.items()))

    def parameters(self, epoch: int | str) -> np.ndarray:
        """All parameters in one float64 vector, as they were when the commit of ``epoch`` was recorded.

        -1: after the fit; ``"validated_<batch>"``: when validation after so many batches ended.
        """
        flat: np.ndarray = np.load(self.folder / file_of(self.rank, f"parameters_{epoch}.npy"))
        return flat

    def of_rank(self, rank: int) -> Peer:
        """What another rank of this peer says."""
        view = Peer(f"{self.name} rank {rank}", self.folder, self.spec)
        view.rank = rank
        return view

    @property
    def output(self) -> str:
        path = self.folder / "output.txt"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait_for(self, name: str, *, timeout_s: float = STEP_S, **fields: Any) -> Record:
        """The first record called ``name`` with these values."""
        wanted = ", ".join([name, *(f"{k}={v!r}" for k, v in fields.items())])
        self.wait_until(lambda: bool(self.said(name, **fields)), timeout_s=timeout_s, what=wanted)
        return self.said(name, **fields)[0]

    def wait_epoch(self, epoch: int, *, timeout_s: float = STEP_S) -> Commit:
        """The first commit at ``epoch`` or later."""
        self.wait_until(lambda: max(self.commits, default=-1) >= epoch, timeout_s=timeout_s, what=f"epoch {epoch}")
        return min((c for c in self.commits.values() if c.epoch >= epoch), key=lambda c: c.epoch)

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Wait while the peer lives; raises PeerFailed with the stacks of its threads when the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            code = self.exit_code
            if code is not None and not condition():
                raise PeerFailed(f"{self.name} ended with {code} before: {what}\n{self._tail()}")
            if time.monotonic() > deadline:
                self.dump_stacks()
                raise PeerFailed(f"{self.name}: after {timeout_s:.0f} s still not: {what}\n{self._tail()}")
            time.sleep(0.02)

    @property
    def exit_code(self) -> int | None:
        """Of the trainer process; minus the signal that ended it; None while it runs."""
        path = self.folder / "exit"
        return int(path.read_text(encoding="ascii")) if path.exists() else None

    def wait_exit(self, *, timeout_s: float = CLEAN_S, code: int | None = 0) -> int:
        """Wait until the trainer has ended (with ``code``, unless None) and nothing of it is left."""
        try:
            wait_until(lambda: self.exit_code is not None, timeout_s=timeout_s, what=f"{self.name} ends")
        except TimeoutError as error:
            self.dump_stacks()
            raise PeerFailed(f"{error}\n{self._tail()}") from None
        found = self.exit_code
        assert found is not None
        if code is not None and found != code:
            raise PeerFailed(f"{self.name} ended with {found}, not {code}\n{self._tail()}")
        self.assert_clean()
        return found

    def assert_clean(self, timeout_s: float = CLEAN_S) -> None:
        """The trainer has ended: no process, port or socket file of it is there any more.

        torch's manager of shared memory goes two seconds after its last client. That is not waited for, or every test
        would; ``test_network_lifetime.py`` sees that it goes.
        """

        def left() -> list[str]:
            below = footprint(descendants(self.supervisor)).processes if self.supervisor else {}
            found = [f"process {pid}: {command[:120]}" for pid, command in below.items()] + still_there(self.seen)
            return [one for one in found if "torch_shm_manager" not in one and "/torch-shm-dir-" not in one]

        try:
            wait_until(lambda: not left(), timeout_s=timeout_s, what=lambda: f"{self.name} left behind {left()}")
        except TimeoutError as error:
            raise PeerFailed(str(error)) from None

    # -- commands -----------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Let a peer with ``barrier`` take its first batch."""
        (self.folder / "go").touch()

    def release(self, epoch: int) -> None:
        """Let a peer go on that holds at the end of ``epoch``."""
        (self.folder / f"release_{epoch}").touch()

    def look(self) -> Footprint:
        """What the peer holds now; also remembered for the leak check."""
        now = footprint(descendants(self.supervisor))
        self.seen.merge(now)
        return now

    def process(self, part: str) -> int:
        """Pid of one of its processes: ``"daemon"``, ``"DHT"``, ``"averager 0"`` or ``"averager 1"``."""
        now = self.look()
        (daemon,) = now.named("p2pd")
        dht = parent_of(daemon)
        forks = [pid for pid in now.processes if parent_of(pid) == self.pid and pid not in now.named("torch_shm")]
        averagers = sorted(pid for pid in forks if pid != dht)
        found = {"daemon": daemon, "DHT": dht}
        if part not in found:
            assert len(averagers) == 2, now.processes
            found |= {"averager 0": averagers[0], "averager 1": averagers[1]}
        return found[part]

    def kill(self) -> None:
        """``kill -9`` of the trainer process alone; returns when it is dead."""
        self.look()
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: self.exit_code == -signal.SIGKILL, timeout_s=30, what=f"{self.name} dies of SIGKILL")

    def freeze(self) -> None:
        """Stop the whole tree where it is (as a laptop that sleeps); returns when every process stands still."""
        pids = descendants(self.supervisor)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # one that has just ended
                os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(state_of(p) in ("T", "") for p in pids), timeout_s=30, what=f"{self.name} is frozen")
        assert state_of(self.pid) == "T"

    def thaw(self) -> None:
        """Let a frozen peer go on."""
        assert state_of(self.pid) == "T", "only what is frozen can be thawed"
        for pid in descendants(self.supervisor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: state_of(self.pid) != "T", timeout_s=30, what=f"{self.name} is thawed")

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the trainer, or (as a terminal does) to its whole process group."""
        self.look()
        assert self.exit_code is None, f"{self.name} has ended already: the signal would hit nothing"
        if group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def dump_stacks(self) -> None:
        """Have the trainer print the stacks of its threads (faulthandler)."""
        if self.exit_code is None and self.pid and state_of(self.pid) not in ("T", ""):
            size = len(self.output)
            os.kill(self.pid, signal.SIGUSR1)
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: len(self.output) > size, timeout_s=2, what="stacks")

    def close(self) -> None:
        """End everything at once, whatever state it is in."""
        if not self._closed and self.supervisor:
            self._closed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.supervisor, signal.SIGTERM)
            what = f"supervisor {self.supervisor} of {self.name} ends"
            wait_until(lambda: state_of(self.supervisor) in ("", "Z"), timeout_s=30, what=what)
            for path in (path for path in self.seen.sockets if "/torch-shm-dir-" not in path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _tail(self) -> str:
        last = [f"  {json.dumps(r)[:300]}" for r in self.records[-12:]]
        return "\n".join([f"last records of {self.name}:", *last])

    def sections(self) -> Iterable[tuple[str, str]]:
        """What to show under a failed test."""
        records = [json.dumps(r)[:400] for r in self.records]
        yield f"{self.name}: output (exit status {self.exit_code})", self.output[-12000:]
        yield f"{self.name}: records", "\n".join(records[-60:])


class Swarm:
    """The peers of one test."""

    def __init__(self, zygotes: Zygotes, *, engine: str, folder: Path) -> None:
        self._zygotes, self.engine, self.folder = zygotes, engine, folder
        self.peers: list[Peer] = []

    def launch(self, spec: PeerSpec, *, name: str | None = None, argv: Sequence[str] | None = None,
               entry: str = "swarm.peer_main:main", sys_argv: Sequence[str] | None = None) -> Peer:  # fmt: skip
        """Start one process and return when it exists; ``argv`` runs a program instead of ``entry``."""
        name = name or f"peer{len(self.peers)}"
        folder = self.folder / name
        folder.mkdir()
        spec = replace(spec, engine=self.engine, folder=str(folder))
        spec.save(folder / "spec.json")
        environment: dict[str, str | None] = {
            "INITIAL_PEERS": None,
            "PL_INITIAL_PEERS": None,
            "LIGHTNING_HIVEMIND_EVENTS": str(folder / "events.jsonl"),
            **spec.env,
        }
        job = {"folder": str(folder), "env": environment, "entry": entry, "argv": argv, "sys_argv": sys_argv or [name],
               "network": spec.network}  # fmt: skip
        peer = Peer(name, folder, spec)
        self.peers.append(peer)
        self._zygotes.submit(spec.lightning, job)
        wait_until((folder / "pid").exists, timeout_s=30, what=f"{name} exists")
        peer.pid, peer.supervisor = map(int, (folder / "pid").read_text(encoding="ascii").split())
        return peer

    def start(self, count: int = 1, *, together: bool = True, peers: Sequence[dict[str, Any]] = (), quick: bool = True,
              **common: Any) -> list[Peer]:  # fmt: skip
        """Start ``count`` trainers that join through the first living one, and return when all are in the swarm.

        Args:
            together: hold all before their first batch until everybody is seen by everybody (``spec.barrier``).
            peers: what is special for each; dictionaries are merged into those of ``common``.
            quick: start from :data:`QUICK`.
            common: fields of :class:`PeerSpec`.
        """
        started: list[Peer] = []
        for number in range(count):
            special = peers[number] if number < len(peers) else {}
            fields: dict[str, Any] = {"order_seed": number, "barrier": together, "min_peers": count if together else 1}
            for part in ({"strategy": dict(QUICK)} if quick else {}, common, special):
                for key, value in part.items():
                    fields[key] = {**fields.get(key, {}), **value} if isinstance(value, dict) else value
            strategy = fields.setdefault("strategy", {})
            if self._living and "initial_peers" not in strategy and "INITIAL_PEERS" not in str(fields.get("env")):
                fields["strategy"] = {**strategy, "initial_peers": self.addresses()}
            peer = self.launch(PeerSpec(**fields))
            started.append(peer)
            if number == 0 and count > 1:
                self.addresses()
        for peer in started:
            peer.wait_for("at_barrier" if together else "SwarmReady", timeout_s=START_S)
            peer.look()
        if together:
            for peer in started:
                peer.go()
        return started

    def in_a_round_with_a_frozen_peer(self) -> Peer:
        """A peer in a round that will wait 40 s for another one, which is frozen."""
        waits = {"matchmaking_time": 40.0, "next_chunk_timeout": 2.0, "averaging_timeout": 120.0}
        first, second = self.start(2, trainer=ENDLESS, strategy=waits, delay_s=0.05)
        first.wait_epoch(1, timeout_s=90)
        second.freeze()
        self.wait_for_a_round(first)
        return first

    def wait_for_a_round(self, peer: Peer) -> None:
        """Until ``peer`` is in a round with one that is frozen: it may have begun while that was being frozen."""
        if self.engine == "native":  # which soon goes on without who is frozen, in rounds of milliseconds
            rounds = len(peer.said("RoundStarted"))
            peer.wait_until(lambda: len(peer.said("RoundStarted")) > rounds, timeout_s=90, what="a round")
        else:
            peer.wait_until(lambda: peer.waits_in_a_round(0.5), timeout_s=90, what="a round that goes on")

    def addresses(self) -> list[str]:
        """Addresses of the first living peer that others can join through."""
        return list(self._living[0].wait_for("PeerStarted", timeout_s=START_S)["addresses"])

    @property
    def _living(self) -> list[Peer]:
        joinable = [p for p in self.peers if p.spec.strategy is not None and not p.spec.strategy.get("client_mode")]
        return [peer for peer in joinable if peer.exit_code is None]

    def plain(self, **fields: Any) -> Peer:
        """Run a plain Trainer, without any strategy of ours, to its end."""
        fields.setdefault("order_seed", 0)
        peer = self.launch(PeerSpec(**{**fields, "strategy": None}), name=f"plain{len(self.peers)}")
        peer.wait_for("finished", timeout_s=60)
        peer.wait_exit()
        return peer

    def finish(self, *peers: Peer, timeout_s: float = 60.0) -> None:
        """Wait until these peers (default: all) end by themselves, with status 0 and nothing left behind."""
        for peer in peers or tuple(self.peers):
            if peer.exit_code is None:
                peer.wait_until(lambda p=peer: bool(p.said("finished")), timeout_s=timeout_s, what="fit has returned")
            peer.wait_exit()

    def report(self) -> list[tuple[str, str]]:
        return [section for peer in self.peers for section in peer.sections()]

    def close(self) -> None:
        """Check what ended by itself, then end the rest."""
        try:
            for peer in self.peers:
                if peer.exit_code is not None:
                    peer.assert_clean()
        finally:
            for peer in self.peers:
                peer.close()
