"""What a forked child gets of a tensor, and what it does not."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor

from lightning_hivemind.network.forking import kept_from_children

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere children get everything")


def mapped_in_a_child(tensor: Tensor) -> float:
    """The share of it that a child which is forked now has."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        here, text, size = 0, memoryview(bytearray(1 << 20)), 0
        with open("/proc/self/maps", "rb", buffering=0) as file:
            while count := file.readinto(text[size:]):  # page by page: memory that is taken meanwhile would move lines
                size += count
        for line in bytes(text[:size]).splitlines():
            first, last = (int(one, 16) for one in line.split()[0].split(b"-"))
            here += max(0, min(last, end) - max(first, begin))
        os.write(theirs, str(here / tensor.nbytes).encode())
        os._exit(0)
    found = float(os.read(ours, 100))
    os.waitpid(child, 0)
    os.close(ours)
    os.close(theirs)
    return found


def test_children_do_without_it_for_that_time_only() -> None:
    tensor = torch.ones(1 << 20)
    with kept_from_children([tensor, torch.empty(0), torch.ones(3), torch.ones(2, device="meta")]):
        assert mapped_in_a_child(tensor) < 0.01
    assert mapped_in_a_child(tensor) == 1.0
    assert bool((tensor == 1).all())


def test_what_has_no_plain_memory_is_passed_over() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(1 << 20)
    others = [torch.nn.parameter.UninitializedParameter(), torch.ones(3, 3).to_sparse_csr(), torch.ones(3).to_sparse()]
    with kept_from_children([*others, fake, torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.qint8)]):
        pass


def test_an_error_within_it_changes_nothing() -> None:
    tensor = torch.ones(1 << 20)
    with pytest.raises(OSError, match="no network"), kept_from_children([tensor]):
        raise OSError("no network")
    assert mapped_in_a_child(tensor) == 1.0


def test_what_processes_share_stays_shared() -> None:
    tensor = torch.ones(1 << 20).share_memory_()
    with kept_from_children([tensor]):
        assert mapped_in_a_child(tensor) == 1.0
