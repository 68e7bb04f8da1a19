"""What the coordinator of a round sends and receives, counted in real rounds: the simulator foretells it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


def note_rounds(path: Path) -> None:
    """Let this process's native engine write a line whenever a step is decided.

    It says whether this peer coordinated its round, and how many messages it has sent and received so far, and their
    bytes (with the headers of their frames).
    """
    from lightning_hivemind.engine.native.driver import Driver
    from lightning_hivemind.engine.native.protocol.actions import Apply, Begun, Send
    from lightning_hivemind.engine.native.wire.encoding import encode
    from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, Kind

    do, arrived = Driver._do, Driver.arrived
    lock, counted = threading.Lock(), {"messages": 0, "bytes": 0}  # each connection is read by a thread of its own
    led = False

    def count(size_bytes: int) -> None:
        with lock:
            counted["messages"] += 1
            counted["bytes"] += HEADER_BYTES + size_bytes

    def doing(self: Any, action: Any) -> None:
        nonlocal led
        if isinstance(action, Send):
            count(len(encode(action.message)))
        elif isinstance(action, Begun):
            led = action.plan.coordinator == self._peer.me
        elif isinstance(action, Apply):
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), "led": led, **counted}) + "\n")
        do(self, action)

    def arriving(self: Any, peer: Any, header: Any, payload: Any) -> None:
        if header.kind is Kind.MESSAGE and payload is not None:
            count(header.length)
        arrived(self, peer, header, payload)

    Driver._do, Driver.arrived = doing, arriving  # type: ignore[method-assign]


def led_rounds(notes: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Messages and their bytes of this peer from one step to the next, for those that it coordinated."""
    return [
        (after["messages"] - before["messages"], after["bytes"] - before["bytes"])
        for before, after in pairwise(notes)
        if after["led"]
    ]
