"""Keeps hivemind's asyncio tasks alive until they are done.

hivemind's processes start a task for every request and keep no reference to it; asyncio keeps only a weak one. The
garbage collector may therefore destroy a request half-way ("Task was destroyed but it is pending"): the DHT never
answers, a download of the state "finds nothing". Seen here in about one start of ten on a busy machine.
Can go when hivemind's ``DHT.run`` and ``DecentralizedAverager._run_internal`` hold on to their tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import hivemind.averaging.averager
import hivemind.dht.dht

_USERS_OF_LOOPS = (hivemind.dht.dht, hivemind.averaging.averager)


def keep_tasks_alive() -> None:
    """Call in a forked child, before hivemind makes its event loop there."""
    for module in _USERS_OF_LOOPS:
        module.switch_to_uvloop = _with_kept_tasks(module.switch_to_uvloop)


def _with_kept_tasks(switch: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[], asyncio.AbstractEventLoop]:
    def make_loop() -> asyncio.AbstractEventLoop:
        loop = switch()
        kept: set[asyncio.Task[Any]] = set()

        def start(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
            task = asyncio.Task(coroutine, loop=loop, **options)
            kept.add(task)
            task.add_done_callback(kept.discard)
            return task

        loop.set_task_factory(cast(Any, start))  # its type differs between Python versions
        return loop

    return make_loop
