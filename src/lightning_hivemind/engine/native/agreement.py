"""Do all peers still have the same parameters? Compared now and then, by digests in the peers' records (invariant I2).

Peers of one kind of hardware and software stay equal to the last bit, because all apply the same average. Unlike ones
may round differently in the optimizer, and a user's callback may change what it should not. Whoever differs from most
takes a state anew.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from lightning_hivemind.engine.base import PeerTraining
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId

#: steps between two comparisons, where ``average_state_every`` does not say more; a digest costs about 0.3 s per GB
EVERY = 64
#: comparisons that are remembered: records come seconds late, and steps may take a tenth of one
REMEMBERED = 32
PUBLISHED = 8
DIGEST_BYTES = 16
MAX_KIND = 100
#: unlike peers train for so many times as long as a state takes to come before they take the next one
REST = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """What was found at ``epoch``: ``peers`` have what this peer should have. ``like``: among peers of one kind."""

    epoch: int
    peers: frozenset[PeerId]
    like: bool


class Agreement:
    """See the module. Its methods may be called from any thread.

    Args:
        kind: see :func:`kind_of`.
        every: steps between two comparisons.
    """

    def __init__(self, me: PeerId, kind: str, every: int) -> None:
        self._me, self._kind, self._every = me, kind, every
        self._lock = threading.Lock()
        #: digests by place, newest last, and the kinds of the peers
        self._found: dict[tuple[int, bytes], dict[PeerId, bytes]] = {}
        self._kinds: dict[PeerId, str] = {me: kind}
        self._judged: set[tuple[int, bytes]] = set()
        #: until when unlike peers need not be equal
        self._rests_until = 0.0

    def due(self, head: Head) -> bool:
        """Whether parameters are compared at ``head``, and were not noted."""
        with self._lock:
            known = self._found.get((head.epoch, head.lineage), {})
        return head.epoch > 0 and head.epoch % self._every == 0 and self._me not in known

    def note(self, head: Head, tensors: Iterable[Tensor]) -> None:
        """These are the parameters here, at ``head``."""
        digest = digest_of_tensors(tensors)
        with self._lock:
            self._take(self._me, (head.epoch, head.lineage), digest)

    def record(self) -> list[Any]:
        """For the others: the kind, and epoch, lineage and digest of the last comparisons."""
        with self._lock:
            mine = [[*place, digests[self._me]] for place, digests in self._found.items() if self._me in digests]
            return [self._kind, mine[-PUBLISHED:]]

    def heard(self, peer: PeerId, value: Any) -> None:
        """Another peer's record; what is none is passed over."""
        if not isinstance(value, list) or len(value) != 2:
            return
        kind, found = value
        if not isinstance(kind, str) or len(kind) > MAX_KIND or not isinstance(found, list):
            return
        with self._lock:
            self._kinds[peer] = kind
            for one in found[:PUBLISHED]:
                if _is_comparison(one):
                    epoch, lineage, digest = one
                    self._take(peer, (epoch, lineage), digest)

    def present(self, peers: Collection[PeerId]) -> None:
        """Only these have records, besides this peer."""
        with self._lock:
            self._kinds = {peer: kind for peer, kind in self._kinds.items() if peer in peers or peer == self._me}

    def difference(self) -> Difference | None:
        """That this peer's parameters are not what most have; told once. Of unlike peers: not soon after :meth:`took`.

        Most: more than half of the peers that are known, or, where all have spoken, more than any others; between
        equals the smaller digest is right.
        """
        with self._lock:
            for place, found in reversed(self._found.items()):
                digests = {peer: digest for peer, digest in found.items() if peer in self._kinds}  # that are still here
                if not digests:
                    continue
                votes = Counter(digests.values())
                right = max(votes, key=lambda digest: (votes[digest], [-byte for byte in digest]))
                decided = 2 * votes[right] > len(self._kinds) or digests.keys() >= self._kinds.keys()
                if self._me not in digests or len(digests) == 1 or not decided:
                    continue
                if digests[self._me] == right or place in self._judged:
                    return None
                self._judged.add(place)
                peers = frozenset(peer for peer, digest in digests.items() if digest == right)
                like = any(self._kinds.get(peer) == self._kind for peer in peers)
                return Difference(place[0], peers, like) if like or time.monotonic() >= self._rests_until else None
        return None

    def took(self, seconds: float) -> None:
        """It took so long to get the parameters of the others: they shall not be all that goes over a slow line."""
        with self._lock:
            self._rests_until = time.monotonic() + REST * seconds

    def _take(self, peer: PeerId, place: tuple[int, bytes], digest: bytes) -> None:
        self._found.setdefault(place, {})[peer] = digest
        while len(self._found) > REMEMBERED:
            self._found.pop(next(iter(self._found)))
        self._judged &= self._found.keys()


def _is_comparison(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    epoch, lineage, digest = value
    sound = type(epoch) is int and isinstance(lineage, bytes) and len(lineage) <= 64
    return sound and isinstance(digest, bytes) and len(digest) == DIGEST_BYTES


def digest_of_tensors(tensors: Iterable[Tensor]) -> bytes:
    """Of all their bytes, in order."""
    found = blake3()
    for tensor in tensors:
        found.update(memory_of(tensor.detach().to("cpu").contiguous().flatten()))
    return found.digest()[:DIGEST_BYTES]


def kind_of(training: PeerTraining, optimizer: torch.optim.Optimizer) -> str:
    """Of peers with the same one, equal steps give equal bits: device, instruction set, torch, threads, and what else
    a step depends on.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    steps_by = ", ".join(one for one in (training.steps_by, "fused" if fused else "") if one)
    device = training.steps_on or parameters_of(optimizer)[0].device
    if device.type == "cuda":
        here = torch.cuda.get_device_name(device)
    else:
        here = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    return f"{steps_by}{' on ' if steps_by else ''}{here}, torch {torch.__version__}"[:MAX_KIND]
