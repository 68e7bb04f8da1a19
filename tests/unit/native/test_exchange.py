"""The tensors of a round while connections write into them."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.engine.native.codecs import Exact
from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.exchange import Exchange
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol.lineage import Contribution, Head
from lightning_hivemind.engine.native.protocol.plan import make_plan

SPAN = Layout.span


def test_a_result_that_arrives_while_a_newer_plan_begins_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(
        b"r" * 16,
        Head.root("run", "a"),
        "a",
        members=["a", "b", "c"],
        contributions=[Contribution(peer=peer, number=1, samples=1) for peer in "ab"],
        bandwidths={"a": 1.0, "b": 1.0},
        chunks=2,
        stop=False,
    )
    newer = plan.without(frozenset({"c"}))
    assert newer.since == plan.since, "c has given nothing"
    exchange = Exchange(Layout(8, chunk_elements=4), [Exact(), Exact()], "a", None)
    exchange.begin(plan)
    exchange.result.fill_(-1.0)
    rooms = []

    def arrives(layout: Layout, chunk: int) -> slice:
        if chunk == 1 and not rooms:  # in the middle of it, from a connection's thread
            monkeypatch.undo()
            rooms.append(exchange.room_for_result(1, 0, "b", 16))
            rooms[0][:] = memory_of(torch.full((4,), 7.0))
        return SPAN(layout, chunk)

    monkeypatch.setattr(Layout, "span", arrives)
    exchange.begin(newer)
    exchange.take(1, 0, "b", rooms[0])
    assert exchange.result[4:].tolist() == [7.0] * 4
