"""Host memory that is used again, and never while somebody still looks at it."""

from __future__ import annotations

import _thread
import gc
import mmap
import signal
import threading
from operator import methodcaller

import pytest
import torch

from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.memory import Memory


def test_a_piece_is_used_again_once_nobody_refers_to_it() -> None:
    memory = Memory(kept_bytes=4000)
    first = memory.floats(1000)
    place = first.data_ptr()
    del first
    assert memory.floats(1000).data_ptr() == place
    other = memory.bytes(4000)
    assert other.dtype == torch.uint8
    assert other.data_ptr() == place


def test_whoever_looks_at_a_part_of_it_keeps_all_of_it() -> None:
    memory = Memory(kept_bytes=1 << 20)
    first = memory.floats(1000)
    place, view = first.data_ptr(), memory_of(first[10:20])
    del first
    gc.collect()
    assert memory.floats(1000).data_ptr() != place
    view.release()
    del view
    both = [memory.floats(1000), memory.floats(1000)]
    assert place in {one.data_ptr() for one in both}


def test_two_pieces_at_a_time_are_two() -> None:
    memory = Memory(kept_bytes=1 << 20)
    one, other = memory.floats(10), memory.floats(10)
    one.fill_(1.0)
    other.fill_(2.0)
    assert one.tolist() == [1.0] * 10


def test_no_more_is_kept_than_allowed() -> None:
    memory = Memory(kept_bytes=4000)
    pieces = [memory.floats(1000) for _ in range(5)]
    pieces.clear()
    memory.bytes(1)
    assert memory._free_bytes == 4000
    assert sum(map(len, memory._free.values())) == 1


def test_nothing_is_a_piece_too() -> None:
    memory = Memory()
    assert memory.floats(0).shape == (0,)
    assert memory.bytes(0).shape == (0,)


def test_an_interrupt_that_comes_just_before_a_piece_is_given_back_is_not_lost() -> None:
    memory = Memory(kept_bytes=4000)
    pieces = [memory.floats(1000)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            list(
                map(methodcaller("__call__"), [_thread.interrupt_main, pieces.clear])
            )  # no line of Python between them
    finally:
        signal.signal(signal.SIGINT, before)
    assert not pieces


class Runtime:
    """Of a GPU: which places are pinned."""

    class cudaError:
        success = 0

    def __init__(self, room: int) -> None:
        self.room, self.asked = room, 0
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, count: int, _: int) -> int:
        self.asked += 1
        if sum(self.pinned.values()) + count > self.room:
            return 2
        self.pinned[address] = count
        return self.cudaError.success

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def test_vectors_beside_a_gpu_are_pinned_until_they_go_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(room=1 << 30)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = Memory(kept_bytes=4000, pinned=True)
    vectors = [memory.floats(1000) for _ in range(3)]
    others = memory.bytes(4000), memory.scratch(1000)
    assert runtime.pinned == {one.data_ptr(): mmap.PAGESIZE for one in vectors}
    place = vectors[0].data_ptr()
    del vectors[0]
    del others
    assert memory.floats(1000).data_ptr() == place, "a vector is used again as a vector"
    vectors.clear()
    memory.bytes(1)
    gc.collect()
    assert len(runtime.pinned) == 1, "no more than is kept"
    memory.give(torch.zeros(10_000, dtype=torch.uint8), 4000)  # which is not pinned
    assert memory.floats(1000).data_ptr() in runtime.pinned
    del memory
    gc.collect()
    assert not runtime.pinned


@pytest.mark.parametrize("kept_bytes", [0, 4000])
def test_a_vector_beside_a_gpu_stays_pinned_while_anybody_looks_at_it(
    kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(room=1 << 30)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    part = Memory(kept_bytes, pinned=True).floats(1000)[100:200]
    gc.collect()
    assert list(runtime.pinned) == [part.data_ptr() - 400]
    del part
    gc.collect()
    assert not runtime.pinned


def test_where_no_more_can_be_pinned_it_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(room=mmap.PAGESIZE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = Memory(kept_bytes=1 << 20, pinned=True)
    vectors = [memory.floats(1000) for _ in range(4)]
    assert len(vectors) == 4
    assert runtime.asked == 2
    assert caplog.text.count("no pinned memory") == 1


def test_many_threads_never_share_a_piece() -> None:
    memory, wrong = Memory(kept_bytes=1 << 20), []

    def work(number: int) -> None:
        for _ in range(300):
            piece = memory.floats(500).fill_(number)
            if not bool((piece == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
