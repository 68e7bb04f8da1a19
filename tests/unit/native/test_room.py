"""Memory that is ready when a state arrives, and never holds anything up."""

from __future__ import annotations

import mmap
import platform
import resource
import sys
import threading

import numpy as np
import pytest
import torch

from lightning_hivemind.engine.native.memory import Memory, populate
from lightning_hivemind.engine.native.state.room import MOST_RESERVED, SPARES, StateMemory
from swarm.town import wait_for

SIZE = 32 << 20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def old_kernel() -> bool:
    if not sys.platform.startswith("linux"):
        return True
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) < (5, 14)


@pytest.mark.skipif(old_kernel(), reason="needs MADV_POPULATE_WRITE, of Linux 5.14")
def test_what_was_populated_is_written_to_without_waiting_for_the_system() -> None:
    def written(ready: bool) -> int:
        piece = torch.frombuffer(mmap.mmap(-1, SIZE), dtype=torch.uint8)  # and not what malloc has kept of others
        if ready:
            populate(piece)
        before = faults()
        piece.fill_(1)
        return faults() - before

    assert 2 * written(ready=True) < written(ready=False)


@pytest.mark.parametrize("count", [0, 1, 4095, 3 * 4096 + 5])
@pytest.mark.parametrize("start", [0, 1, 4096])
def test_what_is_there_stays(count: int, start: int) -> None:
    memory = torch.from_numpy(np.arange(start + count + 4096, dtype=np.uint64).view(np.uint8)[: start + count])
    before = memory.clone()
    populate(memory[start:])
    assert torch.equal(memory, before)


def test_a_state_goes_where_memory_was_prepared_also_with_the_optimizers_own() -> None:
    memory = StateMemory()
    memory.prepare(SIZE)
    assert memory._prepared is not None
    place = memory._prepared.data_ptr()
    first = memory.take(MOST_RESERVED * SIZE - 5)
    assert (first.data_ptr(), first.numel()) == (place, MOST_RESERVED * SIZE - 5)
    assert memory.take(SIZE).data_ptr() != place, "another state is another piece"


def test_a_state_that_is_larger_than_thought_has_memory_of_its_own() -> None:
    memory = StateMemory()
    memory.prepare(64)
    assert memory.take(64 * MOST_RESERVED + 1).numel() == 64 * MOST_RESERVED + 1
    assert memory.take(100).numel() == 100


@pytest.mark.parametrize(("size", "pieces"), [(0, 0), (99_999, 0), (100_000, 1), (199_999, 1), (200_000, SPARES)])
def test_what_a_state_came_in_is_memory_for_a_sum_and_an_average(size: int, pieces: int) -> None:
    spares = Memory(kept_bytes=300_000)
    memory = StateMemory(spares, 100_000)
    memory.give_back(memory.take(size))
    assert spares._free_bytes == 100_000 * pieces
    first, second = spares.bytes(100_000), spares.bytes(100_000)
    first.fill_(1)
    second.fill_(2)
    assert (first.unique().tolist(), second.unique().tolist()) == ([1], [2])


def test_a_state_that_is_smaller_than_a_sum_was_prepared_for_both() -> None:
    spares = Memory(kept_bytes=300_000)
    memory = StateMemory(spares, 100_000)
    memory.prepare(99_800)  # a sum has marks behind its values
    state = memory.take(99_800)
    place = state.data_ptr()
    memory.give_back(state)
    del state
    assert spares._free_bytes == 100_000 * SPARES
    assert spares.bytes(100_000).data_ptr() in {place, place + 100_000}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the system")
@pytest.mark.parametrize("pieces", [1, SPARES])
def test_of_a_state_that_is_not_used_any_more_no_more_is_kept(pieces: int) -> None:
    spares = Memory(kept_bytes=pieces * SIZE)
    state = torch.frombuffer(mmap.mmap(-1, 4 * SIZE, mmap.MAP_PRIVATE), dtype=torch.uint8).fill_(1)
    spares.give(state, SIZE, pieces)
    assert state[: pieces * SIZE].min() == 1
    assert state[pieces * SIZE + mmap.PAGESIZE :].max() == 0, "it has gone back"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the system")
def test_of_pieces_that_are_not_kept_the_system_gets_its_memory_though_others_of_the_same_state_are() -> None:
    spares = Memory(kept_bytes=SIZE)
    state = torch.frombuffer(mmap.mmap(-1, 2 * SIZE, mmap.MAP_PRIVATE), dtype=torch.uint8).fill_(1)
    spares.give(state, SIZE, 2)
    assert spares._free_bytes == SIZE
    assert state[:SIZE].min() == 1
    assert state[SIZE + mmap.PAGESIZE :].max() == 0


def test_a_pool_for_a_gpu_has_no_use_for_it() -> None:
    memory = StateMemory(Memory(pinned=True), SIZE)
    memory.prepare(64)
    assert memory._prepared is not None
    assert memory._prepared.numel() == 64 * MOST_RESERVED


def test_what_was_not_needed_is_given_back() -> None:
    memory = StateMemory()
    memory.prepare(SIZE)
    memory.release()
    assert memory._prepared is None


def test_where_the_system_promises_no_more_than_it_has_less_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    get = Memory.bytes

    def strict(self: Memory, count: int) -> torch.Tensor:
        if count > SIZE:
            raise MemoryError
        return get(self, count)

    monkeypatch.setattr(Memory, "bytes", strict)
    memory = StateMemory()
    memory.prepare(SIZE)
    assert memory.take(SIZE).numel() == SIZE


def test_no_thread_is_left() -> None:
    memory = StateMemory()
    memory.prepare(SIZE)
    memory.take(SIZE)
    wait_for(
        lambda: all(one.name != "lightning-hivemind-memory" for one in threading.enumerate()), "the threads have ended"
    )
