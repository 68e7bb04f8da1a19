"""The task that reads from the libp2p daemon outlives an answer that nobody waits for any more."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import pytest

pytest.importorskip("hivemind")

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.proto import p2pd_pb2

from lightning_hivemind.network.answers import survive_late_answers


def answer(call: UUID, data: bytes) -> bytes:
    """What the daemon writes: the message's length as a varint (here one byte), then the message."""
    body = p2pd_pb2.PersistentConnectionResponse(
        callId=call.bytes, callUnaryResponse=p2pd_pb2.CallUnaryResponse(response=data)
    ).SerializeToString()
    assert len(body) < 128
    return bytes([len(body)]) + body


def test_an_answer_to_a_call_that_was_given_up_does_not_keep_others_from_theirs() -> None:
    survive_late_answers()
    survive_late_answers()  # once more changes nothing

    async def scene() -> bytes:
        client = ControlClient(DaemonConnector(), _initialized_with_create=True)
        given_up, waiting = uuid4(), uuid4()
        client._pending_calls = {given_up: asyncio.Future(), waiting: asyncio.Future()}
        client._pending_calls[given_up].cancel()  # hivemind takes it off the list only when its caller runs again
        pipe = asyncio.StreamReader()
        pipe.feed_data(answer(given_up, b"late") + answer(waiting, b"in time"))
        pipe.feed_eof()
        await client._read_from_persistent_conn(pipe)
        return await asyncio.wait_for(client._pending_calls[waiting], 1.0)

    assert asyncio.run(scene()) == b"in time"
