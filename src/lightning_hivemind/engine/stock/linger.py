"""Streams that stay open a moment after their last message, so that the caller can read it.

hivemind's daemon (1.1.12) copies each stream in two directions. When a handler ends, the daemon closes the stream for
reading first, which wakes the other direction with an error, upon which it *resets* the stream; a reset throws away
what the caller's daemon has not read yet. Over QUIC almost every stream loses its end so; over TCP the reset must come
in the few microseconds before the stream is closed for writing, too (a round of 92% was seen once in some thousands).
If the caller has read everything by then, a reset loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

LINGER_S = 0.02  # many times what the caller's daemon needs on a busy machine; callers wait for it once per stream


class Lingering:
    """A hivemind servicer whose streaming handlers linger: pass it as ``wrapper`` to ``add_p2p_handlers``."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., AsyncIterator[Any]]:
        handler = getattr(self._servicer, name)

        async def rpc(request: Any, context: Any) -> AsyncIterator[Any]:
            async for message in handler(request, context):
                yield message
            await asyncio.sleep(LINGER_S)

        return rpc
