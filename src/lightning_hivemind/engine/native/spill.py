"""Averages that wait for long: while a state is downloaded over a slow line, the swarm makes steps."""

from __future__ import annotations

import logging
import mmap
import os
import resource
import shutil
import tempfile

import torch
from torch import Tensor

from lightning_hivemind.platform import takes_memory

log = logging.getLogger("lightning_hivemind")

MOST_ON_DISK = 1000  # a peer that is further behind takes a whole state
#: so much of the disk is left to others
LEFT_BYTES = 2 << 30
#: a folder for temporary files that is on a disk where the usual one is memory (systemd has /tmp so)
ELSEWHERE = "/var/tmp"


def most_on_disk() -> int:
    """How many averages may wait there: each keeps a file open, of which others need some, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_ON_DISK if soft == resource.RLIM_INFINITY else min(MOST_ON_DISK, soft // 4)


def on_disk(values: Tensor) -> Tensor | None:
    """A copy, float32 CPU (elements,), in a temporary file, which goes when the tensor goes.

    None where there is no room for it, or no such file can be made. (The room is taken at once: writing to memory on a
    full disk is no error but the end of the process.)
    """
    size = 4 * values.numel()
    if not size:
        return None
    try:
        folder = _folder()
        if shutil.disk_usage(folder).free < size + LEFT_BYTES:
            raise OSError(f"{LEFT_BYTES:,} bytes in {folder} are left to others")
        with tempfile.TemporaryFile(prefix="lightning-hivemind-", dir=folder) as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        log.warning("no room for an average of %s bytes on disk (%s): a newer state is taken", f"{size:,}", error)
        return None
    return torch.frombuffer(memory, dtype=torch.float32).copy_(values)


def _folder() -> str:
    """Of temporary files; raises OSError where they would all take memory, of which there is too little."""
    folders = tempfile.gettempdir(), ELSEWHERE
    found = next((folder for folder in folders if os.path.isdir(folder) and not takes_memory(folder)), None)
    if found is None:
        raise OSError(
            f"{' and '.join(dict.fromkeys(folders))} are in memory, or not there: set TMPDIR to one on a disk"
        )
    return found
