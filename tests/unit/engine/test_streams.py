"""Streams of a handler arrive whole, over the transport that loses the end of most of them without our two halves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hivemind.p2p import P2P
from hivemind.proto import averaging_pb2

from lightning_hivemind.engine.stock import streams
from lightning_hivemind.engine.stock.streams import Counting, Lingering

STREAMS, MESSAGES = 20, 3
QUIC = ["/ip4/127.0.0.1/udp/0/quic-v1"]
MESSAGE = averaging_pb2.AveragingData


class Echo:
    async def rpc_aggregate_part(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield MESSAGE(group_id=request.group_id)


class Stub:
    """As hivemind's stubs: it ends when the server closes the stream."""

    def __init__(self, client: P2P, server: P2P) -> None:
        self._client, self._server = client, server

    async def rpc_aggregate_part(self, requests: AsyncIterator[Any]) -> Any:
        return await self._client.iterate_protobuf_handler(self._server.peer_id, "echo", requests, MESSAGE)


async def requests() -> AsyncIterator[Any]:
    for _ in range(MESSAGES):
        yield MESSAGE(group_id=b"x" * 500)


async def messages_per_stream(caller: type) -> list[int]:
    server = await P2P.create(host_maddrs=QUIC)
    client = await P2P.create(host_maddrs=QUIC, initial_peers=await server.get_visible_maddrs())
    try:
        handler = Lingering(Echo()).rpc_aggregate_part
        await server.add_protobuf_handler("echo", handler, MESSAGE, stream_input=True, stream_output=True)
        await client.wait_for_at_least_n_peers(1)
        stub = Stub(client, server)
        stub = stub if caller is Stub else caller(stub)
        counts = []
        for _ in range(STREAMS):
            counts.append(len([1 async for _ in await stub.rpc_aggregate_part(requests())]))
        return counts
    finally:
        await client.shutdown()
        await server.shutdown()


def test_a_stock_caller_gets_the_whole_stream() -> None:
    assert asyncio.run(asyncio.wait_for(messages_per_stream(Stub), 60)) == [MESSAGES] * STREAMS


def test_a_caller_that_counts_closes_first_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LINGER_S", 3600.0)
    assert asyncio.run(asyncio.wait_for(messages_per_stream(Counting), 60)) == [MESSAGES] * STREAMS
