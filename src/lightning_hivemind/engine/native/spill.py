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

    None where there is no room for it, or no such file can be made. (The room is taken at once: writing to memory on a
    full disk is no error but the end of the process.)
    """
    size = 4 * values.numel()
    if not size:
        return None
    try:
        folder = tempfile.gettempdir()
        if shutil.disk_usage(folder).free < size + LEFT_BYTES:
            raise OSError(f"{LEFT_BYTES:,} bytes in {folder} are left to others")
        with tempfile.TemporaryFile(prefix="lightning-hivemind-") as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        log.warning("no room for an average of %s bytes on disk (%s): a newer state is taken", f"{size:,}", error)
        return None
    return torch.frombuffer(memory, dtype=torch.float32).copy_(values)
