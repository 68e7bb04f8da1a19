"""What a model would run on: devices, their memory, and how fast they multiply."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

#: of a matrix, and seconds in which it is multiplied
_SIZE_CPU, _SIZE_GPU, _SECONDS = 1024, 8192, 0.3
#: of what it does in multiplications of large matrices, which a model reaches in training
USUAL_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``memory``: bytes of one of its ``devices``, of which there are so many, alike; on a CPU that of the host.

    ``flops``: of one device, per second, in large matrices of its usual dtype.
    """

    kind: str
    devices: int
    memory: int
    host_memory: int
    flops: float

    @property
    def is_cpu(self) -> bool:
        return self.kind == "CPU"


def look() -> Machine:
    """This one, measured for a moment."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        return Machine(kind="CPU", devices=1, memory=host, host_memory=host, flops=_speed(torch.device("cpu")))
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    smallest = min(found, key=lambda one: one.total_memory)
    return Machine(
        kind=smallest.name,
        devices=len(found),
        memory=smallest.total_memory,
        host_memory=host,
        flops=_speed(torch.device("cuda")),
    )


def _speed(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    size, dtype = (_SIZE_GPU, torch.bfloat16) if on_gpu else (_SIZE_CPU, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    (matrix @ matrix).sum().item()  # what is prepared once
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        (matrix @ matrix)[0, 0].item()  # which waits for it
        done += 1
    return 2.0 * size**3 * done / (time.perf_counter() - began)
