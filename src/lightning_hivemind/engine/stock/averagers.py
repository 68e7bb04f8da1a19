"""hivemind's two averagers with the guarantees that they lack.

Both run as forked processes of their own. What is added here: they die with the trainer, they leave the trainer's
SIGINT alone, they report which share of the values really arrived, and their group size follows the swarm, so that a
group closes as soon as everybody is there instead of at ``matchmaking_time``.

The classes keep hivemind's *names*, because hivemind makes its RPC handles from them: a peer without this package must
be able to call ours. Hence :func:`checked`, which derives from whatever averager class the user chose.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.context import ForkProcess
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager

from lightning_hivemind.engine.stock.rounds import answered
from lightning_hivemind.engine.stock.streams import Counting, Lingering
from lightning_hivemind.engine.worker import current_cuda_device
from lightning_hivemind.errors import DaemonError, StateError
from lightning_hivemind.network.lifetime import settle_child
from lightning_hivemind.network.tasks import keep_tasks_alive

log = logging.getLogger("lightning_hivemind")

LEAST_WEIGHT = 1e-6
POLL_S = 0.2
START_S = 120.0  # for a forked process to connect to the daemon, on a very busy machine
DONOR_WAIT_S = 10.0
DONOR_SILENCE_S = 15.0  # how long a donor may be silent; it may be in a round when it is asked


class CheckedRounds(DecentralizedAverager):  # type: ignore[misc]  # hivemind has no types
    """Mixin over any hivemind averager: see the module."""

    _received: Any
    _control: Any
    # hivemind relies on fork (locks, pipes and futures are inherited), whatever the script's default start method is
    _start_method = "fork"
    _Popen = staticmethod(ForkProcess._Popen)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._received = mp.Value("d", 1.0)
        super().__init__(*args, **kwargs)

    @property
    def received_fraction(self) -> float:
        """Share of the values of the last round that arrived: what others reduced for us, and what they sent us."""
        return float(self._received.value)

    def resize_group(self, size: int) -> None:
        """From now on a group closes as soon as it has ``size`` peers (it still closes at ``matchmaking_time``)."""
        self._outer_pipe.send(("_resize_group", [size], {}))

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        # hivemind's own ignores SIGINT in the *trainer* here; the child does it for itself, in ``settle_child``
        self.start()
        deadline = time.monotonic() + (START_S if timeout is None else timeout)
        while await_ready:
            try:
                self.wait_until_ready(POLL_S)
                return
            except (FutureTimeoutError, TimeoutError):
                if not self.is_alive() or time.monotonic() > deadline:
                    raise DaemonError(
                        f"an averager process (pid {self.pid}) did not start: "
                        + (f"it has died with exit code {self.exitcode}." if not self.is_alive() else "no answer.")
                        + " Is there enough memory? Nothing of this peer was changed."
                    ) from None

    def run(self) -> None:
        settle_child(self._parent_pid, cleanup=self.dht._sockets.remove)
        keep_tasks_alive()
        super().run()

    def ask_to_shut_down(self) -> None:
        """The polite half of ``shutdown``, without waiting: the caller joins, then terminates, then kills."""
        self._outer_pipe.send(("_shutdown", [1.0], {}))
        self._inner_pipe.send(("_SHUTDOWN", None))

    async def add_p2p_handlers(self, p2p: Any, wrapper: Any = None, **kwargs: Any) -> None:
        # all of an averager's handlers answer with streams
        await super().add_p2p_handlers(p2p, Lingering(wrapper or self), **kwargs)

    @classmethod
    def get_stub(cls, p2p: Any, peer: Any, **kwargs: Any) -> Counting:
        return Counting(super().get_stub(p2p, peer, **kwargs))

    async def _resize_group(self, size: int) -> None:
        self._matchmaking.target_group_size = size

    async def _load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        self.next_chunk_timeout = DONOR_SILENCE_S  # rounds have their own copy
        return await super()._load_state_from_peers(*args, **kwargs)

    async def _step(self, *, step: Any, **kwargs: Any) -> None:
        self._control = step
        try:
            await super()._step(step=step, **kwargs)
        except InvalidStateError:
            if not step.cancelled():
                raise
            log.debug("a round was given up just as it ended")

    async def _aggregate_with_group(self, *args: Any, **kwargs: Any) -> Any:
        self._received.value = 1.0
        try:
            return await super()._aggregate_with_group(*args, **kwargs)
        except BaseException:
            # A second attempt would average what the first left behind. (Another group may be looked for: that failed
            # before anything was exchanged.)
            self._control._allow_retries = False
            raise

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info: Any, group_id: bytes | None = None, **kwargs: Any
    ) -> None:
        runner_future = self._running_groups[group_info.group_id if group_id is None else group_id]
        await super()._run_allreduce_inplace_(tensors, group_info, group_id=group_id, **kwargs)
        self._received.value = min(self._received.value, received_share(runner_future.result()))


def received_share(runner: Any) -> float:
    """Share of values in one all-reduce that were neither replaced by local ones nor missing from a sender."""
    results, inputs = runner.tensor_part_container, runner.tensor_part_reducer
    share = 1.0 - results.failed_size / max(results.total_size, 1)
    expected = inputs.num_parts * inputs.num_senders
    if expected:
        share = min(share, sum(inputs.num_parts_received) / expected)
    return float(share)


class SampleWeighted(GradientAverager):  # type: ignore[misc]
    """Mixin over a gradient averager: its local gradient is the mean over *samples*, and survives a failed round.

    hivemind divides by the number of micro-batches, which is wrong when the last one is smaller, and clears its
    accumulators before the round, so that "proceeding with local gradients" steps with zeros.
    """

    #: gradients in reused buffers are still multiplied by this (GradScaler); 1.0 when unscaled before accumulation
    loss_scale: float = 1.0

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        samples = self.local_samples_accumulated
        scale = self._anchor_batch_size / samples / self.loss_scale if samples else 0.0
        with self.get_tensors() as averaged:
            for accumulated, target in zip(self._grad_accumulators(), averaged, strict=True):
                target.copy_(accumulated, non_blocking=False)
                if scale != 1.0:
                    target.mul_(scale)

    @property
    def weight(self) -> float:
        """Samples; a little where there are none, since hivemind divides by the sum of all weights."""
        return max(float(self.local_samples_accumulated), LEAST_WEIGHT)

    @torch.no_grad()
    def copy_averaged_to(self, parameters: Sequence[torch.Tensor]) -> None:
        """Put the averaged gradients into ``grad`` of these, which may be on another device."""
        with self.get_tensors() as averaged:
            for parameter, gradient in zip(parameters, averaged, strict=True):
                if not parameter.requires_grad:
                    parameter.grad = None  # frozen: a zero gradient would still let weight decay change it
                elif parameter.grad is None or parameter.grad.is_sparse:  # what was averaged is dense
                    parameter.grad = gradient.to(parameter.device, copy=True)
                else:
                    parameter.grad.copy_(gradient)

    def load_codec_state(self, timeout_s: float) -> None:
        """Take over what a codec carries from round to round (PowerSGD's Q), if this averager carries anything."""
        if type(self).load_state_from_peers is DecentralizedAverager.load_state_from_peers:
            return  # it would only fetch a donor's gradients
        try:
            self.load_state_from_peers(timeout=timeout_s)
        except (FutureTimeoutError, TimeoutError):
            log.warning("no peer sent its codec's state in %.0f s; the first rounds are less precise", timeout_s)

    def batch_weight(self, batch_samples: int) -> float:
        """What to multiply a batch's mean loss by, so that reused ``.grad`` buffers sum up in samples."""
        if not self.reuse_grad_buffers or self._anchor_batch_size is None:
            return 1.0
        return batch_samples / float(self._anchor_batch_size)


class KeepsFeedback(PowerSGDGradientAverager):  # type: ignore[misc]
    """Mixin over PowerSGD's averager: a round that fails leaves its error feedback as it was."""

    async def _aggregate_with_group(self, *args: Any, **kwargs: Any) -> Any:
        feedback = [tensor.clone() for tensor in self._ms]
        try:
            return await super()._aggregate_with_group(*args, **kwargs)
        except BaseException:
            for tensor, kept in zip(self._ms, feedback, strict=True):
                tensor.copy_(kept)
            raise


class StepGuard:
    """Keeps the first exception of code that hivemind runs and swallows, so that the training thread can raise it.

    It is passed to hivemind as a gradient scaler, which is the one hook around the optimizer's step.
    """

    def __init__(self) -> None:
        self._failure: Exception | None = None

    def run(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            self.keep(error)

    def keep(self, failure: Exception) -> None:
        self._failure = self._failure or failure

    @contextmanager
    def running_global_step(self) -> Iterator[None]:
        yield

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.run(optimizer.step)
        return True

    def check(self) -> None:
        """Raise what was kept."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class TrainingState(TrainingStateAverager):  # type: ignore[misc]
    """Mixin over the state averager: schedulers by the epoch, and a state that is whole when a joiner asks for it."""

    def __init__(self, *args: Any, advance_schedulers: Callable[[int], None], **kwargs: Any) -> None:
        self._advance_schedulers = advance_schedulers
        #: what went wrong in hivemind's step thread, which swallows exceptions
        self.guard = StepGuard()
        #: held while parameters and epoch change, so that a joiner never downloads half a step
        self.lock_commit = threading.RLock()
        super().__init__(*args, **kwargs)
        # the current device is each thread's own, and hivemind steps in this thread only
        device = current_cuda_device()
        if device is not None:
            self.step_executor.submit(torch.cuda.set_device, device)

    def _update_scheduler(self) -> None:
        self.guard.run(lambda: self._advance_schedulers(self.local_epoch))

    def get_current_state(self) -> Any:
        if not self.lock_commit.acquire(timeout=DONOR_WAIT_S):
            raise StateError("asked for the state in the middle of a long round: the joiner must ask another peer")
        try:
            metadata, tensors, infos = super().get_current_state()
            # copies: what is sent while this peer steps on must not change on the way
            return metadata, tuple(tensor.detach().cpu().clone() for tensor in tensors), infos
        finally:
            self.lock_commit.release()

    def download(
        self, timeout_s: float, should_abort: Callable[[], bool]
    ) -> tuple[dict[str, Any], Sequence[torch.Tensor]] | None:
        """Fetch another peer's (metadata, tensors) without installing anything; None if nobody shares a state."""
        future = DecentralizedAverager.load_state_from_peers(self, wait=False, timeout=timeout_s)
        try:
            if not answered(future, timeout_s, should_abort):
                return None
            found: tuple[dict[str, Any], Sequence[torch.Tensor]] | None = future.result()
            return found
        except (FutureTimeoutError, TimeoutError):
            raise StateError(
                f"no peer's state arrived within load_state_timeout={timeout_s:.0f} s. Nothing was changed; raise it on"
                " a slow link."
            ) from None


@cache
def _derive(name: str, bases: tuple[type, ...]) -> type:
    return type(name, bases, {"__module__": bases[-1].__module__})


def checked(averager: Any) -> Any:
    """``averager`` (a hivemind averager class, or a ``functools.partial`` of one) with this module's mixins."""
    if isinstance(averager, partial):
        return partial(checked(averager.func), *averager.args, **averager.keywords)
    mixins: tuple[type, ...] = (TrainingState if issubclass(averager, TrainingStateAverager) else SampleWeighted,)
    if issubclass(averager, PowerSGDGradientAverager):
        mixins += (KeepsFeedback,)
    # mixins must come before their stock bases; the name on the wire stays the stock one
    return _derive(averager.__name__, (CheckedRounds, *mixins, averager))
