"""The thread that asks others how they can be reached, without a network."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from lightning_hivemind.engine.native.introductions import Introductions
from swarm.town import wait_for

PEER = "12D3KooWQENdsTxDmQDT7qHJAAw25G1VNoinqtZhh83UjogMipNc"


def introductions() -> Introductions:
    links: Any = SimpleNamespace()
    found = Introductions(None, "run", links, fingerprint=b"", port=None, timeout_s=60.0)  # type: ignore[arg-type]
    found._thread.start()
    return found


def test_who_asks_while_this_peer_leaves_hears_so_and_no_question_is_left_over() -> None:
    asks = introductions()
    asked = threading.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.sleep(3600)

    mine = PeerID.from_base58(PEER)
    asks._p2p = SimpleNamespace(call_protobuf_handler=never, peer_id=mine)  # type: ignore[assignment]
    heard: list[str] = []

    def ask() -> None:
        try:
            asks.introduce(PEER)
        except ConnectionError as error:
            heard.append(str(error))

    threading.Thread(target=ask).start()
    wait_for(asked.is_set, "the question")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a coroutine that was never awaited
        asks.close()
        wait_for(lambda: heard, "the answer")
        with pytest.raises(ConnectionError, match="leaving"):
            asks.introduce(PEER)
        asks.close()
        gc.collect()
    assert heard == ["this peer is leaving the swarm"]
