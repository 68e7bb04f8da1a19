"""Downloading the swarm's state and making all of this peer's copies of it agree."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.base import PeerTraining
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.stock.build import Parts
from lightning_hivemind.engine.stock.state import install_state

RETRIES = 5
PAUSE_S = 0.5


def adopt_state(arguments: Arguments, parts: Parts, training: PeerTraining, should_abort: Callable[[], bool]) -> bool:
    """Download until the state is of the swarm's epoch (a donor may lag by one), and install it.

    Accumulated gradients are dropped: they belong to an epoch that is over.

    Returns:
        False if nobody shares a state that is as new as this peer's. Nothing was changed then.

    Raises:
        StateError: what was sent does not fit. Nothing was changed.
    """
    state = parts.state
    newest: tuple[Mapping[str, Any], Sequence[torch.Tensor]] | None = None
    for attempt in range(RETRIES):
        found = state.download(float(arguments.load_state_timeout), should_abort)
        if found is None or _epoch_of(found[0]) < int(state.local_epoch):
            break
        newest = found
        if _epoch_of(found[0]) >= parts.tracker.global_epoch or attempt == RETRIES - 1 or should_abort():
            break
        time.sleep(PAUSE_S)
    if newest is None:
        return False
    if parts.grads is not None:
        parts.grads.load_codec_state(arguments.averaging_timeout)
    with state.lock_commit:
        installed = install_state(state.optimizer, training.extra_tensors, *newest)
        state.local_epoch = installed.epoch
        training.advance_schedulers(installed.epoch)
        installed.settle_rates(state.optimizer)
        load_local_parameters(state)
        if parts.grads is not None:
            parts.grads.reset_accumulated_grads_()
    return True


def load_local_parameters(state: Any) -> None:
    """Make model, host optimizer and averager hold the same parameters: those of the optimizer that steps."""
    with torch.no_grad():
        for mine, stepped in zip(state.main_parameters, parameters_of(state.optimizer), strict=True):
            if mine is not stepped:
                mine.copy_(stepped)
        with state.get_tensors() as averaged:
            for source, target in zip(state._local_tensors(), averaged, strict=True):
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source)


def _epoch_of(metadata: Mapping[str, Any]) -> float:
    epoch = metadata.get("epoch")
    return epoch if isinstance(epoch, int) else math.inf  # no state of ours: ``install_state`` says so
