"""Host memory that is used again. A fresh piece of many megabytes costs ten times as much as writing to it: the kernel
maps it page by page, and the allocator returns it at once when it is free.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hivemind.engine.native.host import host_floats
from lightning_hivemind.platform import advise_memory

log = logging.getLogger("lightning_hivemind")

_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_POPULATED_BYTES = 4 << 20
_DONT_NEED = 4


class _Lease(weakref.ref[Any]):
    """Of a piece that somebody uses. That nobody does any more is noted without a line of Python: an interrupt that
    comes in the meantime would be raised in that line, and Python drops what is raised where an object ends. (Pinned
    memory that goes back to the system does run one: seldom.)
    """

    __slots__ = ("piece", "pinned")

    piece: Any
    pinned: bool


class Memory:
    """Hands out pieces, and takes those back that nothing refers to any more. Thread-safe.

    Args:
        kept_bytes: of pieces that nobody uses; what is more goes back to the system, when a piece is asked for next.
        pinned: vectors of :meth:`floats` stay where they are, so that a GPU copies from and to them by itself.
        device: that GPU: whatever thread asks, no other one is woken up.
    """

    def __init__(self, kept_bytes: int = 0, *, pinned: bool = False, device: torch.device | None = None) -> None:
        self.kept_bytes, self._pinned, self._device = kept_bytes, pinned, device
        self._lock = threading.Lock()
        #: by their bytes, and whether they are pinned
        self._free: defaultdict[tuple[int, bool], list[Any]] = defaultdict(list)
        self._free_bytes = 0
        self._leases: dict[int, _Lease] = {}  # by their id
        self._ended: deque[_Lease] = deque()

    @property
    def pinned(self) -> bool:
        """Whether what a GPU copies from and to stays where it is."""
        return self._pinned

    def bytes(self, count: int) -> Tensor:
        """uint8 CPU (count,) with anything in it."""
        return self._piece(count, pinned=False)

    def scratch(self, count: int) -> Tensor:
        """float32 CPU (count,) with anything in it, which no device copies from or to."""
        return self.bytes(4 * count).view(torch.float32) if count else host_floats(0)

    def floats(self, count: int) -> Tensor:
        """float32 CPU (count,) with anything in it."""
        return self._piece(4 * count, pinned=self._pinned).view(torch.float32) if count else host_floats(0)

    def _piece(self, count: int, *, pinned: bool) -> Tensor:
        with self._lock:
            left = self._collect()
            pieces = self._free[count, pinned]
            piece = pieces.pop() if pieces else None
            self._free_bytes -= count if piece is not None else 0
        _return(left)
        if piece is None and pinned:
            with torch.cuda.device(self._device) if self._device is not None else contextlib.nullcontext():
                piece = pinned_piece(count)
            pinned = self._pinned = piece is not None  # if not now, never again
        if piece is None:
            piece = np.empty(count, np.uint8)  # by numpy, which asks for large pages: half as dear as torch's
        used = piece.view()
        if count <= self.kept_bytes:
            lease = _Lease(used, self._ended.append)
            lease.piece, lease.pinned = piece, pinned
            self._leases[id(lease)] = lease
        return torch.from_numpy(used)  # it, and all that shares its memory, keep the view alive

    def give(self, memory: Tensor, count: int, pieces: int = 1) -> None:
        """So many pieces of ``count`` bytes, the first of ``memory``, uint8 CPU, that nobody uses any more; fewer if
        there are not so many in it.
        """
        pieces = min(pieces, memory.numel() // count) if count else 0
        if pieces and not self._pinned:
            begin, length = _pages(memory[pieces * count :])
            advise_memory(begin, length, _DONT_NEED)  # else a piece would keep all of it
            given = [memory.numpy()[start : start + count] for start in range(0, pieces * count, count)]
            with self._lock:
                left = [(piece, False) for piece in given if not self._keep(piece, pinned=False)]
            _return(left)

    def _collect(self) -> list[tuple[Any, bool]]:
        """Take back what nobody uses any more; returns, of that, what is too much, and whether it is pinned."""
        ended = [self._leases.pop(id(self._ended.popleft())) for _ in range(len(self._ended))]
        return [(one.piece, one.pinned) for one in ended if not self._keep(one.piece, pinned=one.pinned)]

    def _keep(self, piece: Any, *, pinned: bool) -> bool:
        """Take it back, unless it is too much; returns whether."""
        if self._free_bytes + piece.nbytes > self.kept_bytes:
            return False
        self._free[piece.nbytes, pinned].append(piece)
        self._free_bytes += piece.nbytes
        return True


def _return(pieces: list[tuple[Any, bool]]) -> None:
    """To the system, what is too much: pieces, and whether they are pinned."""
    for piece, pinned in pieces:
        if piece.base is not None and not pinned:  # it may be a part of what others keep
            advise_memory(*_pages(torch.from_numpy(piece)), _DONT_NEED)


def pinned_piece(count: int) -> Any | None:
    """uint8 (count,), an array that the system keeps where it is until it is gone; None if it does not."""
    whole = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
    room = np.empty(whole + mmap.PAGESIZE, np.uint8)
    address, _ = _pages(torch.from_numpy(room))  # nobody else has a part of these
    piece = room[address - room.ctypes.data :][:count]
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if (error := runtime.cudaHostRegister(address, whole, 0)) != runtime.cudaError.success:
        log.warning("no pinned memory, so copies from and to the GPU are slower: %s", error)
        with contextlib.suppress(RuntimeError, AssertionError):  # the error stays until something is told it
            torch.zeros(1, dtype=torch.uint8, device="cuda")
        return None
    weakref.finalize(room, runtime.cudaHostUnregister, address).atexit = False  # all that shares its memory keeps it
    return piece


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
