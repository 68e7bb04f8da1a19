"""How tensors are written on the wire: hivemind's formats, encoded and decoded by code that is right.

(With ``engine="native"`` these classes only say what is wanted: it encodes by ``engine/native/codecs``.)

The classes here are subclasses of hivemind's with the same names and the same wire types, so that peers without this
package read what they write and the other way round, and ``isinstance`` against hivemind's classes holds. They exist
because hivemind 1.1.12

- cannot decode its 8-bit formats with numpy >= 2.4 (it calls ``int()`` on an array of one element);
- encodes through ``torch.quantize_per_tensor``, which PyTorch has announced to remove;
- turns one NaN into a message that is NaN everywhere, and so into NaN at every peer of the round;
- fails at empty tensors, and at integers and bfloat16 in its half formats (BatchNorm's counter is an integer); clips
  Adam's step counter at 65504 when it is downloaded in half precision;
- loses the mean where it is allowed to encode in place.

A bound on numpy would cure the first only, and would hold back everything else in the user's environment. The wire
format is hivemind's public promise, so codecs of our own are the smallest change that cures all of it.

Importing this package puts the codecs into hivemind's table of wire types: everything that this process and its forks
decode goes through them, whatever object was passed to hivemind. :func:`map_codec` does the same for encoding. Once
hivemind's own codecs pass ``tests/unit/codecs``, this package can become a list of imports.

A codec writes a tensor that it cannot write, or that would not get smaller, uncompressed (every message says by itself
how it is written): integers, bfloat16 where the format has no room for it, and very small tensors.
"""

from __future__ import annotations

from hivemind.compression import (
    CompressionBase,
    NoCompression,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
)
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

from lightning_hivemind.codecs import powersgd
from lightning_hivemind.codecs.blockwise import BlockwiseQuantization
from lightning_hivemind.codecs.floating import Float16Compression, ScaledFloat16Compression
from lightning_hivemind.codecs.mapping import install, map_codec
from lightning_hivemind.codecs.native import BFloat16Compression, Blockwise4BitQuantization, TopKCompression
from lightning_hivemind.codecs.quantile import Quantile8BitQuantization
from lightning_hivemind.codecs.uniform import Uniform8BitQuantization

install()
powersgd.install()

__all__ = [
    "BFloat16Compression",
    "Blockwise4BitQuantization",
    "BlockwiseQuantization",
    "CompressionBase",
    "Float16Compression",
    "NoCompression",
    "PerTensorCompression",
    "PowerSGDGradientAverager",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SizeAdaptiveCompression",
    "TopKCompression",
    "Uniform8BitQuantization",
    "map_codec",
]
