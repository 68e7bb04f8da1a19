"""One process that takes the very samples which a swarm's peers recorded for each step: what the swarm must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import mse_loss

from swarm.harness import Peer
from swarm.models import NET, Numbered, make_net, make_optimizer, make_scheduler

Clip = Callable[[list[torch.Tensor]], object]


def replay(
    peers: Sequence[Peer], steps: int, *, clip: Clip | None = None, stale: bool = False
) -> dict[int, np.ndarray]:
    """Parameters after each step of a run with the peers' recorded samples as one batch, by step.

    A batch that saw older parameters (a peer that was late) does so here. ``clip`` gets the parameters when their
    gradients are in place. ``stale``: all gradients are those of the parameters before the last step, as in a delayed
    run of one batch a step. Fails if a peer has no record of a step.
    """
    options: dict[str, Any] = peers[0].spec.model
    net = make_net(**{key: options[key] for key in NET if key in options})
    optimizer = make_optimizer(net.parameters(), options.get("optimizer", "sgd"), options.get("lr", 0.05))
    scheduler = make_scheduler(optimizer, options["scheduler"]) if "scheduler" in options else None
    data = Numbered(peers[0].spec.data_samples)
    found = {0: flat(net)}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        here = [p.detach().clone() for p in net.parameters()]
        seen = _by_parameters(peers, step)
        total = sum(map(len, seen.values()))
        for epoch, indices in seen.items():
            epoch = max(0, step - 2) if stale else epoch
            if epoch != step - 1:
                torch.nn.utils.vector_to_parameters(torch.from_numpy(found[epoch]).float(), net.parameters())
            batch = data.rows(indices)
            loss = mse_loss(net(batch["x"]), batch["y"]) * options.get("scale_loss", 1.0)
            (loss if len(indices) == total else loss * (len(indices) / total)).backward()
            with torch.no_grad():
                for parameter, value in zip(net.parameters(), here, strict=True):
                    parameter.copy_(value)
        if clip is not None:
            clip(list(net.parameters()))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        found[step] = flat(net)
    return found


class Worker:
    """A peer that steps by itself, between rounds: its net, its optimizer, and where it is."""

    def __init__(self, peer: Peer) -> None:
        self.peer, options = peer, peer.spec.model
        self.net = make_net(**{key: options[key] for key in NET if key in options})
        self._optimizer = make_optimizer(
            self.net.parameters(), options.get("optimizer", "sgd"), options.get("lr", 0.05)
        )
        self._data, self._epoch = Numbered(peer.spec.data_samples), 0
        self._given: dict[int, np.ndarray] = {}

    def train(self, step: int, base: dict[int, np.ndarray], part: slice) -> tuple[np.ndarray, int]:
        """On what it has in that step; returns how far its steps have led what is averaged then, and its samples."""
        commit = self.peer.commits[step]
        for indices, epoch in zip(commit.samples, commit.of, strict=True):
            self.follow(epoch, base)
            batch = self._data.rows(indices)
            self._optimizer.zero_grad()
            mse_loss(self.net(batch["x"]), batch["y"]).backward()
            self._optimizer.step()
        if commit.indices:
            self.follow(step - 1, base)
            self._given[step] = np.zeros_like(base[0])
            self._given[step][part] = (flat(self.net) - base[step - 1])[part]
        else:  # perhaps it is still at a batch of parameters of long ago
            later = (epoch for number, one in self.peer.commits.items() if number > step for epoch in one.of)
            self._given[step] = np.zeros_like(base[0])
            self.follow(min(step - 1, next(later, step - 1)), base)
        return self._given[step], len(commit.indices)

    def follow(self, epoch: int, base: dict[int, np.ndarray]) -> None:
        """To what all have at ``epoch``, and what its steps have done since it gave what is in there."""
        while self._epoch < epoch:
            own = flat(self.net) - base[self._epoch] - self._given[self._epoch + 1]
            self._epoch += 1
            torch.nn.utils.vector_to_parameters(
                torch.from_numpy(base[self._epoch] + own).float(), self.net.parameters()
            )


def replay_outer(
    peers: Sequence[Peer], rounds: int, *, lr: float, momentum: float, nesterov: bool, fragments: int = 1
) -> dict[int, np.ndarray]:
    """What all peers have after each round: workers one after another, then an outer step of torch's SGD.

    Of all parameters, or of one of so many ``fragments`` in turn, each with a momentum of its own.
    """
    workers = [Worker(peer) for peer in peers]
    found = {0: flat(workers[0].net)}
    length = -(-len(found[0]) // fragments)
    begins = [number * len(found[0]) // fragments for number in range(fragments)]
    velocity = np.zeros_like(found[0])
    for step in range(1, rounds + 1):
        part = slice(begins[(step - 1) % fragments], begins[(step - 1) % fragments] + length)
        changes = [worker.train(step, found, part) for worker in workers]
        samples = sum(count for _, count in changes)
        outer = torch.nn.Parameter(torch.from_numpy(found[step - 1][part].copy()))
        optimizer = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=nesterov)
        optimizer.state[outer]["momentum_buffer"] = torch.from_numpy(velocity[part].copy())
        outer.grad = -torch.from_numpy(sum(change * (count / samples) for change, count in changes)[part])
        optimizer.step()
        found[step] = found[step - 1].copy()
        found[step][part] = outer.detach().numpy()
        velocity[part] = optimizer.state[outer]["momentum_buffer"].numpy() if momentum else 0.0
    return found


def _by_parameters(peers: Sequence[Peer], step: int) -> dict[int, list[int]]:
    """The samples of all peers in that step, by the epoch whose parameters they saw."""
    found: dict[int, list[int]] = {}
    for peer in peers:
        commit = peer.commits[step]
        for indices, epoch in zip(commit.samples, commit.of, strict=True):
            found.setdefault(epoch, []).extend(indices)
    return found


def next_step(peers: Sequence[Peer], epoch: int) -> np.ndarray:
    """Where one plain SGD step on these peers' samples of ``epoch`` leads, from what the first recorded before it."""
    spec = peers[0].spec
    assert spec.model.get("optimizer", "sgd") == "sgd", "a step with a memory needs the whole replay"
    net = make_net(**{key: spec.model[key] for key in NET if key in spec.model})
    before = torch.from_numpy(peers[0].parameters(epoch - 1)).float()
    torch.nn.utils.vector_to_parameters(before, net.parameters())
    batch = Numbered(spec.data_samples).rows([index for peer in peers for index in peer.commits[epoch].indices])
    optimizer = make_optimizer(net.parameters(), lr=spec.model.get("lr", 0.05))
    mse_loss(net(batch["x"]), batch["y"]).backward()
    optimizer.step()
    return flat(net)


def flat(net: torch.nn.Module) -> np.ndarray:
    """All parameters as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in net.parameters()]).numpy()


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Relative: norm of the difference over the norm of the second."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
