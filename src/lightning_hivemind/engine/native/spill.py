"""Averages that wait for long: while a state is downloaded over a slow line, the swarm makes steps."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile

import torch
from torch import Tensor

log = logging.getLogger("lightning_hivemind")

#: so much of the disk is left to others
LEFT_BYTES = 2 << 30


def on_disk(values: Tensor) -> Tensor | None:
    """A copy, float32 CPU (elements,), in a file of the temporary directory, which goes when the tensor goes.

    None where there is no room for it. (The room is taken at once: writing to memory on a full disk is no error but the
    end of the process.)
    """
    size, folder = 4 * values.numel(), tempfile.gettempdir()
    if not size:
        return None
    if shutil.disk_usage(folder).free < size + LEFT_BYTES:
        _tell(size, folder, f"{LEFT_BYTES:,} bytes are left to others")
        return None
    with tempfile.TemporaryFile(prefix="lightning-hivemind-") as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                _tell(size, folder, str(error))
                return None
        memory = mmap.mmap(file.fileno(), size)
    return torch.frombuffer(memory, dtype=torch.float32).copy_(values)


def _tell(size: int, folder: str, reason: str) -> None:
    log.warning("no room for an average of %s bytes in %s (%s): a newer state is taken", f"{size:,}", folder, reason)
