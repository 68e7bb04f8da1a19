"""What the demo knows about one peer: read from the two files that the peer appends to, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds of training over which the samples per second of the live display are counted.
RATE_WINDOW_S = 15.0


class DemoError(Exception):
    """Why the demo cannot go on, or did not succeed; printed as one sentence."""


class JsonLines:
    """Reads a growing file of JSON lines; :meth:`new` yields what came since the last call, whole lines only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


@dataclass(frozen=True)
class Commit:
    """One global step as a peer saw it; ``time`` in Unix seconds."""

    time: float
    epoch: int
    contributors: int
    fraction: float
    duration_s: float


@dataclass
class PeerView:
    """One peer, as its files tell it. Times are Unix seconds, losses nats per byte."""

    name: str
    folder: Path
    state: str = "starting"
    address: str = ""
    epoch: int = 0
    num_peers: int = 0
    swarm_samples: int = 0
    target: int = 0
    joined_at: float | None = None
    train: list[tuple[float, float]] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    incomplete: int = 0
    notes: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events = JsonLines(self.folder / "events.jsonl")
        self._training = JsonLines(self.folder / "training.jsonl")

    def refresh(self) -> None:
        """Take in what the peer wrote since the last call."""
        for event in self._events.new():
            self._take_event(event)
        for line in self._training.new():
            self._take_line(line)

    @property
    def loss(self) -> float | None:
        return self.train[-1][1] if self.train else None

    @property
    def samples_per_s(self) -> float:
        """Over the last seconds, averaging included."""
        recent = [one for one in self.samples if one[0] >= self.samples[-1][0] - RATE_WINDOW_S]
        return _rate(recent)

    @property
    def samples_per_s_overall(self) -> float:
        """From the first batch to the last, averaging included."""
        return _rate(self.samples)

    @property
    def peers_per_step(self) -> float:
        """Mean number of peers whose gradients or parameters are in a step that this peer took part in."""
        return sum(one.contributors for one in self.commits) / len(self.commits) if self.commits else 0.0

    def _take_line(self, line: dict[str, Any]) -> None:
        self.samples.append((line["time"], line["samples"]))
        if line["kind"] in ("train", "held_out"):
            getattr(self, line["kind"]).append((line["time"], line["loss"]))

    def _take_event(self, event: dict[str, Any]) -> None:
        take = getattr(self, f"_on_{event['event']}", None)
        if take is not None:  # the stream has more kinds of events than the demo shows
            take(event)

    def _on_PeerStarted(self, event: dict[str, Any]) -> None:
        self.state, self.address = "joining", ",".join(event["addresses"])

    def _on_SwarmReady(self, event: dict[str, Any]) -> None:
        self.state, self.epoch, self.num_peers, self.joined_at = "training", *_of(event, "epoch", "num_peers", "time")
        self._note(event, f"joined at epoch {self.epoch}")

    def _on_PeersChanged(self, event: dict[str, Any]) -> None:
        self.num_peers = event["num_peers"]

    def _on_BatchAccumulated(self, event: dict[str, Any]) -> None:
        self.state = "training"
        self.epoch, self.num_peers = event["epoch"], event["num_peers"]
        self.swarm_samples, self.target = event["swarm_samples"], event["target_batch_size"]

    def _on_RoundStarted(self, event: dict[str, Any]) -> None:
        self.state = "averaging"

    def _on_EpochCommitted(self, event: dict[str, Any]) -> None:
        self.state, self.epoch, self.swarm_samples = "training", event["epoch"], 0
        self.commits.append(Commit(*_of(event, "time", "epoch", "contributors", "fraction", "duration_s")))

    def _on_BatchDropped(self, event: dict[str, Any]) -> None:
        self._note(event, f"dropped a batch of {event['samples']} samples: {event['reason']}")

    def _on_RoundIncomplete(self, event: dict[str, Any]) -> None:
        self.incomplete += 1
        self._note(event, f"round of {event['kind']} incomplete at epoch {event['epoch']}: {event['reason']}")

    def _on_RoundMissed(self, event: dict[str, Any]) -> None:
        self.state = "catching up"
        self._note(event, f"missed epoch {event['epoch']}, {event['samples_lost']} samples dropped")

    def _on_StateLoaded(self, event: dict[str, Any]) -> None:
        self.epoch = event["epoch"]
        self._note(event, f"downloaded the swarm's state of epoch {self.epoch} in {event['duration_s']:.1f} s")

    def _on_StepsUndone(self, event: dict[str, Any]) -> None:
        self._note(event, f"epochs {event['first']} to {event['last']} are undone, {event['samples']} samples lost")

    def _on_StateUnavailable(self, event: dict[str, Any]) -> None:
        self._note(event, f"no state to download: {event['reason']}; {event['action']}")

    def _on_Waiting(self, event: dict[str, Any]) -> None:
        self.state = "waiting"
        self._note(event, f"waits for {event['what']} ({event['elapsed_s']:.0f} s)")

    def _on_StopRequested(self, event: dict[str, Any]) -> None:
        self.state = "stopping"
        self._note(event, f"will stop after epoch {event['epoch']}")

    def _on_PeerStopped(self, event: dict[str, Any]) -> None:
        self.state = "stopped"

    def _note(self, event: dict[str, Any], text: str) -> None:
        self.notes.append((event["time"], text))


def _of(event: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(event[name] for name in names)


def _rate(samples: list[tuple[float, int]]) -> float:
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return 0.0
    return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
