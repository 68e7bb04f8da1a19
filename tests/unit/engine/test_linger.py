"""Streams of a handler arrive whole, over the transport that loses the end of most of them without the linger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hivemind.p2p import P2P
from hivemind.proto import averaging_pb2

from lightning_hivemind.engine.stock.linger import Lingering

STREAMS, MESSAGES = 40, 3
QUIC = ["/ip4/127.0.0.1/udp/0/quic-v1"]


class Echo:
    async def rpc_echo(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield averaging_pb2.AveragingData(group_id=request.group_id)


async def messages_per_stream() -> list[int]:
    server = await P2P.create(host_maddrs=QUIC)
    client = await P2P.create(host_maddrs=QUIC, initial_peers=await server.get_visible_maddrs())
    try:
        handler = Lingering(Echo()).rpc_echo
        message = averaging_pb2.AveragingData
        await server.add_protobuf_handler("echo", handler, message, stream_input=True, stream_output=True)
        await client.wait_for_at_least_n_peers(1)

        async def requests() -> AsyncIterator[Any]:
            for _ in range(MESSAGES):
                yield message(group_id=b"x" * 500)

        received = []
        for _ in range(STREAMS):
            stream = await client.iterate_protobuf_handler(server.peer_id, "echo", requests(), message)
            received.append(sum([1 async for _ in stream]))
        return received
    finally:
        await client.shutdown()
        await server.shutdown()


def test_every_stream_arrives_whole() -> None:
    assert asyncio.run(asyncio.wait_for(messages_per_stream(), 60)) == [MESSAGES] * STREAMS
