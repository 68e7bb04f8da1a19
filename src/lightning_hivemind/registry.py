"""Makes the strategies known to whichever Lightning package is loaded: by class for its checks, and by name."""

from __future__ import annotations

from lightning_hivemind.lightning_twins import accept_everywhere, lightning_module, loaded_packages
from lightning_hivemind.strategy import CollaborativeStrategy, HivemindStrategy

NAMES = {"hivemind": HivemindStrategy, "collaborative": CollaborativeStrategy}


def register() -> None:
    """Idempotent; called whenever somebody takes a strategy class from the package."""
    accept_everywhere(HivemindStrategy, CollaborativeStrategy)
    for package in loaded_packages():
        registry = lightning_module(package, "strategies").StrategyRegistry
        for name, cls in NAMES.items():
            if name not in registry:
                registry.register(name, cls, description="Trains one model together with other peers.")
