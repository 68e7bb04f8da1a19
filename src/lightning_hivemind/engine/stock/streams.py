"""Streams that arrive whole: the answering side keeps them open until the calling side has read them.

hivemind's daemon (1.1.12) copies each stream in two directions. When a handler ends, the daemon closes the stream for
reading first, which wakes the other direction with an error, upon which it *resets* the stream; a reset throws away
what the caller's daemon has not read yet. Over QUIC most streams lose their end so; over TCP the reset must come in the
few microseconds before the stream is closed for writing, too (a round of 92% was seen once in some thousands).

Hence :class:`Lingering` on the answering side. The calling side of an all-reduce, :class:`Counting`, knows when it has
everything (one answer for each part) and closes first, so that nobody waits; stock peers wait for ``LINGER_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

LINGER_S = 0.25  # many times what a daemon on a busy machine needs to read


class Lingering:
    """A hivemind servicer whose streaming handlers linger: pass it as ``wrapper`` to ``add_p2p_handlers``."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., AsyncIterator[Any]]:
        handler = getattr(self._servicer, name)

        async def rpc(request: Any, context: Any) -> AsyncIterator[Any]:
            async for message in handler(request, context):
                yield message
            await asyncio.sleep(LINGER_S)  # hivemind cancels it when the caller closes

        return rpc


class Counting:
    """A stub of hivemind's averagers whose ``rpc_aggregate_part`` ends with the answer to the last part."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def rpc_aggregate_part(self, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
        sent = 0
        all_sent = asyncio.Event()

        async def counted() -> AsyncIterator[Any]:
            nonlocal sent
            async for part in parts:
                sent += 1
                yield part
            all_sent.set()

        async def answers(stream: Any) -> AsyncIterator[Any]:
            received = 0
            try:
                async for answer in stream:
                    received += 1
                    yield answer
                    if all_sent.is_set() and received == sent:
                        break
            finally:
                await stream.aclose()

        return answers(await self._stub.rpc_aggregate_part(counted()))
