"""What an engine is given, where nothing but the optimizer matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_hivemind.engine.base import PeerTraining


def training_of(optimizer: torch.optim.Optimizer, **fields: Any) -> PeerTraining:
    """Of a peer with this optimizer; ``fields`` of :class:`PeerTraining` are those that matter besides."""
    plain = PeerTraining(
        optimizer=optimizer,
        rebuild_optimizer=None,
        make_scheduler=lambda optimizer: None,
        advance_schedulers=lambda epoch: None,
        take_schedulers_back=lambda epoch: None,
        before_optimizer_step=lambda optimizer: None,
        extra_tensors=[],
        buffers=[],
        schema=[],
        should_abort=lambda: False,
    )
    return replace(plain, **fields)
