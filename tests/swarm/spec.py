"""What one peer of a swarm test runs: plain values, handed to the peer as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: for ``PeerSpec.trainer``: trains until it is stopped
ENDLESS = {"max_steps": -1, "max_epochs": -1}


@dataclass(kw_only=True)
class PeerSpec:
    """One peer.

    Attributes:
        scenario: what the process runs: ``"module:function"``, called with this spec. The default trains.
        lightning: the package whose Trainer is used, ``"lightning"`` or ``"pytorch_lightning"``; ``"both"`` imports
            both and uses the first.
        engine: given to the strategy.
        strategy: arguments of HivemindStrategy; ``None`` for a plain Trainer.
        strategy_code: more of them as Python expressions (codecs, factories), evaluated in the peer.
        trainer, trainer_code: the same for the Trainer; ``callbacks`` in ``trainer_code`` are added to the harness's.
        model: arguments of :func:`swarm.models.make_model`.
        ranks: processes of this peer, which train as its ``local_strategy`` says.
        batch_size, data_samples: of the training set, for each rank; the last batch of a pass may be smaller.
        order_seed: order in which this peer takes the samples; ``None``: as they lie.
        delay_s: sleep per batch, for peers of unequal speed.
        delay_from_batch: the first batch that is delayed.
        barrier: before its second batch, wait until the strategy sees ``min_peers``, then for :meth:`Peer.go`.
        hold_at: epochs at whose end the peer waits for :meth:`Peer.release`.
        ckpt_path: checkpoint to continue from.
        network: name of the network namespace in which the peer lives; "" for the test's own.
        env: more environment variables.
        free: whatever a scenario needs.
    """

    scenario: str = "swarm.peer_main:train"
    lightning: str = "lightning"
    engine: str = "native"
    strategy: dict[str, Any] | None = field(default_factory=dict)
    strategy_code: dict[str, str] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    trainer_code: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    batch_size: int = 8
    data_samples: int = 4096
    order_seed: int | None = None
    delay_s: float = 0.0
    delay_from_batch: int = 0
    barrier: bool = False
    min_peers: int = 1
    hold_at: list[int] = field(default_factory=list)
    ckpt_path: str | None = None
    network: str = ""
    env: dict[str, str] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)
    folder: str = ""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PeerSpec:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def file_of(rank: int, name: str) -> str:
    """Where a rank of a peer writes what the peer writes to ``name``."""
    stem, _, suffix = name.rpartition(".")
    return name if rank == 0 else f"{stem}_rank{rank}.{suffix}"
