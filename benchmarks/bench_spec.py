"""What one turn of the benchmark runs: plain values, handed to the peers as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 1000
LAYER_PARAMETERS = WIDTH * WIDTH


class Case(NamedTuple):
    """Contenders are compared within the same case only."""

    layers: int
    peers: int
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class TurnSpec:
    """Start ``peers`` processes, let them make steps, measure, stop them.

    Attributes:
        contender: its name in the tables.
        kind: ``"ours"`` (Trainer with HivemindStrategy), ``"ddp"`` (the same Trainer with DDPStrategy over gloo),
            ``"alone"`` (as many plain Trainers that know nothing of one another) or ``"stock"``
            (``hivemind.Optimizer`` in a plain loop, which it was made for).
        peers: processes, one thread each.
        layers: square linear layers of a million weights each; 0: one layer of ten.
        batch_samples, batches: samples of one batch, and batches that each peer gives to a global step, whose target
            is the product of both and ``peers``.
        batch_s: every batch sleeps so long, as if an accelerator computed it: it leaves the cores to the averaging.
        options: arguments of the strategy or of ``hivemind.Optimizer``.
        codec: name in ``lightning_hivemind`` of the codec of gradients; empty: none.
        value_bytes: what it makes of a float32, headers and scales apart.
        warm: global steps of every peer before the measurement begins.
        steps, window_s: the measurement ends after so many steps, or with the first step after so many seconds.
        once: run until it was measured once, because a turn takes long.
        uplink_mbit_s: every peer has a network of its own, and sends no faster than that (10^6 bits per second); 0: all
            talk over loopback.
    """

    contender: str
    kind: str
    peers: int = 2
    layers: int = 0
    batch_samples: int = 4
    batches: int = 4
    batch_s: float = 0.025
    options: dict[str, Any] = field(default_factory=dict)
    codec: str = ""
    value_bytes: float = 4.0
    warm: int = 2
    steps: int = 20
    window_s: float = 20.0
    once: bool = False
    uplink_mbit_s: float = 0.0

    @property
    def parameters(self) -> int:
        return self.layers * LAYER_PARAMETERS if self.layers else 10

    @property
    def target_samples(self) -> int:
        return self.peers * self.batches * self.batch_samples

    @property
    def start_s(self) -> float:
        """The measurement begins at the latest now, whether peers got going or not."""
        return 90.0 if self.uplink_mbit_s else 35.0

    @property
    def case(self) -> Case:
        return Case(self.layers, self.peers, self.batches * self.batch_s)

    @property
    def ideal_bytes(self) -> float:
        """The least that a peer must send of a gradient for all to have the average: 2(n-1)/n of it."""
        return 2 * (self.peers - 1) / self.peers * self.parameters * self.value_bytes

    @property
    def swarm(self) -> bool:
        """Whether its peers have rounds, which may be whole or not."""
        return self.kind in ("ours", "stock")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> TurnSpec:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def outcomes_of(spec: TurnSpec, folder: Path, index: int) -> list[Mapping[str, float]]:
    """One peer's rounds of gradients (stock with local updates: of parameters) so far.

    Each has ``time``, ``contributors``, ``fraction`` and, for ours, ``wait_s``.
    """
    if spec.kind == "stock":
        return json_lines(folder / f"outcomes-{index}.jsonl")
    commits = [one for one in json_lines(folder / f"events-{index}.jsonl") if one["event"] == "EpochCommitted"]
    return [{**one, "wait_s": one["duration_s"]} for one in commits]


def json_lines(path: Path) -> list[Any]:
    """Lines of a file that may not be there yet, and whose last line may not be whole yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
