"""Host memory that is used again, and never while somebody still looks at it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hivemind.engine.native import memory as module
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
    assert memory._free_bytes == 4000
    assert sum(map(len, memory._free.values())) == 1


def test_nothing_is_a_piece_too() -> None:
    memory = Memory()
    assert memory.floats(0).shape == (0,)
    assert memory.bytes(0).shape == (0,)


def test_pinned_memory_is_for_vectors_and_used_again_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[Any] = []

    def piece(count: int) -> Any:
        pieces.append(np.zeros(count, np.uint8))
        return pieces[-1]

    monkeypatch.setattr(module, "pinned_piece", piece)
    memory = Memory(kept_bytes=1 << 20, pinned=True)
    vector = memory.floats(1000)
    assert [one.ctypes.data for one in pieces] == [vector.data_ptr()]
    place = vector.data_ptr()
    del vector
    assert memory.bytes(4000).data_ptr() != place
    assert memory.floats(1000).data_ptr() == place
    assert len(pieces) == 1


def test_where_there_is_no_pinned_memory_it_is_of_the_usual_kind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(module.torch, "empty", none)
    assert module.pinned_piece(1000).shape == (1000,)
    assert "no pinned memory" in caplog.text


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
