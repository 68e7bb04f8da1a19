"""The engines by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.base import Engine, PeerTraining
from lightning_hivemind.events import EventBus

if TYPE_CHECKING:
    from lightning_hivemind.network.daemon import PeerNetwork


def make_engine(arguments: Arguments, network: PeerNetwork, training: PeerTraining, events: EventBus) -> Engine:
    """The engine for ``arguments.engine``; not started yet."""
    if arguments.engine == "native":
        from lightning_hivemind.engine.native.engine import NativeEngine

        return NativeEngine(arguments, network, training, events)
    from lightning_hivemind.engine.stock import StockEngine  # imports hivemind

    return StockEngine(arguments, network, training, events)
