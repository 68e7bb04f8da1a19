"""The thread that asks others how they can be reached, without a network."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.p2p import PeerID

from lightning_hivemind.engine.native.introductions import REACH, Introductions, read_introduction
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


@pytest.mark.parametrize("ipv6", [False, True])
def test_hosts_at_which_it_does_not_listen_are_not_named(ipv6: bool) -> None:
    async def addresses(latest: bool) -> list[str]:
        return ["/ip4/192.0.2.2/tcp/1", "/ip6/fd00::2/tcp/1", "/ip4/127.0.0.1/tcp/1"]

    links: Any = SimpleNamespace(expect=lambda peer: b"token")
    asks = Introductions(None, "run", links, fingerprint=b"f", port=7, timeout_s=1.0, ipv6=ipv6)  # type: ignore[arg-type]
    mine = PeerID.from_base58(PEER)
    asks._p2p = SimpleNamespace(peer_id=mine, get_visible_maddrs=addresses)  # type: ignore[assignment]
    question = BytesValue(value=asks._proof(PEER, PEER) + REACH)
    answer = asyncio.run(asks._answer(question, SimpleNamespace(remote_id=mine)))
    found = read_introduction(answer.value, asks._proof(PEER, PEER, "answers"))
    assert found.endpoints == tuple((host, 7) for host in ("192.0.2.2", *["fd00::2"] * ipv6, "127.0.0.1"))
