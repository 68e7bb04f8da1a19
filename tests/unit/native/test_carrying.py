"""A gradient that goes from a peer with a slow line to a quick one: both ends, message by message."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.engine.native.carrying import carrier as carrier_module
from lightning_hivemind.engine.native.carrying.carrier import IDLE_S, MOST_PARCELS, Carrier
from lightning_hivemind.engine.native.carrying.line import ROUNDS, Line
from lightning_hivemind.engine.native.carrying.papers import (
    MOST_TEXT,
    TOKEN_BYTES,
    Offered,
    Receipt,
    longest_receipt,
    read_offer,
    read_receipt,
    write_offer,
    write_receipt,
)
from lightning_hivemind.engine.native.carrying.sender import ANSWER_S, ASK_AGAIN_S, REFUSED_S, TRY_S, Sender
from lightning_hivemind.engine.native.codecs.base import ChunkCodec, Exact
from lightning_hivemind.engine.native.codecs.floating import BFloat16
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.protocol.plan import Plan, make_plan
from lightning_hivemind.engine.native.seam import Outcome, Parcel
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.errors import WireError

LAYOUT = Layout(10, chunk_elements=4)
HEAD = [1, bytes(16), 1]
HEADS = (
    Head(epoch=4, lineage=b"now" + bytes(13), samples=32),
    Head(epoch=3, lineage=b"before" + bytes(10), samples=24),
)
VALUES = torch.arange(10.0)


@dataclass
class Post:
    """Connections whose frames lie there until somebody reads them."""

    upload_rate: float = 10.0
    frames: list[tuple[str, Header, bytes]] = field(default_factory=list)
    #: parcels of which something waits to be sent
    waiting: set[bytes] = field(default_factory=set)

    def send(self, to: str, header: Header, payload: Sequence[object] = ()) -> None:
        self.frames.append((to, header, b"".join(bytes(part) for part in payload)))  # type: ignore[call-overload]

    def sends(self, number: bytes, kind: Kind | None = None, to: str | None = None) -> bool:
        return number in self.waiting

    def forget(self, number: bytes) -> bool:
        self.waiting.discard(number)
        return False

    def take(self) -> list[tuple[str, Header, bytes]]:
        frames, self.frames = self.frames, []
        return frames


@dataclass
class Trainee:
    """What the training side of either end says and hears."""

    parcel: Parcel | None = None
    hands_over: bool = False
    carries: bool = True
    can_hand_over: bool = True
    oldest: int = 0
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    #: what was asked of :meth:`hand_over`, and said of the line while it was not free
    asked: list[float] = field(default_factory=list)
    free_in: list[tuple[float, float]] = field(default_factory=list)
    carried: list[Parcel] = field(default_factory=list)

    def hand_over(self, takes_s: float) -> Parcel | None:
        self.asked.append(takes_s)
        parcel, self.parcel = self.parcel, None
        return parcel

    def hands_over_in(self, after_s: float, takes_s: float) -> None:
        self.free_in.append((after_s, takes_s))

    def handed_over(self, to: str, parcel: Parcel, outcome: Outcome, duration_s: float) -> None:
        self.outcomes.append((to, outcome))

    def carry(self, of: str, parcel: Parcel) -> bool:
        self.carried.append(parcel)
        return not self.too_old(parcel.until)

    def too_old(self, until: int) -> bool:
        return until < self.oldest


class Pair:
    """``s`` hands over to ``c``."""

    def __init__(self, codec: ChunkCodec | None = None) -> None:
        self.codecs = [codec or Exact()] * LAYOUT.chunks
        self.here, self.there = Trainee(), Trainee()
        self.out, self.back = Post(), Post()
        self.heads = HEADS
        #: where ``c`` is or was
        self.known = {HEADS[1]}
        self.sender = Sender(
            self.out,  # type: ignore[arg-type]
            self.here,  # type: ignore[arg-type]
            "s",
            lambda: self.heads,
            LAYOUT,
            self.codecs,
            Memory(),
        )
        self.carrier = self.new_carrier()
        self.now = 0.0

    def new_carrier(self) -> Carrier:
        return Carrier(
            self.back,  # type: ignore[arg-type]
            self.there,  # type: ignore[arg-type]
            lambda heads: not self.known.isdisjoint(heads),
            LAYOUT,
            self.codecs,
            Memory(),
        )

    def begin(self, values: torch.Tensor = VALUES, epoch: int = 3) -> None:
        self.here.parcel = Parcel(values, 8, epoch, epoch)
        self.look()

    def look(self, carriers: Sequence[str] = ("c",)) -> None:
        self.sender.look(carriers, self.now)

    def arrive(self, lost: Sequence[int] = ()) -> None:
        """What ``s`` has sent gets there, but for chunks that are ``lost``."""
        for _, header, data in self.out.take():
            if header.kind is Kind.OFFERED:
                self.carrier.offered("s", header.round, read_offer(data), self.now)
            elif header.chunk not in lost:
                room = self.carrier.room("s", header)
                if room is not None:
                    room[:] = data
                    self.carrier.take("s", header, room, self.now)

    def hand_over(self, lost: Sequence[int] = ()) -> None:
        """It is offered, asked for, and sent, but for chunks that are ``lost``."""
        self.begin()
        self.arrive()
        self.answer()
        self.arrive(lost)

    def answer(self) -> list[Receipt]:
        """What ``c`` has answered gets back."""
        found = []
        for _, header, data in self.back.take():
            found.append(read_receipt(data, LAYOUT))
            self.sender.answered("c", header.round, found[-1], self.now)
        return found


@pytest.mark.parametrize("codec", [Exact(), BFloat16()], ids=["exact", "bfloat16"])
def test_a_gradient_is_asked_for_sent_and_taken_once(codec: ChunkCodec) -> None:
    pair = Pair(codec)
    pair.begin()
    pair.arrive()
    assert pair.answer()[0].missing == (0, 1, 2)
    pair.arrive()
    (receipt,) = pair.answer()
    assert (receipt.missing, receipt.refused) == ((), "")
    assert pair.here.outcomes == [("c", Outcome.TAKEN)]
    (parcel,) = pair.there.carried
    assert (parcel.samples, parcel.epoch) == (8, 3)
    assert torch.equal(parcel.values, VALUES)


def test_chunks_that_are_lost_are_asked_for_once_nothing_waits_to_be_sent() -> None:
    pair = Pair()
    pair.begin()
    pair.arrive()
    number = pair.back.frames[0][1].round
    pair.answer()
    pair.arrive(lost=[1])
    pair.now += ASK_AGAIN_S + 0.1
    pair.out.waiting.add(number)
    pair.look()
    assert not pair.out.frames, "it is still being sent"
    pair.out.waiting.clear()
    pair.look()
    pair.arrive()
    assert pair.answer()[0].missing == (1,)
    pair.arrive()
    pair.answer()
    assert pair.here.outcomes == [("c", Outcome.TAKEN)]
    assert torch.equal(pair.there.carried[0].values, VALUES)


def test_a_receipt_that_is_lost_is_said_again_and_nothing_is_taken_twice() -> None:
    pair = Pair()
    pair.hand_over()
    pair.back.take()
    pair.now += ASK_AGAIN_S + 0.1
    pair.look()
    pair.arrive()
    pair.answer()
    assert pair.here.outcomes == [("c", Outcome.TAKEN)]
    assert len(pair.there.carried) == 1


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("fault", ["lost", "silent", "started again"])
def test_what_may_be_at_a_peer_that_is_lost_is_lost_and_what_cannot_be_there_comes_back(fault: str, sent: bool) -> None:
    pair = Pair()
    pair.begin()
    pair.arrive()
    if sent or fault == "started again":
        pair.answer()
        pair.arrive()
    pair.back.take()
    if fault == "lost":
        pair.sender.lost("another", pair.now)
        assert not pair.here.outcomes
        pair.sender.lost("c", pair.now)
        assert bool(pair.here.outcomes) is not sent, "what may be there is asked for, for a while"
        pair.now += ANSWER_S + 0.1
        pair.look(carriers=())
    elif fault == "silent":
        pair.now += ANSWER_S + 0.1
        pair.look()
        assert pair.sender.carriers(["c", "d"], pair.now) == ["d"], "it is not asked again so soon"
        assert set(pair.sender.carriers(["c", "d"], pair.now + REFUSED_S)) == {"c", "d"}
    else:
        pair.carrier, sent = pair.new_carrier(), True  # it does not know what became of what it had
        pair.now += ASK_AGAIN_S + 0.1
        pair.look()
        pair.arrive()
        pair.answer()
    assert pair.here.outcomes == [("c", Outcome.LOST if sent else Outcome.BACK)]
    pair.begin()
    assert [header.kind for _, header, _ in pair.out.frames][-1] is Kind.OFFERED, "the next one"


def test_a_line_that_is_back_soon_loses_nothing() -> None:
    pair = Pair()
    pair.hand_over(lost=[2])
    pair.sender.lost("c", pair.now)
    pair.now += 3.0
    pair.look(carriers=())
    for _ in range(2):
        pair.arrive()
        pair.answer()
    assert pair.here.outcomes == [("c", Outcome.TAKEN)]
    assert torch.equal(pair.there.carried[0].values, VALUES)


@pytest.mark.parametrize(
    ("why", "outcome"),
    [
        ("too old", Outcome.TOO_OLD),
        ("does not train", Outcome.BACK),
        ("of another lineage", Outcome.BACK),
        ("not finite", Outcome.TOO_OLD),
    ],
)
def test_who_cannot_carry_it_says_so(why: str, outcome: Outcome) -> None:
    pair = Pair()
    if why == "of another lineage":
        pair.known = {Head(epoch=3, lineage=b"other" + bytes(11), samples=24)}
    pair.there.oldest, pair.there.carries = 4 if why == "too old" else 0, why != "does not train"
    pair.begin(VALUES.clone().fill_(float("nan")) if why == "not finite" else VALUES)
    for _ in range(2):
        pair.arrive()
        pair.answer()
    assert pair.here.outcomes == [("c", outcome)]
    assert not pair.there.carried
    assert pair.sender.carriers(["c"], pair.now) == ([] if outcome is Outcome.BACK else ["c"])


@pytest.mark.parametrize("why", ["another lineage", "its last step"])
def test_who_leaves_the_lineage_while_it_comes_does_not_take_it(why: str) -> None:
    """What it would give to a step was computed with parameters that nobody there ever had."""
    pair = Pair()
    pair.begin()
    pair.arrive()
    pair.answer()
    if why == "another lineage":
        pair.known = {Head(epoch=3, lineage=b"other" + bytes(11), samples=24)}
    else:
        pair.there.carries = False
    pair.arrive()
    pair.answer()
    assert pair.here.outcomes == [("c", Outcome.BACK)]
    assert not pair.there.carried


def test_what_may_have_been_taken_before_it_became_too_old_is_lost_and_not_said_to_be_too_old() -> None:
    pair = Pair()
    pair.hand_over()
    pair.back.take()
    pair.here.oldest = 4
    pair.look()
    assert pair.here.outcomes == [("c", Outcome.LOST)]
    assert pair.there.carried


def test_who_was_frozen_reads_what_was_answered_meanwhile_before_it_gives_up() -> None:
    pair = Pair()
    pair.hand_over()
    pair.now += 2 * ANSWER_S
    pair.sender.suspended(pair.now)
    pair.look()
    pair.answer()
    assert pair.here.outcomes == [("c", Outcome.TAKEN)]


def test_of_who_is_gone_no_memory_is_kept() -> None:
    pair = Pair()
    pair.begin()
    number = pair.out.frames[0][1].round
    pair.arrive()
    pair.answer()
    pair.arrive(lost=[2])
    header = Header(kind=Kind.PARCEL, round=number, chunk=2, length=8)
    pair.carrier.suspended(IDLE_S)
    pair.carrier.tidy(2 * IDLE_S)
    assert pair.carrier.room("s", header) is not None
    pair.carrier.tidy(2 * IDLE_S + 0.1)
    assert pair.carrier.room("s", header) is None


def test_what_became_too_old_on_its_way_is_not_sent_to_its_end() -> None:
    pair = Pair()
    pair.begin()
    pair.arrive()
    pair.answer()
    pair.here.oldest = 4
    pair.out.waiting.add(pair.out.frames[0][1].round)
    pair.look()
    assert pair.here.outcomes == [("c", Outcome.TOO_OLD)]
    assert not pair.out.waiting


def test_while_something_is_sent_it_is_known_when_the_line_will_be_free() -> None:
    pair = Pair()
    pair.begin()
    takes_s = pair.sender.takes_s
    assert takes_s == 4.0, "40 bytes, at 10 a second"
    pair.now += 1.0
    pair.look()
    pair.now += 9.0
    pair.look()
    assert pair.here.free_in == [(3.0, takes_s), (0.0, takes_s)]


def test_a_line_that_was_too_slow_for_anything_is_tried_again_after_a_while() -> None:
    """It may have been slow for a while only, and is measured while much is sent."""
    pair = Pair()
    for now in (0.0, 1.0, TRY_S - 1.0):
        pair.now = now
        pair.look()
    assert pair.here.asked == [pair.sender.takes_s] * 3
    pair.now = TRY_S
    pair.begin()
    assert pair.here.asked[-1] == 0.0, "whatever it takes"
    pair.arrive()
    pair.answer()
    pair.arrive()
    pair.answer()
    assert pair.here.outcomes == [("c", Outcome.TAKEN)]
    pair.look()
    assert pair.here.asked[-1] == pair.sender.takes_s, "and then it is measured"


def test_without_anybody_to_carry_it_nothing_is_handed_over() -> None:
    pair = Pair()
    pair.here.parcel = Parcel(VALUES, 8, 3, 3)
    pair.look(carriers=())
    assert pair.here.parcel is not None
    assert not pair.out.frames


def test_each_slow_peer_has_its_own_order_of_carriers() -> None:
    peers = [f"peer{number}" for number in range(20)]
    firsts = set()
    for name in "abcdefgh":
        sender = Sender(Post(), Trainee(), name, lambda: HEADS, LAYOUT, [Exact()] * 3, Memory())  # type: ignore[arg-type]
        assert sender.carriers(peers, 0.0) == sender.carriers(reversed(peers), 0.0)
        firsts.add(sender.carriers(peers, 0.0)[0])
    assert len(firsts) > 3


def test_no_more_than_a_few_are_taken_at_a_time_and_those_that_stand_still_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carrier_module, "PARCELS_BYTES", 40 * MOST_PARCELS)
    pair = Pair()
    for number in range(MOST_PARCELS):
        pair.carrier.offered(f"s{number}", bytes([number]) * 16, Offered(8, 3, 4, HEADS), now=float(number))
    pair.back.take()

    def refused(peer: str, now: float) -> str:
        pair.carrier.offered(peer, peer.encode() * 8, Offered(8, 3, 4, HEADS), now)
        return read_receipt(pair.back.take()[-1][2], LAYOUT).refused

    assert refused("ss", 5.0)
    assert not refused("s0", 5.0), "its next one takes the place of its last"
    pair.carrier.moved("s0", 9.0)
    pair.carrier.moved("s1", 9.0)
    pair.carrier.moved("s3", 9.0)
    assert refused("tt", 2.0 + IDLE_S)
    assert not refused("tt", 2.5 + IDLE_S), "of s2 nothing came since then"


def test_chunks_that_there_cannot_be_are_refused_and_those_that_nobody_wants_pass_by() -> None:
    pair = Pair()
    pair.begin()
    pair.arrive()
    pair.answer()
    header = pair.out.frames[0][1]
    for wrong in (
        Header(kind=Kind.PARCEL, round=header.round, chunk=3, length=16),
        Header(kind=Kind.PARCEL, round=header.round, chunk=0, length=17),
    ):
        with pytest.raises(WireError):
            pair.carrier.room("s", wrong)
    assert pair.carrier.room("another", header) is None
    assert pair.carrier.room("s", Header(kind=Kind.PARCEL, round=b"x" * 16, chunk=0, length=16)) is None
    assert pair.carrier.room("s", header) is not None
    pair.carrier.take("another", header, memoryview(bytes(16)), 0.0)
    pair.arrive()
    assert pair.carrier.room("s", header) is None, "it is whole"


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 62), st.lists(st.integers(0, 2), max_size=3), st.text(max_size=200))
def test_papers_are_read_as_they_were_written(samples: int, epoch: int, missing: list[int], text: str) -> None:
    offer = Offered(samples, epoch, min(epoch + len(text), 1 << 62), HEADS[: len(missing) % 3])
    assert read_offer(write_offer(offer)) == offer
    receipt = Receipt(bytes(TOKEN_BYTES), tuple(missing), text, bool(missing))
    written = write_receipt(receipt)
    assert read_receipt(written, LAYOUT) == receipt
    assert len(written) <= longest_receipt(LAYOUT)


@given(st.binary(max_size=40))
def test_what_is_no_paper_is_refused(data: bytes) -> None:
    for read in (read_offer, lambda one: read_receipt(one, LAYOUT)):
        with contextlib.suppress(WireError):
            assert isinstance(read(data), (Offered, Receipt))


@pytest.mark.parametrize(
    "values",
    [
        [b"12345678", [3], "", False],
        [b"12345678", [-1], "", False],
        [b"12345678", [True], "", False],
        [b"1234567", [], "", False],
        [b"12345678", [], "x" * (MOST_TEXT + 1), False],
        [b"12345678", [], "", 1],
        [b"12345678", [], ""],
        {},
    ],
)
def test_a_receipt_that_cannot_be_is_refused(values: object) -> None:
    with pytest.raises(WireError):
        read_receipt(msgpack.packb(values), LAYOUT)


@pytest.mark.parametrize(
    "values",
    [
        *(
            [samples, epoch, epoch, []]
            for samples, epoch in [(0, 1), (1, -1), (True, 1), (1 << 41, 1), (1, 1 << 63), (1.0, 1)]
        ),
        [1, 1, 0, []],
        [1, 1, 1 << 63, []],
        [1, 1, 1],
        [1, 1, 1, [HEAD] * 3],
        [1, 1, 1, [[1 << 63, bytes(16), 1]]],
        [1, 1, 1, [HEAD[:2]]],
    ],
)
def test_an_offer_that_cannot_be_is_refused(values: list[object]) -> None:
    assert read_offer(msgpack.packb([1, 1, 2, [HEAD]])).heads == (Head(epoch=1, lineage=bytes(16), samples=1),)
    with pytest.raises(WireError):
        read_offer(msgpack.packb(values))


def plan(slow: bool) -> Plan:
    return make_plan(
        b"r" * 16,
        Head.root("run", "s"),
        "c",
        members=["c", "s"],
        contributions=[],
        bandwidths={"c": 1.0, "s": 1.0},
        chunks=1,
        slow=["s"] if slow else [],
        stop=False,
    )


def test_a_line_is_slow_once_several_rounds_say_so_and_again_quick_once_several_do() -> None:
    line, now = Line("s"), 0.0

    def observe(slow: bool, takes_s: float, times: int) -> bool:
        nonlocal now
        for _ in range(times):
            now += 1.0
            line.observe(plan(slow), takes_s, now)
        return line.slow

    assert not observe(True, 0.5, ROUNDS), "of the first one it is not known how long a step takes"
    assert observe(True, 0.5, 1)
    assert observe(False, 0.5, ROUNDS - 1)
    assert observe(True, 0.5, 1)
    assert not observe(False, 0.5, ROUNDS)
    assert not observe(True, 0.09, 2 * ROUNDS), "nobody waits for that"


def test_what_takes_a_small_part_of_a_step_is_not_worth_it() -> None:
    line = Line("s")
    for number in range(10):
        line.observe(plan(True), 0.5, 20.0 * number)
    assert not line.slow
