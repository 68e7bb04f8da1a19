"""Builds hivemind's tracker and averagers with the settings that make steps as short as hivemind can make them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.codecs import NoCompression
from lightning_hivemind.engine.base import PeerTraining
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.priming import prime_statistics
from lightning_hivemind.engine.stock.averagers import checked
from lightning_hivemind.engine.stock.processes import stop_processes
from lightning_hivemind.engine.stock.tracker import ExactTracker

REQUEST_TIMEOUT_S = 3.0  # hivemind's own; it must stay below matchmaking_time, or followers and leaders deadlock


@dataclass(kw_only=True)
class Parts:
    """hivemind's pieces of one peer. ``grads`` is None with ``use_local_updates``."""

    tracker: ExactTracker
    state: Any
    grads: Any | None

    @property
    def dead(self) -> str | None:
        """What does not run any more, of two averager processes and a thread."""
        if not all(averager.is_alive() for averager in (self.grads, self.state) if averager is not None):
            return "averager process"
        return None if self.tracker.is_alive() else "progress tracker"

    def stop(self, deadline: float) -> None:
        """Say goodbye, then stop both averager processes, the hard way if need be, by ``deadline`` (monotonic)."""
        self.tracker.shutdown(max(0.1, min(1.0, (deadline - time.monotonic()) / 4)))
        stop_processes([averager for averager in (self.grads, self.state) if averager is not None], deadline)
        if self.state is not None:
            self.state.step_executor.shutdown(wait=False, cancel_futures=True)


def start_tracker(arguments: Arguments, dht: hivemind.DHT) -> ExactTracker:
    """Read the swarm's progress and start the tracker's thread. hivemind asks the DHT here without a limit."""
    noise = logging.getLogger("hivemind")
    if noise.level == logging.INFO and not arguments.verbose:  # its default; our events say the same, once
        noise.setLevel(logging.WARNING)
    return ExactTracker(
        dht,
        arguments.run_id,
        arguments.target_batch_size,
        client_mode=arguments.client_mode,
        performance_ema_alpha=arguments.performance_ema_alpha,
        status_loglevel=_loglevel(arguments),
        start=True,
        # how late others' last samples are noticed: with hivemind's 0.5 s a small model's peers give twice the target;
        # looks are this frequent only towards the end of an epoch
        **{"min_refresh_period": 0.1, **(arguments.tracker_opts or {})},
    )


def build_parts(
    arguments: Arguments, dht: hivemind.DHT, tracker: ExactTracker, training: PeerTraining, *, share_state: bool
) -> Parts:
    """Start the averagers' processes; must be called from the main thread (it forks)."""
    parts = Parts(tracker=tracker, state=None, grads=None)
    try:
        parts.state = _build_state(arguments, dht, training, share_state=share_state)
        if not arguments.use_local_updates:
            parts.grads = _build_grads(arguments, dht, parts.state)
    except BaseException:
        parts.stop(time.monotonic() + arguments.shutdown_timeout)
        raise
    return parts


def _build_state(arguments: Arguments, dht: hivemind.DHT, training: PeerTraining, *, share_state: bool) -> Any:
    statistics = arguments.average_opt_statistics
    if training.rebuild_optimizer is not None:
        groups: Any = [dict(group) for group in training.optimizer.param_groups]
        rebuild = training.rebuild_optimizer
        optimizer: Any = (lambda groups: _primed(rebuild(groups), statistics)) if statistics else rebuild
    else:
        groups, optimizer = None, training.optimizer
        _primed(optimizer, statistics)
    return checked(TrainingStateAverager)(
        dht=dht,
        prefix=f"{arguments.run_id}_state_averager",
        optimizer=optimizer,
        params=groups,
        initialize_optimizer=False,
        offload_optimizer=arguments.offload_optimizer,
        custom_gradients=arguments.offload_optimizer,
        delta_rule_averaging=arguments.use_local_updates and arguments.delay_state_averaging,
        compression=_codec(arguments.state_averaging_compression),
        state_compression=_codec(arguments.load_state_compression),
        average_opt_statistics=statistics,
        extra_tensors=training.extra_tensors,
        performance_ema_alpha=arguments.performance_ema_alpha,
        status_loglevel=_loglevel(arguments),
        advance_schedulers=training.advance_schedulers,
        allow_state_sharing=share_state and not arguments.client_mode and not arguments.auxiliary,
        **_common(arguments),
    )


def _build_grads(arguments: Arguments, dht: hivemind.DHT, state: Any) -> Any:
    grads = checked(arguments.grad_averager_factory or GradientAverager)(
        dht=dht,
        prefix=f"{arguments.run_id}_grad_averager",
        parameters=state.main_parameters,
        reuse_grad_buffers=arguments.reuse_grad_buffers,
        compression=_codec(arguments.grad_compression),
        warn=False,
        **_common(arguments),
    )
    if arguments.offload_optimizer:  # the host optimizer steps on the averaged gradients where they lie
        with grads.get_tensors() as averaged:
            for parameter, gradient in zip(parameters_of(state.optimizer), averaged, strict=True):
                # frozen parameters have none: a zero gradient would still let weight decay change them
                parameter.grad = gradient if parameter.requires_grad else None
    return grads


def _common(arguments: Arguments) -> dict[str, Any]:
    return {
        "client_mode": arguments.client_mode,
        "auxiliary": arguments.auxiliary,
        "min_matchmaking_time": arguments.matchmaking_time,
        "request_timeout": min(REQUEST_TIMEOUT_S, arguments.matchmaking_time / 2),
        "allreduce_timeout": arguments.allreduce_timeout,
        "next_chunk_timeout": arguments.next_chunk_timeout,
        "shutdown_timeout": arguments.shutdown_timeout,
        "start": True,
        **(arguments.averager_opts or {}),
    }


def _codec(codec: Any) -> Any:
    return NoCompression() if codec is None else codec


def _loglevel(arguments: Arguments) -> int:
    return logging.INFO if arguments.verbose else logging.DEBUG


def _primed(optimizer: torch.optim.Optimizer, statistics: Sequence[str]) -> torch.optim.Optimizer:
    prime_statistics(optimizer, statistics, of_all=True)
    return optimizer
