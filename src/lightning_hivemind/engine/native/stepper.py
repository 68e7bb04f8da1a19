"""The optimizer's side of a global step: on the device or in host memory, now or in the background."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_hivemind.engine.base import Changed, PeerTraining
from lightning_hivemind.engine.groups import over, parameters_of, rates_of, set_rates
from lightning_hivemind.engine.native.averaged import put_gradients
from lightning_hivemind.engine.native.gathered import STEPS_CHANGE, Gathered
from lightning_hivemind.engine.native.low_rank import LowRank
from lightning_hivemind.engine.native.memory import Memory, populate
from lightning_hivemind.engine.native.moments import Moments
from lightning_hivemind.engine.native.outer import OuterStep
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state.content import Content
from lightning_hivemind.engine.native.state.snapshot import (
    Description,
    Snapshot,
    State,
    can_stay,
    install,
    read_description,
    state_bytes,
    take_state,
)
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.trail import Decided, Trail, Undone
from lightning_hivemind.engine.prints import print_of
from lightning_hivemind.outer import DiLoCo


class Stepper:
    """Owns the optimizer that really steps. Its methods are called from the training thread.

    Args:
        head: whose state the model has now.
        delayed: steps are made in a thread of their own, on copies in host memory.
        local: every batch's gradient is used at once (``use_local_updates``); what is averaged are the parameters,
            and ``moments`` of the optimizer by these names (else they are equal anyway).
        outer: ``local``: what is done with the average of how these steps have moved the parameters.

    Attributes:
        optimizer: the user's, or one like it over copies of the parameters in host memory.
        statistics: averaged with the gradients, behind them in the flat vector.
        lock: held while any of it changes, and while it is copied.
        trail: to the head whose state the optimizer has.
        gathered: what is here of parts that ranks have.
    """

    def __init__(
        self,
        training: PeerTraining,
        head: Head,
        *,
        delayed: bool,
        local: bool = False,
        moments: Sequence[str] = (),
        outer: DiLoCo | None = None,
    ) -> None:
        self._training, self.trail, self._local = training, Trail(head), local
        self._model = parameters_of(training.optimizer)
        self.optimizer = training.optimizer
        if training.rebuild_optimizer is not None:
            copies = [p.detach().to("cpu", copy=True).requires_grad_(p.requires_grad) for p in self._model]
            self.optimizer = training.rebuild_optimizer(over(training.optimizer, copies))
        #: which parameters are trained is fixed now: the others' vectors have the same ones
        self._trained = [p.requires_grad for p in self._model]
        averaged = [p for p in self._model if p.requires_grad and local]
        self._moments = Moments(self.optimizer, moments if local else ())
        self._outer = None if outer is None else OuterStep(outer, averaged)
        self.statistics = Statistics(
            [*averaged, *training.state_tensors], carries=local, moments=self._moments.tensors, outer=self._outer
        )
        self._moments_changed = Changed.OPTIMIZER if self.statistics.moments else Changed(0)
        training.changed(self._moments_changed)  # made before the first step
        self.gathered = Gathered(training.refresh if self.optimizer is training.optimizer else None, self._changes)
        #: a print of what is given out of the module, while something else may be put there
        self._print: str | None = None
        #: what is part of a state besides, and travels with it
        self.low_rank: LowRank | None = None
        self.lock = threading.Lock()
        #: see :meth:`_a_step`
        self._stepping = False
        #: how many states took the place of what was trained here; the last copy: its key, and that number then
        self._states = 0
        self._copied: tuple[bytes, int] | None = None
        #: what a checkpoint has brought
        self._loaded: Mapping[str, Any] = {}
        #: of the state that is given, while it is the one that is here
        self._given: weakref.ref[Content] | None = None
        #: for batches change it, too
        self._copies_at_once = local
        self._executor = ThreadPoolExecutor(1, "lightning-hivemind-step") if delayed else None
        self._under_way: Future[None] | None = None

    @property
    def head(self) -> Head:
        """Whose state the optimizer has."""
        return self.trail.head

    @property
    def model_parameters(self) -> list[Tensor]:
        """The model's own, of which gradients are taken."""
        return self._model

    @property
    def busy(self) -> bool:
        """Whether a step is being made in the background, or is finished and not yet settled."""
        return self._under_way is not None

    @property
    def stale(self) -> bool:
        """Whether a round cannot have parameters yet, which this peer's own steps have changed."""
        return self._local and bool(self.gathered.old & Changed.PARAMETERS)

    @property
    def common(self) -> list[Tensor]:
        """What all peers should have at :attr:`head`, to the last bit, but for the optimizer's own state."""
        return [*([] if self._local else parameters_of(self.optimizer)), *self._shared]

    @property
    def _shared(self) -> list[Tensor]:
        """What belongs to a state besides the optimizer and its parameters, and is equal at all peers."""
        low_rank = [] if self.low_rank is None else [self.low_rank.carried]
        return [*self.statistics.base, *low_rank, *([] if self._outer is None else self._outer.velocity)]

    # ------------------------------------------------------------------ steps

    def step_alone(self) -> None:
        """``local``: a step on the gradient of the batch that has just ended."""
        with torch.enable_grad():
            self._training.before_optimizer_step(self.optimizer)
        with self._a_step():
            self.optimizer.step()
            self._moments.keep()

    def step(
        self,
        average: Tensor,
        head: Head,
        counted: Tensor | None = None,
        *,
        mine: int = 0,
    ) -> None:
        """One global step to ``head``: ``average`` is float32 CPU, gradients of what is trained, then statistics, then
        for each trained parameter 0.0 where nobody has a gradient: it gets none either, as in a plain Trainer.

        Its memory becomes that of the gradients where they have it, too, and is then changed (by clipping, say).
        Delayed, the model has it after a later :meth:`settle`. ``counted``: see :meth:`.Statistics.step`. ``mine``: of
        this peer's samples, how many are in it. Of a low rank ``average`` are factors.
        """
        if self._local:
            self.gathered.refresh(Changed.PARAMETERS)
            with self._changes():
                self.statistics.step(average, head.epoch, counted)
                self._training.advance_schedulers(head.epoch)
                self.trail.step(head, mine)
                self.statistics.publish()
            self._training.changed(Changed.PARAMETERS | Changed.STATISTICS | self._moments_changed)
            return
        self.settle(wait=True)
        carried = None
        if self.low_rank is not None:
            average, carried = self.low_rank.unpack(average, head.epoch - 1)
        begin = put_gradients(average, parameters_of(self.optimizer), self._model, self._trained)
        statistics = average[begin : begin + self.statistics.elements]
        with torch.enable_grad():
            self._training.before_optimizer_step(self.optimizer)
        if self._executor is not None:
            self._under_way = self._executor.submit(self._make, statistics, head, carried, mine)
            return
        self._make(statistics, head, carried, mine)
        self.publish()

    def settle(self, *, wait: bool) -> None:
        """Give the model the step that was made in the background, if it is finished; ``wait`` until it is."""
        if self._under_way is not None and (wait or self._under_way.done()):
            if (error := self._under_way.exception()) is None:
                self.publish()  # Ctrl+C until here leaves it to the next settle(), that of a checkpoint, say
            self._under_way = None
            if error is not None:
                raise error

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the parameters that the optimizer has, and the statistics that all peers have."""
        self.statistics.publish()
        changed = Changed.STATISTICS
        for mine, stepped in zip(self._model, parameters_of(self.optimizer), strict=True):
            if mine is not stepped:
                mine.copy_(stepped)
                changed |= Changed.PARAMETERS
        self._training.changed(changed)

    def begin(self) -> None:
        """With what the model has now: hooks may have put it there since the optimizer was made."""
        if self.optimizer is not self._training.optimizer and self._training.refresh is not None:
            self._training.refresh(Changed.PARAMETERS)
        self.gathered.stepped()
        self.gathered.fetch()
        with self._changes():
            self._rebase()
            if self._outer is not None:
                self._outer.load(self._loaded, self.statistics.base)
                self._loaded = {}

    @torch.no_grad()
    def _rebase(self) -> None:
        self._states += 1
        for mine, stepped in zip(self._model, parameters_of(self.optimizer), strict=True):
            if mine is not stepped:
                stepped.copy_(mine)
        self.statistics.rebase(self.head.epoch)

    def kept(self) -> dict[str, Any]:
        """What :meth:`load` needs besides the optimizer's state."""
        if self._outer is None:
            return {}
        with self.lock:
            return self._outer.kept(self.statistics.base)

    def load(self, optimizer_state: Mapping[str, Any], head: Head, kept: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, whose parameters the model has already."""
        self._loaded = kept
        with self._changes(), torch.no_grad():
            self.optimizer.load_state_dict(dict(optimizer_state))
            self._moments.keep()
            self.trail = Trail(head)
            self._rebase()
            if self.low_rank is not None:
                self.low_rank.begin(head.epoch)

    def room_for_copy(self, known: Snapshot | None) -> Tensor | None:
        """Memory for :meth:`snapshot`, if it must copy at once, made ready without the lock: no step waits for it."""
        with self.lock:
            self._copies_at_once |= known is not None and known.content.was_changed
            stays = can_stay(self.optimizer) and not self._copies_at_once
            if stays or self._is_right(known):
                return None
            memory = Memory().bytes(self.state_bytes)
        populate(memory)
        return memory

    def snapshot(
        self,
        known: Snapshot | None,
        memory: Tensor | None = None,
        in_training: Callable[[Callable[[], State | Snapshot | None]], State | Snapshot | None] = lambda do: do(),
    ) -> Snapshot | None:
        """For a peer that joins; from any thread. ``known`` is one that may still be right.

        ``in_training`` lets the training thread do something between two batches.
        """
        with self.lock:
            expected = self._print

        def take() -> State | Snapshot | None:
            if not self._is_right(known):
                self.gathered.refresh(STEPS_CHANGE)
            return self._take(known, memory)

        taken = in_training(take) if self.gathered.old else self._take(known, memory)
        if taken is None or isinstance(taken, Snapshot):
            return taken
        states, found = self._states, taken.described()  # takes a while, and needs no lock
        self._copied = found.key, states
        # (whoever has swapped values in and out since has changed what was copied meanwhile)
        return found if self._print == expected and self.is_untouched() else None

    def _take(self, known: Snapshot | None, memory: Tensor | None) -> State | Snapshot | None:
        with self.lock:
            if self._stepping or self.gathered.old or not self.is_untouched():
                return None
            if known is not None and self._is_right(known):
                known.content.wanted = True
                return known
            self._change_given()  # which may be of this head, too, if what is only this peer's own has changed
            state = take_state(self.optimizer, self._shared, self.statistics.own, self.trail, memory)
            self._given = weakref.ref(state.content)
            return state

    def leave(self, *, last: bool = False) -> None:
        """Other values may be put into the module now, until :meth:`back`: what somebody fetches is copied.

        ``last``: this peer trains no more, and whoever joins asks another one.
        """
        if not last:
            self.gathered.fetch()
        with self.lock:
            if self.optimizer is self._training.optimizer:  # else what is given lies elsewhere
                self._change_given()
                self._print = print_of(self._model)
        self.statistics.lend()

    def back(self) -> None:
        """What is in the module is what is trained."""
        self._print = None
        self.statistics.back()

    def is_untouched(self) -> bool:
        """Whether what is in the module is what is trained, as far as one sees. From any thread."""
        expected = self._print
        return expected is None or print_of(self._model) == expected

    def bytes_to_send(self, known: Snapshot | None) -> int:
        """Of :meth:`snapshot`, as long as no step is made; 0 if that is ``known``."""
        with self.lock:
            return 0 if self._is_right(known) else self.state_bytes

    def _is_right(self, known: Snapshot | None) -> bool:
        """Whether it is what a new one would be."""
        if known is None or known.content.gone or known.head != self.head:
            return False
        return self._copied == (known.key, self._states)

    @property
    def state_bytes(self) -> int:
        """Of a state that another peer has; more if only its optimizer has made a step."""
        return state_bytes(self.optimizer, self._shared, self.statistics.own)

    def read(self, data: memoryview) -> Description:
        """What another peer says of its state, once it is known to fit. Raises StateError."""
        return read_description(data, self.optimizer, self._shared, self.statistics.own)

    def adopt(self, description: Description, memory: Tensor, decided: Iterable[Decided] = ()) -> Undone | None:
        """Put another peer's state, which was checked, into everything; returns the steps that this undoes.

        ``decided``: see :meth:`.Trail.take`.
        """
        self.settle(wait=True)
        with self._changes():
            rates = rates_of(self.optimizer)
            install(description, memory, self.optimizer, self._shared, self.statistics.own)
            self.gathered.known()
            self._states += 1
            self._moments.keep()
            theirs = rates_of(self.optimizer)
            set_rates(self.optimizer, rates)  # a chainable scheduler goes on from its own rate
            self._training.take_schedulers_back(description.head.epoch)
            self._training.advance_schedulers(description.head.epoch)
            set_rates(self.optimizer, theirs)
            undone = self.trail.take(description.head, description.marks, decided)
            self.statistics.adopted(description.head.epoch)
            if self.low_rank is not None:
                self.low_rank.adopted(description.head.epoch)
            self.publish()
        self._training.changed(Changed.STATE)
        return undone

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ private

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        """Parameters, or what the optimizer keeps, change."""
        with self.lock:
            self._change_given()
            yield

    def _change_given(self) -> None:
        given, self._given = self._given() if self._given is not None else None, None
        if given is not None:
            given.change()

    @contextlib.contextmanager
    def _a_step(self) -> Iterator[None]:
        """Parameters are those of a head again once it has ended, not if it raises."""
        with self._changes():
            self._stepping = True
            self.gathered.stepped()
            yield
            self._stepping = False

    def _make(self, statistics: Tensor, head: Head, carried: Tensor | None, mine: int) -> None:
        with self._a_step():
            self.optimizer.step()
            self.statistics.step(statistics, head.epoch)
            self._training.advance_schedulers(head.epoch)
            self.trail.step(head, mine)
            if self.low_rank is not None and carried is not None:
                self.low_rank.carried.copy_(carried)
