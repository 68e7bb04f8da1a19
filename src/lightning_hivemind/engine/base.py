"""The seam between a peer's training and whatever averages it with other peers.

An engine owns one peer's part in a swarm: it takes gradients of micro-batches, decides with the other peers when the
swarm has ``target_batch_size`` samples, averages, steps the optimizer once, and keeps the peer at the swarm's epoch.
The strategy above it never sees a socket; the engine never sees a Trainer.

Threads: all methods are called from the training thread. Every method returns within its stated deadline or raises
:class:`~lightning_hivemind.errors.EngineStuckError`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Changed(enum.IntFlag):
    """What an engine has put into a model, other than by a step of its optimizer."""

    STATISTICS = enum.auto()
    """Buffers, and tensors that are averaged besides."""
    PARAMETERS = enum.auto()
    OPTIMIZER = enum.auto()
    """Its state and settings."""
    STATE = STATISTICS | PARAMETERS | OPTIMIZER
    """All of it is another peer's now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one call of :meth:`Engine.step` changed.

    ``epoch`` is the number of global steps that are in the parameters or, in the delayed modes, under way;
    ``committed`` says that it grew by a step of ours; otherwise the swarm's state may have been loaded.
    """

    epoch: int
    committed: bool


class RanksSums(Protocol):
    """Where ranks of this peer have gradients in parts: each sums its own. From the training thread."""

    def add(self, factor: float, *, first: bool) -> None:
        """So many times the gradient of the batch that has just ended, to the sum; the ``first`` begins another one."""

    def gather(self, whole: Sequence[torch.Tensor]) -> list[bool]:
        """The sum into these, float32 CPU; returns which parameters a batch has reached: of the others it is zeros."""


@dataclass(frozen=True, kw_only=True)
class PeerTraining:
    """What the engine is given to train; built by the strategy once Lightning has made the optimizer.

    Attributes:
        optimizer: the user's optimizer over the model's own parameters.
        rebuild_optimizer: ``callable(param_groups) -> optimizer`` where the engine must own it (offload, delays).
        make_scheduler: ``callable(optimizer) -> None``, called once with the optimizer that really steps.
        advance_schedulers: ``callable(epoch)``, called right after every optimizer step and after a state download,
            from the thread that stepped.
        take_schedulers_back: ``callable(epoch)``, called before that, where a state of fewer steps was downloaded.
        before_optimizer_step: ``callable(optimizer)``, called once per global step with the averaged gradients in
            place: hooks and gradient clipping.
        changed: ``callable(what)``, called from the training thread once what the engine has put there is there.
        extra_tensors: tensors averaged besides the parameters (BatchNorm statistics, say).
        buffers: of the module (BatchNorm statistics, say): handed to joiners with the state; the native engine
            averages them, too.
        schema: equal on all peers of a run: a line for each parameter (name, shape, dtype, whether it is frozen), and
            how many values there are besides.
        should_abort: asked while waiting; true means that this process is being stopped.
        last_step: the global step after which this peer's training ends; -1 if that is not known.
        refresh: ``callable(what)``, called from the training thread: brings the parameters of ``optimizer``, or its
            state, too, up to date, where ranks have them in parts. None: they always are.
        sums: of gradients that ranks have in parts. None: they are in ``param.grad`` of ``optimizer``.
        steps_on: the device on which ``optimizer`` steps, where its parameters are elsewhere.
        steps_by: what else the last bits of its steps depend on, beside torch.
        outside: of the module's parameters that are not the optimizer's, a name and a digest of all: a warning tells of
            peers with another one. Empty if there are none.
    """

    optimizer: torch.optim.Optimizer
    rebuild_optimizer: Callable[[Sequence[Mapping[str, Any]]], torch.optim.Optimizer] | None
    make_scheduler: Callable[[torch.optim.Optimizer], None]
    advance_schedulers: Callable[[int], None]
    take_schedulers_back: Callable[[int], None]
    before_optimizer_step: Callable[[torch.optim.Optimizer], None]
    extra_tensors: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    schema: Sequence[str]
    should_abort: Callable[[], bool]
    last_step: Callable[[], int] = lambda: -1
    changed: Callable[[Changed], None] = lambda what: None
    refresh: Callable[[Changed], None] | None = None
    sums: RanksSums | None = None
    steps_on: torch.device | None = None
    steps_by: str = ""
    outside: tuple[str, str] = ("", "")

    @property
    def state_tensors(self) -> list[torch.Tensor]:
        """What belongs to a state besides parameters and optimizer, each once."""
        return list({id(tensor): tensor for tensor in (*self.extra_tensors, *self.buffers)}.values())


class Engine(Protocol):
    """What every engine promises; ``tests/swarm`` runs the same checks over each."""

    #: the optimizer that really steps (the user's, or the re-created one)
    optimizer: torch.optim.Optimizer

    def start(self) -> None:
        """Bring up what averages; after it, other peers can see this one. Raises SchemaMismatchError."""

    def synchronise(self) -> StepOutcome:
        """Before the first batch: take the swarm's state if there is one that is worth taking."""

    def begin_batch(self) -> StepOutcome:
        """Before the forward pass of a batch: apply what has become due since the last one."""

    def step(self, batch_samples: int, gradient_scale: float = 1.0) -> StepOutcome:
        """Count one micro-batch whose gradients lie in ``param.grad``, and do whatever is due.

        Args:
            batch_samples: samples in it; 0 counts nothing but still lets the peer take part (auxiliary peers).
            gradient_scale: what the gradients in reused buffers are still multiplied by (the loss scale).
        """

    def discard(self) -> int:
        """Forget this epoch's accumulated gradients (they are not finite); returns the samples that were lost."""

    def rescale(self, factor: float) -> None:
        """The loss scale has changed by this: so must what is summed in reused buffers."""

    def batch_weight(self, batch_samples: int) -> float:
        """What to multiply a batch's mean loss by before the backward pass: not 1.0 only in reused buffers."""

    @property
    def epoch(self) -> int:
        """Committed global steps."""

    @property
    def num_peers(self) -> int:
        """Peers of this run that are known to be alive, this one included."""

    @property
    def local_samples(self) -> int:
        """Samples that this peer has accumulated since its last commit."""

    @property
    def swarm_samples(self) -> int:
        """Samples that the swarm is known to have accumulated for the current epoch."""

    def kept(self) -> dict[str, Any]:
        """What a checkpoint needs besides the model and the optimizer's state."""

    def restore(self, optimizer_state: Mapping[str, Any], epoch: int, kept: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: the optimizer's state dict, the epoch that it belongs to, and :meth:`kept`."""

    def request_stop(self, reason: str) -> None:
        """Ask the whole run to stop; carried to the others by the next commits."""

    @property
    def stop_epoch(self) -> int | None:
        """The epoch after whose commit every peer stops, once some peer asked for it."""

    def swarm_mean(self, name: str, value: float, samples: int) -> float:
        """Publish a metric of this peer; returns the mean over the peers' latest values, weighted by samples."""

    def flush(self) -> None:
        """Wait for delayed work and apply it: afterwards the parameters are those of ``epoch``."""

    def before_validation(self, *, last: bool = False) -> None:
        """As :meth:`flush`. From now on other values may be put into the module's tensors, until the next batch.

        ``last``: there will be none.
        """

    def shutdown(self, timeout_s: float) -> None:
        """Leave the swarm and stop everything; safe to call twice. Takes at most ``timeout_s``."""
