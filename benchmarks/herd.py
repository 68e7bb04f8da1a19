"""Peers of one swarm to which things happen: started, killed, frozen, thawed and read by a benchmark."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_spec import json_lines

#: all have to come back at the end within so long
END_S = 60.0
START_S = 60.0
#: samples, and what a batch takes longer than it does where three are watched
BATCH, BATCH_S, TARGET = 4, 0.1, 64
#: of undisturbed training before something happens to such, and in which it shows
USUAL_S, AFTER_S = 6.0, 8.0
#: of the lines of peers that have networks of their own: no limit
LINE_MBIT_S = 10_000.0
WARM_STEPS = 10


@dataclass(kw_only=True, eq=False)
class Peer:
    """One process of ``herd_peer.py``. ``through``: the names of those by whose addresses it joins."""

    name: str
    process: subprocess.Popen[bytes]
    born: float
    through: frozenset[str] = frozenset()
    frozen: bool = False
    network: Any = None


class Herd:
    """Also a context: nothing of it lives on, and its folder is removed unless something went wrong.

    Args:
        target: samples of a global step.
        codec: name in ``lightning_hivemind`` of the codec of gradients, or of :data:`.herd_peer.CODECS`; empty: none.
        networks: ``swarm.namespaces.Namespace`` of one peer after another; none: all talk over loopback.
    """

    def __init__(self, target: int = TARGET, codec: str = "", networks: Sequence[Any] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="herd-"))
        self._options = ["--target", str(target), "--codec", codec]
        self._networks = list(networks)
        self.living: list[Peer] = []
        #: something is wrong: its files are to be read
        self.keep = False
        self._count = 0

    def __enter__(self) -> Herd:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for peer in self.living:
            peer.process.kill()  # what it has started ends with it
            peer.process.wait()
        if kind is None and not self.keep:
            shutil.rmtree(self.folder)
        else:
            print(f"the peers' files are in {self.folder}", file=sys.stderr)

    def start(self, batch_s: float = 0.0, dies: str = "", max_staleness: int = 1, batch: int = BATCH) -> Peer:
        """One more peer, which joins through those that live; its batches, of so many samples, take that much longer.

        ``dies``: of ``swarm.phases.MOMENTS``, at which its next round ends it; see :meth:`doom`.
        """
        name = f"peer{self._count}"
        self._count += 1
        known = self._addresses() if self.living else {}
        command = [sys.executable, str(Path(__file__).with_name("herd_peer.py")), str(self.folder), name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "INITIAL_PEERS": ""}
        with open(self.folder / f"{name}.log", "wb") as log:
            options = ["--join", ",".join(known.values()), "--batch-s", str(batch_s), "--dies", dies]
            options += ["--max-staleness", str(max_staleness), "--batch", str(batch), *self._options]
            network = self._networks.pop(0) if self._networks else None
            if network is not None:
                options += ["--address", network.address]
            enter = network.enter if network is not None else None
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment, preexec_fn=enter)
        through, now = frozenset(known), time.monotonic()
        self.living.append(Peer(name=name, process=process, born=now, through=through, network=network))
        return self.living[-1]

    def gather(self, count: int, batch_s: float) -> None:
        """So many more peers, each of which has trained for a while."""
        for _ in range(count):
            self.start(batch_s)
        for peer in list(self.living):
            self.await_steps(peer, WARM_STEPS)

    def check(self) -> None:
        """Raises RuntimeError if a peer has ended by itself."""
        for peer in self.living:
            if peer.process.poll() is not None:
                raise RuntimeError(f"{peer.name} ended with status {peer.process.returncode}: see {self.folder}")

    def watch(self, seconds: float) -> None:
        """Let them train for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(0.1, left))

    def kill(self, peer: Peer) -> None:
        peer.process.kill()
        peer.process.wait()
        self.living.remove(peer)

    def doom(self, peer: Peer, timeout_s: float) -> float:
        """Let the moment at which it dies come; returns when it did. Raises TimeoutError."""
        (self.folder / f"{peer.name}.die").touch()
        try:
            peer.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{peer.name} still lives after {timeout_s:.0f} s: see {self.folder}") from None
        self.living.remove(peer)
        return time.time()

    def freeze(self, peer: Peer) -> None:
        peer.process.send_signal(signal.SIGSTOP)
        peer.frozen = True

    def thaw(self, peer: Peer) -> None:
        peer.process.send_signal(signal.SIGCONT)
        peer.frozen = False

    def end(self) -> None:
        """All stop after the same step, or are killed a minute later."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + END_S
        for peer in self.living:
            try:
                peer.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                peer.process.kill()

    # ------------------------------------------------------------------ what they wrote

    def steps(self, peer: Peer) -> list[dict[str, Any]]:
        """``epoch``, ``time``, ``digest`` and ``loss`` of each global step."""
        return self._lines(peer, "jsonl")

    def trains(self, peer: Peer) -> bool:
        """Whether it has made a step."""
        path = self.folder / f"{peer.name}.jsonl"
        return path.exists() and path.stat().st_size > 0

    def digests(self, peer: Peer) -> dict[int, str]:
        """Of its parameters after each of its steps."""
        return {one["epoch"]: one["digest"] for one in self.steps(peer)}

    def events(self, peer: Peer, name: str) -> list[dict[str, Any]]:
        return [one for one in self._lines(peer, "events.jsonl") if one["event"] == name]

    def all_steps(self) -> list[dict[str, Any]]:
        """Those of all peers there have ever been."""
        names = [f"peer{number}" for number in range(self._count)]
        return [one for name in names for one in json_lines(self.folder / f"{name}.jsonl")]

    def unlike(self) -> list[int]:
        """Global steps after which two peers had other parameters."""
        digests: dict[int, set[str]] = {}
        for one in self.all_steps():
            digests.setdefault(one["epoch"], set()).add(one["digest"])
        return sorted(epoch for epoch, found in digests.items() if len(found) > 1)

    def counted_twice(self) -> int:
        """Samples that are in steps, with other peers or lost, beyond those of a peer's batches and those that others
        have handed to it, as all of them say.
        """
        told = [json_lines(self.folder / f"peer{number}.events.jsonl") for number in range(self._count)]
        carried = [one for events in told for one in events if one["event"] == "GradientCarried"]
        twice = 0
        for events in told:
            me = next((one["peer_id"] for one in events if one["event"] == "PeerStarted"), "")
            had = _total(events, "BatchAccumulated", "batch_samples") + _total(events, "GradientCarried")
            gone = _total(events, "GradientHandedOver") + _total(events, "RoundMissed", "samples_lost")
            # who was killed, or has lost the other one, has not told of all that others carry
            gone = max(gone, sum(one["samples"] for one in carried if one["peer"] == me))
            twice += max(0, _total(events, "EpochCommitted") + gone - had)
        return twice

    def await_steps(self, peer: Peer, count: int, timeout_s: float = START_S) -> None:
        """Until it has made so many. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while len(self.steps(peer)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{peer.name} has not made {count} steps in {timeout_s:.0f} s: see {self.folder}")
            self.watch(0.1)

    def _lines(self, peer: Peer, kind: str) -> list[dict[str, Any]]:
        return json_lines(self.folder / f"{peer.name}.{kind}")

    def _addresses(self) -> dict[str, str]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            paths = {peer.name: self.folder / f"{peer.name}.address" for peer in self.living if not peer.frozen}
            if known := {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.exists()}:
                return known
            self.watch(0.1)
        raise TimeoutError(f"no peer has an address after {START_S:.0f} s: see {self.folder}")


def _total(events: Sequence[Mapping[str, Any]], event: str, field: str = "samples") -> int:
    return sum(one[field] for one in events if one["event"] == event)
