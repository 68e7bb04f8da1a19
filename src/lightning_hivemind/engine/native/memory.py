"""Host memory that is used again. A fresh piece of many megabytes costs ten times as much as writing to it: the kernel
maps it page by page, and the allocator returns it at once when it is free.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hivemind.platform import advise_memory

_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_POPULATED_BYTES = 4 << 20
_DONT_NEED = 4


class Memory:
    """Hands out pieces, and takes each back by itself once nothing refers to it any more. Thread-safe.

    Args:
        kept_bytes: of pieces that nobody uses; what is more goes back to the system.
    """

    def __init__(self, kept_bytes: int = 0) -> None:
        self.kept_bytes = kept_bytes
        self._lock = threading.RLock()  # a collection of garbage may take a piece back within it
        self._free: defaultdict[int, list[Any]] = defaultdict(list)
        self._free_bytes = 0

    def bytes(self, count: int) -> Tensor:
        """uint8 CPU (count,) with anything in it."""
        with self._lock:
            pieces = self._free[count]
            piece = pieces.pop() if pieces else None
            self._free_bytes -= count if piece is not None else 0
        if piece is None:
            piece = np.empty(count, np.uint8)  # by numpy, which asks for large pages: half as dear as torch's
        lease = piece.view()
        weakref.finalize(lease, self._take_back, piece).atexit = False
        return torch.from_numpy(lease)  # it, and all that shares its memory, keep the lease alive

    def floats(self, count: int) -> Tensor:
        """float32 CPU (count,) with anything in it."""
        return self.bytes(4 * count).view(torch.float32) if count else torch.empty(0)

    def give(self, memory: Tensor, count: int) -> None:
        """A piece of ``count`` bytes, the first of ``memory``, uint8 CPU, that nobody uses any more."""
        if 0 < count <= memory.numel():
            begin, length = _pages(memory[count:])
            advise_memory(begin, length, _DONT_NEED)  # else the piece would keep all of it
            self._take_back(memory.numpy()[:count])

    def _take_back(self, piece: Any) -> None:
        with self._lock:
            if self._free_bytes + piece.nbytes <= self.kept_bytes:
                self._free[piece.nbytes].append(piece)
                self._free_bytes += piece.nbytes


def populate(piece: Tensor) -> None:
    """Have the system map these bytes, uint8 CPU, now; what is in them stays. (Linux; elsewhere nothing.)

    Else that happens page by page when they are first written to, while others wait for it: 0.35 ms a megabyte, 2.4 in
    a virtual machine that has given memory back. Other threads may write to them meanwhile.
    """
    begin, length = _pages(piece)
    for start in range(begin, begin + length, _POPULATED_BYTES):  # whoever maps anything else waits for each of these
        advise_memory(start, min(_POPULATED_BYTES, begin + length - start), _POPULATE_WRITE)


def _pages(piece: Tensor) -> tuple[int, int]:
    """Where the whole pages within it begin, and their bytes."""
    begin = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    return begin, max(0, (piece.data_ptr() + piece.numel()) // mmap.PAGESIZE * mmap.PAGESIZE - begin)
