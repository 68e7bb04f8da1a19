"""Runs one turn: starts its processes, waits for the measurement, stops everything, reads what they wrote."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing as mp
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from bench_led import led_rounds
from bench_machine import cpu_seconds_below
from bench_spec import TurnSpec, json_lines, outcomes_of
from bench_stats import Round, rounds_of_marks, whole_share

# Forks every peer from one process that has torch and Lightning imported, but not hivemind: its locks are made on
# import and must not be shared by peers.
STARTER = mp.get_context("forkserver")
STARTER.set_forkserver_preload(["bench_peer"])
OVERTIME = 1.25  # a window ends here, in the middle of a step if need be
GRACE_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.05
#: how a failure begins where nothing else went wrong
NO_STEP, NO_WHOLE_STEP = "no global step", "no whole step"


@dataclass(kw_only=True)
class Turn:
    """What one turn brought. ``failure`` says why there is no measurement; the numbers are then NaN or empty.

    Attributes:
        step_s: seconds per global step, from the first end of one within the window to the last; the one after it,
            which the window's end has cut off, counts if it was longer than that.
        cpu_s: processor seconds of all processes of all peers per global step: the window's, by the share of its time.
        rounds: of each peer, within the window, which begins and ends with a step of peer 0.
        sent_bytes: per peer and global step: of each one where peers have lines of their own, else the mean of all,
            which is what went through loopback.
        led_messages, led_bytes: of the coordinator of each round; where peers have lines of their own.
        history: the same from the peer's first step to the end of the turn, measured or not.
    """

    spec: TurnSpec
    repeat: int
    load: float
    steps: int = 0
    step_s: float = math.nan
    cpu_s: float = math.nan
    total_s: float = math.nan
    rounds: list[list[Round]] = field(default_factory=list)
    history: list[list[Round]] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    led_messages: list[float] = field(default_factory=list)
    led_bytes: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def whole_step_s(self) -> float:
        """Seconds of the window per whole round of peer 0: steps made alone or taken over are no progress together."""
        whole, _ = whole_share(self.rounds[0], self.spec.peers) if self.rounds else (0, 0)
        return self.step_s * self.steps / whole if whole else math.nan

    @property
    def all_rounds(self) -> list[Round]:
        return [one for peer in self.rounds for one in peer]


def run_turn(spec: TurnSpec, repeat: int, keep: Path | None = None) -> Turn:
    """Never raises for what a contender does: a turn that fails is a result.

    Args:
        keep: folder in which the processes' files are kept; they are deleted otherwise.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=keep))
    turn = Turn(spec=spec, repeat=repeat, load=os.getloadavg()[0])
    start = time.monotonic()
    spec.save(folder / "spec.json")
    with networks_of(spec) as networks:
        peers = start_all(spec, folder, networks)
        try:
            turn.failure = _wait(spec, folder, peers)
        finally:
            stop_all(peers)
    read_turn(turn, folder)
    turn.total_s = time.monotonic() - start
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return turn


def networks_of(spec: TurnSpec) -> AbstractContextManager[Sequence[Any]]:
    """A namespace for each peer where their lines are limited, else None for each."""
    if not spec.uplink_mbit_s:
        return contextlib.nullcontext([None] * spec.peers)
    from swarm.namespaces import homes  # tests/: `make bench` has it in its path

    return homes(spec.peers, spec.uplink_mbit_s)


def start_all(spec: TurnSpec, folder: Path, networks: Sequence[Any]) -> list[BaseProcess]:
    """All peers of a turn. ``spec`` must lie in ``folder``."""
    ranks: list[dict[str, str]] = [{} for _ in range(spec.peers)]
    if spec.kind == "ddp":
        from swarm.ports import free_port  # tests/, as above

        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(spec.peers)}
        ranks = [{**world, "NODE_RANK": "0", "LOCAL_RANK": str(index)} for index in range(spec.peers)]
    return [start_peer(folder, index, rank, networks[index]) for index, rank in enumerate(ranks)]


def start_peer(folder: Path, index: int, rank: Mapping[str, str], network: Any = None) -> BaseProcess:
    """One process. ``rank``: what DDP looks for in its environment."""
    env = {
        **rank,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "INITIAL_PEERS": "",
        "PL_INITIAL_PEERS": "",
        "LIGHTNING_HIVEMIND_EVENTS": str(folder / f"events-{index}.jsonl"),
    }
    if network is not None:
        env["BENCH_ADDRESS"] = network.address
    peer = STARTER.Process(target=peer_process, args=(folder, index, env, network))
    peer.start()
    return peer


def peer_process(folder: Path, index: int, env: dict[str, str], network: Any) -> None:
    """What runs in a new process, with output of its own from the first line on."""
    if network is not None:
        network.enter()
    with open(folder / f"log-{index}.txt", "wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    os.environ.update(env)
    random.seed()  # every fork has the same state of it, and hivemind draws the ids of DHT nodes from it
    mp.set_start_method("fork", force=True)  # what an ordinary script has, and what hivemind needs
    import bench_peer

    bench_peer.main(folder, index)


def _wait(spec: TurnSpec, folder: Path, peers: list[BaseProcess]) -> str:
    """Until the window is written. Returns why it is not, or nothing."""
    begin, opened = time.monotonic(), None
    while not (folder / "window.json").exists():
        for index, peer in enumerate(peers):
            if not peer.is_alive():
                return f"peer {index} ended with status {peer.exitcode}: {_last_line(folder / f'log-{index}.txt')}"
        if opened is None:
            opened = _opened_window(folder, force=time.monotonic() - begin > spec.start_s)
        elif time.time() - opened["time"] > OVERTIME * spec.window_s:
            return _close_window(folder, opened)
        time.sleep(POLL_S)
    return ""


def _opened_window(folder: Path, *, force: bool) -> dict[str, float] | None:
    """What peer 0 wrote when it began to measure; with ``force`` the measurement begins now if it did not."""
    path = folder / "opened.json"
    if path.exists():
        opened: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return opened
    marks = json_lines(folder / "marks-0.jsonl")
    if not force:
        return None
    starter = psutil.Process(mp.active_children()[0].pid).ppid()
    epoch = marks[-1]["epoch"] if marks else 0
    return {"time": time.time(), "epoch": epoch, "cpu_s": cpu_seconds_below(starter), "starter": starter}


def _close_window(folder: Path, opened: dict[str, float]) -> str:
    """A step hangs: end the window now, with the steps that were made."""
    now, cpu_s = time.time(), cpu_seconds_below(int(opened["starter"]))
    marks = json_lines(folder / "marks-0.jsonl")
    epoch = marks[-1]["epoch"] if marks else 0
    if epoch == opened["epoch"]:
        return f"{NO_STEP} within {now - opened['time']:.0f} s"
    window = {"first": opened, "last": {"time": now, "epoch": epoch, "cpu_s": cpu_s}}
    (folder / "window.json").write_text(json.dumps(window), encoding="utf-8")
    return ""


def stop_all(peers: list[BaseProcess]) -> None:
    """Ask politely, then make sure: also of what the peers started and perhaps left behind."""
    family: dict[int, psutil.Process] = {}
    for peer in peers:
        if peer.is_alive():
            me = psutil.Process(peer.pid)
            family.update({one.pid: one for one in [me, *me.children(recursive=True)]})
            peer.terminate()
    deadline = time.monotonic() + GRACE_S
    for peer in peers:
        peer.join(max(0.0, deadline - time.monotonic()))
        if peer.is_alive():
            family.update({one.pid: one for one in psutil.Process(peer.pid).children(recursive=True)})
    managers = [process for process in family.values() if _frees_shared_memory(process)]
    for process in family.values():
        if process not in managers:
            _kill(process)
    for process in psutil.wait_procs(managers, GRACE_S)[1]:  # they remove what the others have left, gigabytes perhaps
        _kill(process)
    for peer in peers:
        peer.join()
    for pid in family:  # what was killed in the middle of a round of hivemind's leaves gigabytes, which the next needs
        for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _frees_shared_memory(process: psutil.Process) -> bool:
    try:
        return process.name() == "torch_shm_manager"[:15]  # so much of a name the kernel keeps
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()  # psutil checks that the pid still means the same process


def read_turn(turn: Turn, folder: Path) -> None:
    """What the processes have written in ``folder``."""
    marks_of = [json_lines(folder / f"marks-{index}.jsonl") for index in range(turn.spec.peers)]
    for index, marks in enumerate(marks_of if turn.spec.swarm else ()):
        turn.history.append(rounds_of_marks(marks, outcomes_of(turn.spec, folder, index)))
    window_path = folder / "window.json"
    if turn.failure or not window_path.exists():
        return
    window = json.loads(window_path.read_text(encoding="utf-8"))
    first, last = window["first"], window["last"]
    ends = [one for one in marks_of[0] if first["time"] <= one["time"] <= last["time"]]
    if len(ends) < 2:
        turn.failure = f"{NO_WHOLE_STEP} within {last['time'] - first['time']:.0f} s"
        return
    begin, end = ends[0]["time"], ends[-1]["time"]
    turn.steps = int(ends[-1]["epoch"] - ends[0]["epoch"])
    if turn.steps < 1:
        turn.failure = f"steps were undone: {turn.steps} in all"
        return
    # the one that was cut off takes so long at least: it may hang
    turn.step_s = max((end - begin) / turn.steps, (last["time"] - begin) / (turn.steps + 1))
    turn.cpu_s = (last["cpu_s"] - first["cpu_s"]) / (last["time"] - first["time"]) * turn.step_s
    for index, every in enumerate(marks_of):
        marks = [one for one in every if one["time"] <= begin][-1:]
        marks += [one for one in every if begin < one["time"] <= end]
        turn.rounds.append(rounds_of_marks(marks, outcomes_of(turn.spec, folder, index)))
        if len(marks) > 1 and (turn.spec.uplink_mbit_s or index == 0):
            sent = (marks[-1]["sent"] - marks[0]["sent"]) / (marks[-1]["epoch"] - marks[0]["epoch"])
            turn.sent_bytes.append(sent if turn.spec.uplink_mbit_s else sent / turn.spec.peers)
        notes = json_lines(folder / f"led-{index}.jsonl")
        for messages, size_bytes in led_rounds([one for one in notes if begin < one["time"] <= end]):
            turn.led_messages.append(messages)
            turn.led_bytes.append(size_bytes)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no output"
