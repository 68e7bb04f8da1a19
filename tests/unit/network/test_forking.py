"""What a forked child gets of a tensor, and what it does not."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest
import torch
from torch import Tensor

from lightning_hivemind.network.forking import kept_from_children

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere children get everything")


def mapped_in_a_child(tensor: Tensor) -> float:
    """The share of it that a child which is forked now has."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    text, size = memoryview(bytearray(1 << 20)), 0  # what the child maps itself may lie where it lacks the tensor
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if not child:
            maps = os.open("/proc/self/maps", os.O_RDONLY)
            while count := os.readv(maps, [text[size:]]):
                size += count
            os.write(told.fileno(), text[:size])
            os._exit(0)
        os.waitpid(child, 0)
        told.seek(0)
        lines = told.read().splitlines()
    found = 0.0
    for line in lines:
        first, last = (int(one, 16) for one in line.split()[0].split(b"-"))
        found += max(0, min(last, end) - max(first, begin)) / tensor.nbytes
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
