"""Makes the strategies known to whichever Lightning package is loaded: by class for its checks, and by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.lightning_twins import accept_everywhere, lightning_module, loaded_packages
from lightning_hivemind.strategy import CollaborativeStrategy, HivemindStrategy

NAMES = {"hivemind": HivemindStrategy, "collaborative": CollaborativeStrategy}


def _needs_arguments(cls: type) -> Callable[..., Any]:
    """What a name alone makes: an error that shows the line to write, unless arguments came with the name."""

    def make(**arguments: Any) -> Any:
        if "target_batch_size" not in arguments:
            raise ArgumentError(
                f"strategy={cls.strategy_name!r} as a name says nothing of the swarm's batch."  # type: ignore[attr-defined]
                f" Write Trainer(strategy={cls.__name__}(target_batch_size=...)) instead."
            )
        return cls(**arguments)

    return make


def register() -> None:
    """Idempotent; called whenever somebody takes a strategy class from the package."""
    accept_everywhere(HivemindStrategy, CollaborativeStrategy)
    for package in loaded_packages():
        registry = lightning_module(package, "strategies").StrategyRegistry
        for name, cls in NAMES.items():
            if name not in registry:
                registry.register(
                    name, _needs_arguments(cls), description="Trains one model together with other peers."
                )
