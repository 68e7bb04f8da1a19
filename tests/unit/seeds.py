"""How many random runs a test makes: few in ``make test``, those of ``SEEDS=first:last`` in ``make hostile``."""

from __future__ import annotations

import os

#: whether they were asked for
MANY = "SEEDS" in os.environ
#: of a state machine, which draws its own runs: one for so many seeds
SEEDS_PER_EXAMPLE = 10


def seeds(usual: int) -> range:
    first, last = map(int, os.environ.get("SEEDS", f"0:{usual}").split(":"))
    return range(first, last)


def examples(usual: int) -> int:
    """Of a state machine, at least as many as usual."""
    return max(usual, len(seeds(usual)) // SEEDS_PER_EXAMPLE)
