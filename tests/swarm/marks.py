"""Marks of swarm tests, and what several of them ask for."""

from __future__ import annotations

import pytest

#: of arguments that the native engine refuses (tests/unit/test_arguments.py), or of hivemind's own parts
HIVEMIND_ONLY = pytest.mark.parametrize("engine", ["hivemind"])
#: of what no engine has a part in, or only the default: once is enough
ANY_ENGINE = pytest.mark.parametrize("engine", ["native"])

#: 16-mixed with a scaler that works without a GPU
HALF = "[pl.plugins.precision.MixedPrecision('16-mixed', 'cpu', torch.amp.GradScaler('cpu', init_scale=1024.0))]"
