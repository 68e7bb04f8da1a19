"""What goes from a device into host memory; on a GPU, where there is one, beside what it computes."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.transfer import Transfer, finish

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: cycles of a GPU: a tenth of a second or so
LONG = 200_000_000


def test_in_host_memory_it_is_a_copy() -> None:
    source, target = torch.randn(100).half(), torch.empty(100)
    transfer = Transfer(torch.device("cpu"))
    transfer.written()
    transfer.fetch([(source, target)])
    finish(target.device)
    assert torch.equal(source.float(), target)


@on_gpu
def test_what_a_gpu_has_written_is_fetched_while_it_computes_on() -> None:
    device = torch.device("cuda")
    transfer, memory = Transfer(device), Memory(pinned=True)
    values, target = torch.zeros(1 << 20, device=device), memory.floats(1 << 20)
    torch.cuda._sleep(LONG)
    values.fill_(3.0)
    transfer.written()
    torch.cuda._sleep(10 * LONG)
    transfer.fetch([(values, target)])
    assert not torch.cuda.current_stream().query(), "it has waited for all that the GPU was told"
    values.fill_(4.0)
    finish(device)
    assert target.is_pinned()
    assert set(target.tolist()) == {3.0}
