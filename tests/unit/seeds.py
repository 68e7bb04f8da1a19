"""How many random runs a test makes: few in ``make test``, those of ``SEEDS=first:last`` in ``make hostile``."""

from __future__ import annotations

import os

import pytest

#: whether they were asked for
MANY = "SEEDS" in os.environ
#: of a state machine, which draws its own runs: one for so many seeds
SEEDS_PER_EXAMPLE = 10


#: of a state machine, which makes all its runs in one test
takes_long = pytest.mark.timeout(3 * 3600 if MANY else 420)


def seeds(usual: int) -> range:
    first, last = map(int, os.environ.get("SEEDS", f"0:{usual}").split(":"))
    return range(first, last)


def examples(usual: int) -> int:
    """Of a state machine, at least as many as usual."""
    return max(usual, len(seeds(usual)) // SEEDS_PER_EXAMPLE)
