"""Learning-rate schedulers in a swarm: a function of the global step, whatever a peer's own batches are.

Lightning would advance them by this peer's batches or passes over its data, which differ from peer to peer. Here every
scheduler advances once per ``frequency`` global steps, right after the optimizer's step, in the thread that stepped.

So it stands where it was made plus ``global step // frequency``, also after a checkpoint of a plain Trainer (whose
``interval="epoch"`` counted passes over the data) and in a second fit (which begins with a new scheduler): it is
brought there before the first batch, as a peer that joins brings its own, or the peers' learning rates would part.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from lightning_hivemind.errors import ArgumentError

log = logging.getLogger("lightning_hivemind")

#: Lightning advances a scheduler every ``frequency`` batches: never, with this
NEVER = sys.maxsize
#: global steps after which the state of schedulers is kept anew: so many are repeated if a peer goes back a little
MARKED = 64


@dataclass(frozen=True, slots=True)
class _Taken:
    """A scheduler, how many global steps it stands still, and its position at global step 0."""

    scheduler: Any
    frequency: int
    start: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """What all schedulers were at a global step: of each its state, and the rates of its optimizer's groups."""

    epoch: int
    states: Sequence[tuple[Mapping[str, Any], Sequence[Any]]]


class SwarmSchedulers:
    """Takes Lightning's scheduler configurations over, and advances the schedulers by epochs of the swarm.

    ``advance`` may be called from several threads at once: background steps and local updates are not in one thread.
    """

    def __init__(self, step_hook: Callable[[Any, int], None], *, goes_back: bool = False) -> None:
        """``step_hook``: advances a scheduler, to its position at that global step.

        ``goes_back``: :meth:`take_back` may be called, and ``step_hook`` may be called again for a step.
        """
        self._step_hook, self._goes_back = step_hook, goes_back
        self._taken: list[_Taken] = []
        #: the one at which this fit began, and the last two
        self._marks: list[_Mark] = []
        self._epoch = 0
        self._lock = threading.Lock()

    def take_over(self, configs: Sequence[Any], epoch: int = 0) -> None:
        """Stop Lightning from advancing ``configs`` (their ``frequency`` is kept here); monitors still see them.

        Args:
            epoch: global steps that this process has made. A scheduler that is kept from the fit before made them, too.
        """
        self._taken = []
        for config in configs:
            if config.interval == "epoch":
                log.info(
                    "%s has interval='epoch', but passes over the data differ from peer to peer: it advances once per"
                    " %d global step(s) of the swarm. Set interval='step' to silence this.",
                    type(config.scheduler).__name__,
                    config.frequency,
                )
            start = max(0, (position(config.scheduler) or 0) - epoch // config.frequency)
            self._taken.append(_Taken(config.scheduler, config.frequency, start))
            config.interval, config.frequency = "step", NEVER

    def advance(self, epoch: int) -> None:
        """Bring every scheduler to ``epoch`` (never back)."""
        with self._lock:
            self._advance(epoch)

    def take_back(self, epoch: int) -> None:
        """Bring every scheduler to ``epoch`` if it is beyond, and was so in this fit: to a mark, and on from there."""
        with self._lock:
            marks = [mark for mark in self._marks if mark.epoch <= epoch]
            if epoch >= self._epoch or not marks:
                return
            self._marks = marks
            for taken, (state, rates) in zip(self._taken, marks[-1].states, strict=True):
                for group, rate in zip(_groups(taken.scheduler), rates, strict=True):
                    group["lr"] = copy.deepcopy(rate)
                taken.scheduler.load_state_dict(_copy(state, taken.scheduler))
            self._epoch = marks[-1].epoch
            self._advance(epoch)

    def resume(self, epoch: int) -> None:
        """Before the first batch, with whatever state was loaded: bring every scheduler to where ``epoch`` wants it.

        One that does not tell its position (it has no ``last_epoch``) is taken to be there.

        Raises:
            ArgumentError: a scheduler is past that already, and cannot go back.
        """
        with self._lock:
            for taken in self._taken:
                self._bring(taken, epoch)
            self._epoch = epoch
            if self._goes_back:
                self._mark()

    def _advance(self, epoch: int) -> None:
        for taken in self._taken:
            self._step(taken, self._epoch // taken.frequency, epoch // taken.frequency)
        self._epoch = max(self._epoch, epoch)
        if self._marks and self._epoch - self._marks[-1].epoch >= MARKED:
            self._mark()

    def _mark(self) -> None:
        try:
            states = [_as_it_is(taken.scheduler) for taken in self._taken]
        except Exception as error:  # user code: state that cannot be copied
            self._marks = []
            log.warning(
                "a scheduler's state cannot be copied (%s): should this peer ever take a state of fewer global steps"
                " than it has made, its learning rate is another one than the others' until they have made them, too",
                error,
            )
            return
        self._marks = [*self._marks[:1], *self._marks[1:][-1:], _Mark(self._epoch, states)]

    def _bring(self, taken: _Taken, epoch: int) -> None:
        wanted, found = taken.start + epoch // taken.frequency, position(taken.scheduler)
        if found is None or found == wanted:
            return
        name = type(taken.scheduler).__name__
        if found > wanted:
            raise ArgumentError(
                f"{name} was resumed at position {found}, but with frequency={taken.frequency} global step {epoch} is"
                f" position {wanted}: this peer's learning rate would not be the others'. Give it the frequency that"
                " the checkpoint was made with, or start from the checkpoint's state_dict alone. Nothing was trained."
            )
        log.warning(
            "%s stood at %d and was advanced to %d: in a swarm, schedulers count global steps, of which %d are made.",
            *(name, found, wanted, epoch),
        )
        self._step(taken, found - taken.start, wanted - taken.start)

    def _step(self, taken: _Taken, made: int, wanted: int) -> None:
        """Of its steps so many are made."""
        optimizer = getattr(taken.scheduler, "optimizer", None)
        if wanted > made and optimizer is not None:
            optimizer._opt_called = True  # its steps were made, here or elsewhere: else torch warns of the wrong order
        for position in range(made + 1, wanted + 1):
            self._step_hook(taken.scheduler, position * taken.frequency)


def _groups(scheduler: Any) -> Sequence[dict[str, Any]]:
    optimizer = getattr(scheduler, "optimizer", None)
    return () if optimizer is None else optimizer.param_groups


def _as_it_is(scheduler: Any) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """Its state, and the rates of its optimizer's groups; copies."""
    return _copy(scheduler.state_dict(), scheduler), [copy.deepcopy(group["lr"]) for group in _groups(scheduler)]


def _copy(state: Mapping[str, Any], scheduler: Any) -> Mapping[str, Any]:
    """But not of the scheduler (its methods may be in it), of the optimizer, and of what that trains."""
    kept = [scheduler, *getattr(scheduler, "_schedulers", ()), getattr(scheduler, "optimizer", None)]
    kept += [one for group in _groups(scheduler) for one in group["params"]]
    return copy.deepcopy(state, {id(one): one for one in kept})


def position(scheduler: Any) -> int | None:
    """How often a scheduler was advanced; None if it does not tell."""
    if isinstance(scheduler, ChainedScheduler):  # counts nothing itself
        return position(scheduler._schedulers[0])
    found = getattr(scheduler, "last_epoch", None)
    return found if isinstance(found, int) else None


def refuse_plateau(config: Any) -> None:
    """Raises ArgumentError for a ``ReduceLROnPlateau``: no peer knows the swarm's metric at the time of a step."""
    if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau):
        raise ArgumentError(
            "lr_scheduler=ReduceLROnPlateau: refused, because each peer would lower its own learning rate at another"
            " step. Use a schedule that depends on the number of steps only, such as CosineAnnealingLR or LambdaLR."
        )


def scheduler_from(scheduler_fn: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Make the user's ``scheduler_fn`` (a callable, or a ready scheduler) a scheduler of ``optimizer``.

    Raises:
        ArgumentError: it is a ready scheduler of another optimizer, or the callable returned no scheduler.
    """
    scheduler = scheduler_fn if isinstance(scheduler_fn, LRScheduler) else scheduler_fn(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise ArgumentError(
            f"scheduler_fn={scheduler_fn!r} gave a {type(scheduler).__name__}; expected a torch LRScheduler that"
            " depends on the number of steps only, for example"
            " functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.999)."
        )
    if scheduler.optimizer is not optimizer:
        raise ArgumentError(
            "scheduler_fn is a scheduler of another optimizer than the one that steps. Pass a callable instead:"
            " scheduler_fn=lambda optimizer: SomeLR(optimizer, ...)."
        )
    return scheduler
