"""``engine="hivemind"``: talks to any existing hivemind swarm, built from hivemind's averagers and tracker."""

from lightning_hivemind.engine.stock.engine import StockEngine

__all__ = ["StockEngine"]
