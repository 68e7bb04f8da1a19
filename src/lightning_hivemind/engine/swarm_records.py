"""What peers of this package tell each other besides gradients: their model's schema, their role, their metrics."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.errors import ArgumentError, SchemaMismatchError
from lightning_hivemind.network.daemon import PeerNetwork
from lightning_hivemind.network.records import PeerRecords

log = logging.getLogger("lightning_hivemind")

LOOK_S = 5.0
PRINTS = 4  # hexadecimal digits: enough to say which one differs
# These fill a record (``network.records.MAX_RECORD_BYTES``), as a test shows.
MAX_PRINTED = 136  # tensors, or as many groups of them; the digest decides anyway
MAX_METRICS = 20
MAX_NAME_BYTES = 40
MAX_WAY = 120  # characters; the digest decides anyway


class SwarmRecords:
    """This peer's record in the DHT, and what the others' records say. Stock peers have none.

    Args:
        schema: see :class:`~lightning_hivemind.engine.base.PeerTraining`.
        way: how it is averaged: the engine, and whatever of its settings must be equal.
        outside: as ``schema``.
    """

    def __init__(
        self,
        arguments: Arguments,
        network: PeerNetwork,
        schema: Sequence[str],
        way: str,
        outside: tuple[str, str] = ("", ""),
    ) -> None:
        self._a, self._schema, self._way, self._peer_id = arguments, list(schema), way, network.peer_id
        self._joins = network.joins
        self._outside = outside
        self._records = PeerRecords(network.dht, arguments.run_id, network.peer_id)
        self._metrics: dict[str, list[float]] = {}

    def check_schema(self) -> None:
        """Publish, then compare with the live peers: of two that start at the same time, one sees the other.

        Raises:
            SchemaMismatchError: another peer trains another model, has another target, or averages otherwise.
        """
        mine, (name, print_) = self._own_schema(), self._outside
        role = "auxiliary" if self._a.auxiliary else "trainer" if self._joins else "founder"
        self._records.publish(schema=mine, role=role, outside=print_ or None)
        self._records.refresh(LOOK_S)
        for peer, record in self._others().items():
            theirs = record.get("schema")
            if isinstance(theirs, dict):
                self._compare(peer, mine, theirs)
            if print_ and record.get("outside") != print_ and "auxiliary" not in (role, record.get("role")):
                log.warning(
                    "peer %s has other values in the parameters that are not in the optimizer (%s and so on). They are"
                    " neither averaged nor handed to peers that join. Give all peers the same (a checkpoint, or"
                    " seed_everything before the module is made), or give them to the optimizer, too: frozen ones"
                    " (requires_grad=False) are then handed to who joins",
                    peer,
                    name,
                )

    @property
    def run(self) -> str:
        """The run's id, and what else peers must have in common to average: others never hear of one another by it."""
        mine = self._own_schema()
        return f"{self._a.run_id}.{mine['digest'][:16]}.{mine['target']}"

    @property
    def auxiliaries(self) -> list[str]:
        """Other live peers that only help to average."""
        return self._with_role("auxiliary")

    @property
    def founders(self) -> set[str]:
        """Ids of other live peers that train, and joined nobody: the run begins with their parameters."""
        return set(self._with_role("founder"))

    @property
    def peers(self) -> set[str]:
        """Ids of all other live peers that use this package."""
        return set(self._others())

    @property
    def trainers(self) -> set[str]:
        """Ids of other live peers that train."""
        return self.peers - set(self.auxiliaries)

    def mean(self, name: str, value: float, samples: int, alive: Collection[str] | None = None) -> float:
        """Publish ``value`` and return the mean of every live peer's latest one, weighted by samples.

        Without samples it is not published, and returned where there is no other one. ``alive``: other peers that live,
        where that is known better than by records, which stay for half a minute.

        Raises:
            ArgumentError: too many names, or too long a one. What was published before stays.
        """
        metrics = {**self._metrics, name: [float(value), float(samples)]}
        if len(name.encode()) > MAX_NAME_BYTES or len(metrics) > MAX_METRICS:
            raise ArgumentError(
                f"swarm_mean(name={name!r}): at most {MAX_METRICS} names of at most {MAX_NAME_BYTES} bytes, because"
                " every peer keeps them in one small record. Use fewer, or shorter ones."
            )
        pairs = []
        if samples > 0:
            self._records.publish(metrics=metrics)
            self._metrics = metrics
            pairs.append((float(value), float(samples)))
        for peer, record in self._others().items():
            if alive is None or peer in alive:
                pairs.extend(_metric(record, name))
        weight = sum(samples for _, samples in pairs)
        return sum(v * s for v, s in pairs) / weight if weight > 0 else float(value)

    def close(self, timeout_s: float) -> None:
        self._records.close(timeout_s)

    def _others(self) -> dict[str, dict[str, Any]]:
        return {peer: record for peer, record in self._records.read().items() if peer != self._peer_id}

    def _with_role(self, role: str) -> list[str]:
        return [peer for peer, record in self._others().items() if record.get("role") == role]

    def _own_schema(self) -> dict[str, Any]:
        digest = hashlib.sha256("\n".join([*self._schema, self._way]).encode()).hexdigest()[:32]
        shown = {"prints": "".join(_print(group) for group in self._groups()), "entries": len(self._schema)}
        return {"digest": digest, **shown, "target": self._a.target_batch_size, "way": self._way[:MAX_WAY]}

    def _groups(self) -> list[list[str]]:
        """The schema in as many parts as a record has room for."""
        size = _group_size(len(self._schema))
        return [self._schema[start : start + size] for start in range(0, len(self._schema), size)]

    def _compare(self, peer: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        if theirs.get("target") != mine["target"]:
            raise SchemaMismatchError(
                f"run_id={self._a.run_id!r}: peer {peer} accumulates to target_batch_size={theirs.get('target')},"
                f" this one to {mine['target']}. Give all peers the same, or this run another run_id."
            )
        if theirs.get("way") != mine["way"]:
            raise SchemaMismatchError(
                f"run_id={self._a.run_id!r}: peer {peer} averages by {str(theirs.get('way'))[:MAX_WAY]}, this one by"
                f" {mine['way']}. Give all peers the same engine and codecs, or this run another run_id."
            )
        if theirs.get("digest") == mine["digest"]:
            return
        raise SchemaMismatchError(
            f"run_id={self._a.run_id!r}: peer {peer} trains another model. {self._difference(theirs)}"
            " All peers of a run must train the same model; give this one another run_id."
        )

    def _difference(self, theirs: dict[str, Any]) -> str:
        prints, entries = theirs.get("prints"), theirs.get("entries")
        if not isinstance(prints, str) or not isinstance(entries, int):
            return "What differs it does not say."
        if _group_size(entries) == _group_size(len(self._schema)):
            others = [prints[start : start + PRINTS] for start in range(0, len(prints), PRINTS)]
            for group, other in zip(self._groups(), others, strict=False):
                if _print(group) != other:
                    here = " ... ".join(dict.fromkeys((group[0], group[-1])))
                    return f"What differs first is: {here} here, and something else there."
        return f"It has {entries} entries, this one has {len(self._schema)}."


def _group_size(entries: int) -> int:
    return max(1, math.ceil(entries / MAX_PRINTED))


def _print(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:PRINTS]


def _metric(record: dict[str, Any], name: str) -> list[tuple[float, float]]:
    metrics = record.get("metrics")
    pair = metrics.get(name) if isinstance(metrics, dict) else None
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return []
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in pair) or pair[1] <= 0:
        return []
    return [(float(pair[0]), float(pair[1]))]
