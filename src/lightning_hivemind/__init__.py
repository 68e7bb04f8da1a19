"""Train one model together on unreliable, mixed machines across the internet, from an ordinary Lightning script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_hivemind._version import __version__

if TYPE_CHECKING:
    from lightning_hivemind.codecs import (
        BFloat16Compression,
        Blockwise4BitQuantization,
        BlockwiseQuantization,
        Float16Compression,
        NoCompression,
        PerTensorCompression,
        PowerSGDGradientAverager,
        Quantile8BitQuantization,
        RoleAdaptiveCompression,
        ScaledFloat16Compression,
        SizeAdaptiveCompression,
        TopKCompression,
        Uniform8BitQuantization,
    )
    from lightning_hivemind.errors import LightningHivemindError
    from lightning_hivemind.outer import DiLoCo, StreamingDiLoCo
    from lightning_hivemind.strategy import CollaborativeStrategy, HivemindStrategy

_HOMES = {
    "BFloat16Compression": "codecs",
    "Blockwise4BitQuantization": "codecs",
    "BlockwiseQuantization": "codecs",
    "CollaborativeStrategy": "strategy",
    "DiLoCo": "outer",
    "Float16Compression": "codecs",
    "HivemindStrategy": "strategy",
    "LightningHivemindError": "errors",
    "NoCompression": "codecs",
    "PerTensorCompression": "codecs",
    "PowerSGDGradientAverager": "codecs",
    "Quantile8BitQuantization": "codecs",
    "RoleAdaptiveCompression": "codecs",
    "ScaledFloat16Compression": "codecs",
    "SizeAdaptiveCompression": "codecs",
    "StreamingDiLoCo": "outer",
    "TopKCompression": "codecs",
    "Uniform8BitQuantization": "codecs",
}

__all__ = [
    "BFloat16Compression",
    "Blockwise4BitQuantization",
    "BlockwiseQuantization",
    "CollaborativeStrategy",
    "DiLoCo",
    "Float16Compression",
    "HivemindStrategy",
    "LightningHivemindError",
    "NoCompression",
    "PerTensorCompression",
    "PowerSGDGradientAverager",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SizeAdaptiveCompression",
    "StreamingDiLoCo",
    "TopKCompression",
    "Uniform8BitQuantization",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Late, so that importing this package imports neither Lightning package nor hivemind; and every time, so that a
    # Lightning package imported after this one knows the strategies as soon as somebody takes one.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == "codecs":
        importlib.import_module("lightning_hivemind.platform").require_hivemind()
    if home == "strategy":
        importlib.import_module("lightning_hivemind.registry").register()
    return getattr(importlib.import_module(f"lightning_hivemind.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
