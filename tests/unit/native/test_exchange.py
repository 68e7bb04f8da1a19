"""The tensors of a round while connections write into them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_hivemind.engine.native.codecs import ChunkCodec, Exact, ScaledFloat16, TopK, Uniform8Bit
from lightning_hivemind.engine.native.codecs.base import memory_of
from lightning_hivemind.engine.native.exchange import Exchange, UnusableInput
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.protocol.plan import MOST_VERSIONS, Plan, make_plan

SPAN = Layout.span
LAYOUT = Layout(2 * 512, chunk_elements=512)
SAMPLES = {"a": 3, "b": 5}


def plan_of(samples: dict[str, int], reducers: str = "ab", members: str = "abc") -> Plan:
    """Who has samples gives; two chunks are reduced."""
    return make_plan(
        b"r" * 16,
        Head.root("run", "a"),
        "a",
        members=list(members),
        contributions=[Contribution(peer=peer, number=1, samples=count) for peer, count in samples.items()],
        bandwidths=dict.fromkeys(reducers, 1.0),
        chunks=2,
        stop=False,
    )


def exchange_all(exchanges: dict[str, Exchange], plan: Plan) -> Commit:
    """What the driver and the connections do in a round without a fault."""
    for exchange in exchanges.values():
        exchange.begin(plan)
    for chunk, owner in enumerate(plan.owners):
        for peer in plan.contributors:
            if peer == owner:
                exchanges[owner].keep_own(chunk)
            else:
                exchanges[owner].keep(chunk, peer, exchanges[peer].input(chunk))
        exchanges[owner].reduce(chunk, plan.contributions)
        data, _ = exchanges[owner].reduced(chunk)
        for peer, exchange in exchanges.items():
            if peer != owner:
                exchange.take(chunk, plan.version, owner, data)
    return Commit(round=plan.round, parent=plan.parent, contributions=plan.contributions, digest=b"d")


def random(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(seed))


def test_what_nobody_has_to_send_is_not_encoded() -> None:
    """Also where another peer was to reduce the chunk, and what a codec leaves out had been kept for the next round."""
    exchange = Exchange(LAYOUT, [TopK(8)] * 2, "a", random(0))
    plan = plan_of({"a": 8}, reducers="a")
    exchange.begin(plan)
    exchange.input(0)
    for chunk in (0, 1):
        exchange.keep_own(chunk)
        exchange.reduce(chunk, plan.contributions)
    commit = Commit(round=plan.round, parent=plan.parent, contributions=plan.contributions, digest=b"d")
    rest = exchange.left_out(commit, complete=True)
    assert rest is not None
    torch.testing.assert_close(8 * exchange.result + rest, 8 * random(0))
    rounded = Exchange(LAYOUT, [Uniform8Bit()] * 2, "a", random(0))
    rounded.begin(plan)
    rounded.keep_own(0)
    rounded.reduce(0, plan.contributions)
    once = torch.empty(512)
    Uniform8Bit().decode(Uniform8Bit().encode(random(0)[:512]), once)
    assert torch.equal(rounded.result[:512], once)


@pytest.mark.parametrize("codecs", [[TopK(8), TopK(8)], [Exact(), TopK(4)]], ids=["both chunks", "one"])
def test_nothing_is_lost_of_what_top_k_leaves_out(codecs: list[ChunkCodec]) -> None:
    given = {peer: random(seed) for seed, peer in enumerate(SAMPLES)}
    exchanges = {peer: Exchange(LAYOUT, codecs, peer, values) for peer, values in given.items()}
    commit = exchange_all(exchanges, plan_of(SAMPLES))
    assert torch.equal(exchanges["a"].result, exchanges["b"].result)
    total = sum(count * given[peer] for peer, count in SAMPLES.items())
    rest = sum(exchange.left_out(commit, complete=True) for exchange in exchanges.values())
    torch.testing.assert_close(8 * exchanges["a"].result + rest, total, rtol=1e-5, atol=1e-5)
    assert int((exchanges["a"].result[512:] != 0).sum()) <= 2 * 8


def test_who_gives_nothing_keeps_what_it_has_left_out_of_the_averages() -> None:
    exchanges = {
        "a": Exchange(LAYOUT, [TopK(8)] * 2, "a", random(0)),
        "b": Exchange(LAYOUT, [TopK(8)] * 2, "b", random(1)),
        "c": Exchange(LAYOUT, [TopK(8)] * 2, "c", None),
    }
    plan = plan_of(SAMPLES, reducers="c")
    assert set(plan.owners) == {"c"}
    commit = exchange_all(exchanges, plan)
    rests = {peer: exchange.left_out(commit, complete=True) for peer, exchange in exchanges.items()}
    assert rests["c"] is not None
    assert bool(rests["c"].any())
    total = 3 * random(0) + 5 * random(1)
    torch.testing.assert_close(8 * exchanges["a"].result + sum(rests.values()), total, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]


def test_a_gradient_that_is_not_finite_and_was_refused_is_not_left_out_but_forgotten() -> None:
    values = random(0)
    values[3] = float("nan")
    exchanges = {peer: Exchange(LAYOUT, [TopK(8)] * 2, peer, random(1)) for peer in SAMPLES}
    exchanges["a"] = Exchange(LAYOUT, [TopK(8)] * 2, "a", values)
    exchanges["a"].input(0)
    commit = exchange_all(exchanges, plan_of({"b": 5}))
    rest = exchanges["a"].left_out(commit, complete=True)
    assert rest is not None
    assert bool(torch.isfinite(rest).all())


def test_codecs_that_send_everything_leave_out_nothing() -> None:
    exchanges = {peer: Exchange(LAYOUT, [Exact()] * 2, peer, random(0)) for peer in SAMPLES}
    commit = exchange_all(exchanges, plan_of(SAMPLES))
    assert exchanges["a"].left_out(commit, complete=True) is None


def test_a_result_that_arrives_while_a_newer_plan_begins_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(SAMPLES)
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


def test_memory_that_was_given_for_a_plan_is_not_that_of_the_next() -> None:
    """A connection that still reads a result of the plan before must not write where the next one's results are."""
    exchange = Exchange(LAYOUT, [Exact(), Exact()], "c", None)
    first = plan_of(SAMPLES)
    exchange.begin(first)
    owner = first.owners[0]
    room = exchange.room_for_result(0, 0, owner, 4 * 512)
    assert room is not None
    exchange.begin(replace(first, version=1, owners=tuple(reversed(first.owners)), since=(1, 1)))
    room[:] = b"x" * len(room)
    assert not torch.equal(exchange.result[LAYOUT.span(0)], torch.frombuffer(room, dtype=torch.float32))
    assert exchange.room_for_result(0, 0, owner, 4 * 512) is None


def test_a_result_that_comes_twice_is_not_written_over() -> None:
    plan = plan_of(SAMPLES, reducers="b")
    mine = Exchange(LAYOUT, [Exact()] * 2, "a", random(0))
    mine.begin(plan)
    room = mine.room_for_result(0, 0, "b", 4 * 512)
    assert room is not None
    room[:] = memory_of(torch.ones(512))
    mine.take(0, 0, "b", room)
    assert mine.room_for_result(0, 0, "b", 4 * 512) is None
    mine.begin(plan.without(frozenset(), frozenset("b")))  # of which it is another one
    assert mine.room_for_result(0, 1, "b", 4 * 512) is not None


def test_an_average_is_given_away_only_where_nobody_else_reads_or_writes_it() -> None:
    """What clips it must not reach what is still being sent; and what still comes must not reach it."""

    def arrived(breaks: bool) -> Exchange:
        mine = Exchange(LAYOUT, [Exact()] * 2, "a", random(0))
        mine.begin(plan_of(SAMPLES, reducers="b"))
        if breaks:  # a connection, when it has begun to write there
            assert mine.room_for_result(1, 0, "b", 4 * 512) is not None
        for chunk in (0, 1):
            room = mine.room_for_result(chunk, 0, "b", 4 * 512)
            assert room is not None
            room[:] = memory_of(torch.full((512,), 7.0))
            mine.take(chunk, 0, "b", room)
        assert mine.result.tolist() == [7.0] * 1024
        return mine

    assert (mine := arrived(breaks=False)).end(sending=False) is mine.result
    for breaks, sending in ((True, False), (False, True)):
        mine = arrived(breaks=breaks)
        average = mine.end(sending=sending)
        assert average.data_ptr() != mine.result.data_ptr()
        assert torch.equal(average, mine.result)


def test_what_comes_again_is_not_written_over_what_is_there() -> None:
    """It may be damaged on the way, and is dropped only when all of it is here."""
    mine = Exchange(LAYOUT, [Exact()] * 2, "a", random(0))
    early = mine.room_for_result(0, 0, "b", 4 * 512)
    assert early is not None
    early[:] = memory_of(torch.ones(512))
    mine.begin(plan_of(SAMPLES, reducers="b"))
    mine.take(0, 0, "b", early)
    mine._taken.clear()  # as if it had come before the plan to the last byte
    again = mine.room_for_result(0, 0, "b", 4 * 512)
    assert again is not None
    again[:] = b"x" * len(again)
    assert mine.result[LAYOUT.span(0)].tolist() == [1.0] * 512


def test_nobody_is_given_a_place_in_an_average_that_has_a_new_owner() -> None:
    mine = Exchange(LAYOUT, [Exact()] * 2, "a", random(0))
    mine.begin(plan_of(SAMPLES, reducers="b"))
    mine.end(sending=False)
    assert mine.room_for_result(0, 0, "b", 4 * 512) is None


def test_a_result_that_comes_before_the_plan_does_not_stand_in_the_way_of_the_right_one() -> None:
    mine = Exchange(LAYOUT, [Exact()] * 2, "a", random(0))
    early = mine.room_for_result(0, 0, "c", 4 * 512)
    assert early is not None
    mine.take(0, 0, "c", early)
    mine.begin(plan_of(SAMPLES, reducers="b"))
    assert mine.room_for_result(0, 0, "b", 4 * 512) is not None


def test_inputs_that_come_before_the_plan_take_no_more_memory_than_one_gradient() -> None:
    exchange = Exchange(LAYOUT, [Exact(), Exact()], "a", random(0))
    rooms = [exchange.room_for_input(chunk, peer, 4 * 512) for peer in "bcdef" for chunk in (0, 1)]
    assert [room is not None for room in rooms] == [True] * 2 + [False] * 8
    exchange.begin(plan_of(SAMPLES))
    chunk = exchange._plan.owners.index("a")  # type: ignore[union-attr]
    assert exchange.room_for_input(chunk, "b", 4 * 512) is not None
    assert exchange.room_for_input(chunk, "c", 4 * 512) is None, "it gives nothing in this plan"
    rooms = [exchange.room_for_input(1 - chunk, "b", 4 * 512) for _ in range(5)]  # by a newer plan, perhaps
    assert [room is not None for room in rooms] == [True] * 2 + [False] * 3


@pytest.mark.parametrize("codec", [Exact(), ScaledFloat16()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_who_gives_a_value_that_is_not_finite_is_named(codec: ChunkCodec, value: float) -> None:
    plan = plan_of(SAMPLES, reducers="a")
    gives = {"a": random(0), "b": random(1)}
    gives["b"][3] = value
    exchanges = {peer: Exchange(LAYOUT, [codec] * 2, peer, values) for peer, values in gives.items()}
    with pytest.raises(UnusableInput, match="values that are not finite") as raised:
        exchange_all(exchanges, plan)
    assert raised.value.peer == "b"


def test_a_sum_that_no_float_can_hold_is_refused() -> None:
    plan = plan_of({"a": 1, "b": 1}, reducers="a")
    exchanges = {peer: Exchange(LAYOUT, [Exact()] * 2, peer, torch.full((1024,), 3.4e38)) for peer in "ab"}
    exchanges["a"].begin(plan)
    for peer in "ab":
        exchanges["a"].keep(0, peer, exchanges[peer].input(0))
    contributions = [replace(one, samples=one.samples * 10**6) for one in plan.contributions]
    exchanges["a"].reduce(0, contributions)  # a mean of finite values is finite, up to rounding
    assert bool(torch.isfinite(exchanges["a"].result[SPAN(LAYOUT, 0)]).all())


def test_an_input_for_which_a_newer_plan_makes_this_peer_the_owner_may_come_before_that_plan() -> None:
    """Its sender has heard of the plan first."""
    plan = plan_of({**SAMPLES, "c": 1}, reducers="c")
    newer = plan.without(frozenset({"c"}))
    assert set(newer.owners) == {"a"}
    mine, theirs = (Exchange(LAYOUT, [Exact()] * 2, peer, random(seed)) for seed, peer in enumerate("ab"))
    for exchange in (mine, theirs):
        exchange.begin(plan)
    data = theirs.input(0)
    room = mine.room_for_input(0, "b", len(data))
    assert room is not None
    room[:] = data
    mine.keep(0, "b", room)
    mine.begin(newer)
    mine.keep_own(0)
    mine.reduce(0, newer.contributions)
    expected = (3 * random(0) + 5 * random(1))[:512] / 8
    torch.testing.assert_close(mine.result[:512], expected)
    assert mine.room_for_input(1, "c", len(data)) is None, "nothing of who is not in it any more"


def test_a_result_of_a_newer_plan_may_come_before_that_plan() -> None:
    plan = plan_of({**SAMPLES, "c": 1}, reducers="c")
    newer = plan.without(frozenset({"c"}))
    exchange = Exchange(LAYOUT, [Exact()] * 2, "b", random(1))
    exchange.begin(plan)
    exchange.result.fill_(-1.0)
    for chunk, owner in enumerate("ac"):
        room = exchange.room_for_result(chunk, 1, owner, 2048)
        assert room is not None
        room[:] = memory_of(random(2)[:512])
        exchange.take(chunk, 1, owner, room)
    assert bool((exchange.result == -1.0).all()), "it may not be one"
    exchange.begin(newer)
    assert torch.equal(exchange.result[:512], random(2)[:512])
    assert not torch.equal(exchange.result[512:], random(2)[:512]), "its owner is another one"
    assert exchange.room_for_result(0, 1, "a", 2048) is None, "it is here"


def test_what_comes_before_its_plan_takes_no_more_memory_than_one_gradient_for_each_plan() -> None:
    plan = plan_of({**SAMPLES, "c": 1}, reducers="c")
    exchange = Exchange(LAYOUT, [Exact()] * 2, "a", None)
    for version in range(3):
        rooms = [exchange.room_for_result(chunk, 7, peer, 2048) for peer in "bcd" for chunk in (0, 1)]
        assert [room is not None for room in rooms] == [True] * 2 + [False] * 4
        exchange.begin(replace(plan, version=version))
    assert exchange.room_for_result(0, MOST_VERSIONS + 1, "c", 2048) is None, "there can be no such version"


def test_a_result_of_a_newer_plan_may_come_before_the_first_one() -> None:
    """Whatever the protocol counts then has to be here."""
    plan = plan_of({**SAMPLES, "c": 1}, reducers="c")
    exchange = Exchange(LAYOUT, [Exact()] * 2, "b", random(1))
    room = exchange.room_for_result(0, 1, "a", 2048)
    assert room is not None
    room[:] = memory_of(random(2)[:512])
    exchange.take(0, 1, "a", room)
    exchange.begin(plan)
    exchange.begin(plan.without(frozenset({"c"})))
    assert torch.equal(exchange.result[:512], random(2)[:512])
