"""Rounds over real sockets: the protocol, the connections and the tensors together, peers as threads of one process."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hivemind.engine.native import driver as driver_module
from lightning_hivemind.engine.native.codecs import (
    BFloat16,
    Blockwise4Bit,
    Blockwise8Bit,
    ChunkCodec,
    Exact,
    ScaledFloat16,
    Uniform8Bit,
)
from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.exchange import Exchange
from lightning_hivemind.engine.native.layout import Layout, layout_of
from lightning_hivemind.engine.native.protocol.actions import Begun
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.protocol.messages import Message, Missing
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Offer, Plan, make_plan
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.protocol.settings import DETECT_S, Settings
from lightning_hivemind.engine.native.seam import Given, Outcome, Parcel
from lightning_hivemind.engine.native.state.questions import MAX_QUESTION_BYTES
from lightning_hivemind.engine.native.wire import outlet as outlet_module
from lightning_hivemind.engine.native.wire.connection import write
from lightning_hivemind.engine.native.wire.encoding import MAX_LIST, MAX_MESSAGE_BYTES, encode
from lightning_hivemind.engine.native.wire.frames import HEADER_BYTES, Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.engine.native.wire.sink import Payload
from lightning_hivemind.errors import EngineStuckError, WireError
from swarm.table import by_rank
from swarm.town import Town, wait_for

TARGET = 64


class Trainee:
    """Gives what a test puts there, keeps what is committed."""

    def __init__(self, name: str) -> None:
        self.name, self.samples, self.values = name, 0, torch.zeros(0)
        self.averages: list[Tensor | None] = []
        self.commits: list[Commit] = []
        #: of each commit, whether nothing of it is still to come
        self.came: list[bool] = []
        self.returns: list[str] = []
        self.refusals = 0
        self.outcomes: list[tuple[str, Outcome]] = []
        self.carried: list[Parcel] = []
        self._number, self.slow_s = 0, 0.0

    def give(self) -> Given:
        time.sleep(self.slow_s)
        if self.samples == 0:
            return Given(offer=Offer(contribution=None), values=None)
        self._number += 1
        contribution = Contribution(peer=self.name, number=self._number, samples=self.samples)
        return Given(offer=Offer(contribution=contribution), values=self.values)

    def called(self, now: float) -> float:
        return now

    def ready_at(self, now: float) -> float:
        return now

    def returned(self, reason: str, *, begun: bool) -> None:
        self.returns.append(reason)

    def committed(
        self, commit: Commit, average: Tensor | None, left_out: Tensor | None, *, coming: bool = False
    ) -> None:
        self.commits.append(commit)
        self.averages.append(average)
        self.came.append(not coming)
        self.samples = 0

    def arrived(self, round_id: bytes, average: Tensor | None) -> None:
        place = next(n for n, commit in enumerate(self.commits) if commit.round == round_id)
        self.averages[place], self.came[place] = average, True

    def refused(self) -> None:
        self.refusals += 1

    def failed(self, reason: str) -> None:
        self.returns.append(reason)

    def behind(self, head: Head, commits: tuple[Commit, ...]) -> None:
        self.returns.append("behind")

    hands_over = False
    carries = can_hand_over = True

    def hand_over(self, takes_s: float) -> Parcel | None:
        return Parcel(self.values, self.samples, 0, 1) if self.hands_over and self.samples else None

    def hands_over_in(self, after_s: float, takes_s: float) -> None:
        pass

    def handed_over(self, to: str, parcel: Parcel, outcome: Outcome, duration_s: float) -> None:
        self.outcomes.append((to, outcome))
        self.samples = self.samples if outcome is Outcome.BACK else 0

    def carry(self, of: str, parcel: Parcel) -> bool:
        self.carried.append(parcel)
        return True

    def too_old(self, until: int) -> bool:
        return False

    def adopted(self, head: Head) -> None:
        pass


class Run:
    """Some peers of one run, all at its root."""

    def __init__(
        self,
        names: list[str],
        layout: Layout,
        *,
        secure: bool,
        codec: ChunkCodec | None = None,
        detect_s: float = DETECT_S,
    ) -> None:
        self.layout, self.town = layout, Town(secure=secure, detect_s=detect_s)
        settings = Settings(run="run", target_samples=TARGET, chunks=layout.chunks, detect_s=detect_s)
        self.trainees = {name: Trainee(name) for name in names}
        self.drivers: dict[str, Driver] = {}
        root = Head.root("run", "founder")
        for name in names:
            codecs = [codec or Exact()] * layout.chunks
            driver = Driver(Peer(settings, name, b"life"), self.trainees[name], layout, codecs)
            self.drivers[name] = driver
            driver.start(self.town.add(name, driver))
        for name, driver in self.drivers.items():
            for other in names:
                if other != name:
                    driver.saw(other, Place(head=root, samples=0, stamp=0.0))
            driver.adopt(root)

    def contribute(self, samples: dict[str, int]) -> dict[str, Tensor]:
        """Everybody has so many samples of random values now."""
        given = {}
        for name, count in samples.items():
            trainee = self.trainees[name]
            trainee.values, trainee.samples = torch.randn(self.layout.elements), count
            given[name] = trainee.values.clone()
        for name in samples:
            self.drivers[name].contributed()
        return given

    def connections(self) -> set[object]:
        return {inlet for links in self.town.links.values() for inlet in links._inlets}

    def wait_for_commit(self, number: int, names: list[str] | None = None) -> None:
        for name in names or list(self.trainees):
            trainee = self.trainees[name]
            wait_for(
                lambda trainee=trainee: len(trainee.commits) >= number and all(trainee.came),
                f"{name} has commit {number}",
            )

    def close(self) -> None:
        for driver in self.drivers.values():
            driver.stop(5.0)


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    before = set(threading.enumerate())
    yield started
    for run in started:
        run.close()
    wait_for(lambda: set(threading.enumerate()) <= before, "the threads have ended")


def mean(given: dict[str, Tensor], samples: dict[str, int]) -> Tensor:
    total = sum(samples.values())
    return sum((samples[name] / total * values.double() for name, values in given.items()), torch.zeros(1).double())


@pytest.mark.parametrize("secure", [True, False], ids=["TLS", "in the clear"])
@pytest.mark.parametrize("elements", [1, 1000, 1000 * 7 + 3])
def test_three_peers_average_by_samples_and_all_get_the_same_bytes(
    runs: list[Run], elements: int, secure: bool
) -> None:
    run = Run(["a", "b", "c"], Layout(elements, chunk_elements=1000), secure=secure)
    runs.append(run)
    samples = {"a": 10, "b": 30, "c": 24}
    wait_for(lambda: len(run.connections()) == 6, "connections both ways, before anything is sent on them")
    warm = run.connections()
    for number in range(1, 4):
        given = run.contribute(samples)
        run.wait_for_commit(number)
        assert run.connections() == warm, "a round takes those of the one before"
        averages = [trainee.averages[-1] for trainee in run.trainees.values()]
        assert all(average is not None and torch.equal(average, averages[0]) for average in averages)
        assert torch.allclose(averages[0].double(), mean(given, samples), rtol=1e-5, atol=1e-6)
        for name, trainee in run.trainees.items():
            assert torch.equal(trainee.values, given[name]), "what was given has changed"
        (commit,) = {trainee.commits[-1] for trainee in run.trainees.values()}
        assert {one.peer: one.samples for one in commit.contributions} == samples


@pytest.mark.parametrize(
    "codec",
    [Exact(), ScaledFloat16(), BFloat16(), Uniform8Bit(), Blockwise8Bit(), Blockwise4Bit()],
    ids=lambda codec: codec.name,
)
def test_a_step_takes_hardly_more_bytes_than_it_must(
    runs: list[Run], codec: ChunkCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of n peers has to send 2(n-1)/n of an encoded gradient. (Of 50 million values, chunks have 4 MiB.)"""
    write, sent = outlet_module.write, list[int]()

    def counted(sock: socket.socket, header: Header, payload: Payload = ()) -> None:
        sent.append(HEADER_BYTES + sum(memoryview(part).nbytes for part in payload))
        write(sock, header, payload)

    layout = layout_of(4_000_000)
    run = Run(["a", "b", "c"], layout, secure=False, codec=codec)
    runs.append(run)
    monkeypatch.setattr(outlet_module, "write", counted)
    run.contribute({"a": 10, "b": 30, "c": 24})
    run.wait_for_commit(1)
    ideal = 2 * (3 - 1) * sum(codec.size_bytes(layout.size(chunk)) for chunk in range(layout.chunks))
    assert ideal <= sum(sent) <= 1.03 * ideal


def test_who_floods_does_not_stop_the_clock(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits in time are looked at by ticks, which were made where there was nothing else to do."""
    run = Run(["a", "b"], Layout(1000, chunk_elements=1000), secure=False)
    runs.append(run)
    driver, over, ticks = run.drivers["a"], threading.Event(), list[float]()
    tick = driver._peer.tick
    monkeypatch.setattr(driver._peer, "tick", lambda now: (ticks.append(now), tick(now)))

    def flood() -> None:
        while not over.is_set():
            driver._events.put_from("b", 1, lambda now: time.sleep(0.001))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_for(lambda: len(driver._events._events) > 1000, "many events wait")
        ticks.clear()
        wait_for(lambda: len(ticks) > 1, "ticks")
    finally:
        over.set()
    run.contribute({"a": 40, "b": 40})
    run.wait_for_commit(1)
    thread.join()


def test_a_peer_leaves_in_time_though_it_owes_something_and_is_busy(runs: list[Run]) -> None:
    run = Run(["a"], Layout(1000, chunk_elements=1000), secure=False)
    runs.append(run)
    driver, over = run.drivers["a"], threading.Event()
    driver._chunks = SimpleNamespace(owes=True)  # type: ignore[assignment]
    driver._events.put(lambda now: over.wait())  # type: ignore[arg-type]
    began = time.monotonic()
    driver.stop(1.0)
    took = time.monotonic() - began
    over.set()
    assert 1.0 <= took < 1.4


class Interrupted:
    """Ctrl+C comes while somebody waits for this."""

    @property
    def owes(self) -> bool:
        raise KeyboardInterrupt

    def join(self, timeout_s: float) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("waits_for", ["_chunks", "_thread"])
def test_ctrl_c_while_it_stops_leaves_neither_connections_nor_its_thread(runs: list[Run], waits_for: str) -> None:
    """In a notebook the process lives on, and a second teardown has nothing to stop."""
    run = Run(["a", "b"], Layout(1000, chunk_elements=1000), secure=False)
    runs.append(run)
    driver, links = run.drivers["a"], run.town.links["a"]
    wait_for(links.connected, "a connection")
    thread, whole = driver._thread, getattr(driver, waits_for)
    setattr(driver, waits_for, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        driver.stop(5.0)
    setattr(driver, waits_for, whole)
    assert not links.connected()
    wait_for(lambda: not thread.is_alive(), "the thread has ended")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(run.town.ports["a"], timeout=1.0):
        pass


def test_a_peer_without_samples_gets_the_average_and_changes_nothing(runs: list[Run]) -> None:
    run = Run(["a", "b", "c"], Layout(5000, chunk_elements=1000), secure=False)
    runs.append(run)
    given = run.contribute({"a": 40, "b": 40})
    run.wait_for_commit(1)
    assert torch.equal(run.trainees["a"].averages[0], run.trainees["c"].averages[0])
    assert torch.allclose(run.trainees["c"].averages[0].double(), mean(given, {"a": 1, "b": 1}), rtol=1e-5, atol=1e-6)


def test_a_peer_that_fails_in_a_round_leaves_it_and_trains_on(runs: list[Run]) -> None:
    run = Run(["a", "b", "c"], Layout(5000, chunk_elements=1000), secure=False)
    runs.append(run)
    trainee = run.trainees["c"]
    give, failed = trainee.give, list[bool]()

    def give_or_fail() -> Given:
        if not failed:
            failed.append(True)
            raise MemoryError("induced")
        return give()

    trainee.give = give_or_fail  # type: ignore[method-assign]
    run.contribute({"a": 40, "b": 40, "c": 40})
    run.wait_for_commit(1, ["a", "b"])
    first = run.trainees["a"].commits[0].head
    wait_for(lambda: run.drivers["c"].status.head == first, "it follows: it hears of the commit, or of news")
    told = trainee.returns.pop(0), trainee.returns, trainee.averages
    assert told in [("MemoryError: induced", ["behind"], []), ("MemoryError: induced", [], [None])]
    for other in ("a", "b"):  # as their records in the DHT would say
        run.drivers["c"].saw(other, Place(head=first, samples=0, stamp=1.0))
    run.contribute({"a": 10, "b": 10, "c": 50})
    run.wait_for_commit(2, ["a", "b"])
    wait_for(lambda: trainee.commits[-1:] == run.trainees["a"].commits[1:], "c has the second commit")
    assert trainee.averages[-1] is not None
    assert "c" in {one.peer for one in run.trainees["a"].commits[-1].contributions}


@pytest.mark.parametrize("kind", [Kind.INPUT, Kind.RESULT])
def test_what_is_damaged_in_the_clear_is_asked_for_again(
    runs: list[Run], kind: Kind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(["a", "b"], Layout(5000, chunk_elements=1000), secure=False)
    runs.append(run)
    damaged: list[Header] = []

    def damages_once(sock: socket.socket, header: Header, payload: Payload = ()) -> None:
        if header.kind is kind and not damaged:
            damaged.append(header)
            (data,) = payload
            payload = (bytes([data[0] ^ 1]) + bytes(data[1:]),)
        write(sock, header, payload)

    monkeypatch.setattr(outlet_module, "write", damages_once)
    samples = {"a": 40, "b": 40}
    given = run.contribute(samples)
    run.wait_for_commit(1)
    assert damaged
    assert "was damaged on the way" in caplog.text
    for trainee in run.trainees.values():
        assert torch.allclose(trainee.averages[0].double(), mean(given, samples), rtol=1e-5, atol=1e-6)


def test_who_asks_for_what_is_being_made_is_sent_it_once(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(["a", "b"], Layout(5000, chunk_elements=1000), secure=True)
    runs.append(run)
    sent: Counter[tuple[Kind, bytes, int]] = Counter()
    asked, send, see = [], Links.send, driver_module.decode

    def counts(links: Links, peer: str, header: Header, payload: Payload = ()) -> None:
        sent[header.kind, header.round, header.chunk] += header.kind is Kind.INPUT
        send(links, peer, header, payload)

    def reads(data: memoryview) -> Message:
        message = see(data)
        asked.extend([message] if isinstance(message, Missing) and message.inputs else [])
        return message

    def slowly(make: Callable[[Exchange, int], Any]) -> Callable[[Exchange, int], Any]:
        def takes_long(exchange: Exchange, chunk: int) -> Any:
            time.sleep(0.4)  # so b hears nothing for longer than resend_s, while a sees to a chunk of its own
            return make(exchange, chunk)

        return takes_long

    monkeypatch.setattr(Links, "send", counts)
    monkeypatch.setattr(driver_module, "decode", reads)
    for name in ("input", "keep_own"):
        monkeypatch.setattr(Exchange, name, slowly(getattr(Exchange, name)))
    run.contribute({"a": 80, "b": 0})  # b makes none, and ticks
    run.wait_for_commit(1)
    assert asked
    # (what was sent in the very moment in which it was asked for may be sent again)
    inputs = [count for count in sent.values() if count]
    assert sum(inputs) <= 1 + len(inputs), inputs


def test_a_gradient_that_is_not_finite_is_refused_and_the_others_go_on(runs: list[Run]) -> None:
    run = Run(["a", "b", "c"], Layout(5000, chunk_elements=1000), secure=False)
    runs.append(run)
    samples = {"a": 30, "b": 30, "c": 30}
    run.trainees["b"].give = lambda give=run.trainees["b"].give: spoiled(give())  # type: ignore[method-assign]
    given = run.contribute(samples)
    run.wait_for_commit(1)
    (commit,) = {trainee.commits[0] for trainee in run.trainees.values()}
    assert [one.peer for one in commit.contributions] == ["a", "c"]
    del given["b"]
    expected = mean(given, {"a": 30, "c": 30})
    for trainee in run.trainees.values():
        assert torch.allclose(trainee.averages[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert {name: trainee.refusals for name, trainee in run.trainees.items()} == {"a": 0, "b": 1, "c": 0}


def test_a_plan_that_never_named_a_gradient_has_not_refused_it(runs: list[Run]) -> None:
    """Who is in it before it has joined, since its line is slow, has what it offers then still to give."""
    run = Run(["a"], Layout(5000, chunk_elements=1000), secure=False)
    runs.append(run)
    driver, trainee = run.drivers["a"], run.trainees["a"]
    mine, theirs = (Contribution(peer=name, number=1, samples=8) for name in "ab")
    plan = make_plan(
        b"r" * 16,
        Head.root("run", "founder"),
        "b",
        members=["a", "b"],
        contributions=[theirs],
        bandwidths={"b": 1.0},
        chunks=5,
        stop=False,
    )
    driver._traffic.open(plan.round, torch.zeros(5000))
    driver._do(Begun(plan=plan))
    assert trainee.refusals == 0
    named = replace(plan, contributions=(mine, theirs), version=1)
    driver._do(Begun(plan=named))
    assert trainee.refusals == 0
    driver._do(Begun(plan=named.without(frozenset(), frozenset("a"))))
    assert trainee.refusals == 1


def test_who_is_alone_does_not_give_what_cannot_be_used_again_and_again(runs: list[Run]) -> None:
    run = Run(["a"], Layout(5000, chunk_elements=1000), secure=False)
    runs.append(run)
    trainee = run.trainees["a"]
    give = trainee.give
    trainee.give = lambda: spoiled(give())  # type: ignore[method-assign]
    run.contribute({"a": TARGET})
    wait_for(lambda: trainee.refusals, "it is refused")
    trainee.give = give  # type: ignore[method-assign]
    given = run.contribute({"a": TARGET})
    run.wait_for_commit(1)
    assert torch.allclose(trainee.averages[0], given["a"])


def spoiled(given: Given) -> Given:
    values = given.values.clone()
    values[1234] = float("nan")
    return Given(offer=given.offer, values=values)


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_peer_that_vanishes_costs_the_others_nothing_but_its_samples(runs: list[Run], who: str) -> None:
    """Whoever it is: the coordinator of the next round, or an owner of chunks."""
    run = Run(["a", "b", "c"], Layout(50_000, chunk_elements=1000), secure=False)
    runs.append(run)
    run.contribute({"a": 30, "b": 30, "c": 30})
    run.wait_for_commit(1)
    survivors = [name for name in run.trainees if name != who]
    given = run.contribute(dict.fromkeys(run.trainees, 40))
    run.drivers[who].stop(5.0)
    run.wait_for_commit(2, survivors)
    first, second = (run.trainees[name] for name in survivors)
    assert first.commits[1] == second.commits[1]
    assert torch.equal(first.averages[1], second.averages[1])
    counted = {one.peer: one.samples for one in first.commits[1].contributions}
    expected = mean({name: given[name] for name in counted}, counted)  # in every chunk, or in none
    assert torch.allclose(first.averages[1].double(), expected, rtol=1e-5, atol=1e-6)


def test_work_that_takes_long_is_not_taken_for_a_process_that_stood_still(runs: list[Run]) -> None:
    run = Run(["a"], layout_of(1000), secure=False)
    runs.append(run)
    run.trainees["a"].slow_s = 1.5
    run.contribute({"a": TARGET})
    run.wait_for_commit(1)
    assert run.trainees["a"].returns == []


def test_a_rounds_thread_that_does_not_come_back_is_an_error(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "ANSWER_S", 0.2)
    run = Run(["a"], layout_of(1000), secure=False)
    runs.append(run)
    run.trainees["a"].slow_s = 1.5
    with pytest.raises(EngineStuckError, match="Restart this peer"):
        run.contribute({"a": TARGET})
    run.wait_for_commit(1)


def test_a_process_that_stands_still_while_it_works_gives_up_what_it_leads(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(["a"], layout_of(1000), secure=False)
    runs.append(run)
    trainee, driver = run.trainees["a"], run.drivers["a"]
    answers = iter([True])
    asked: list[bool] = []
    give = trainee.give

    def stands_still() -> Given:
        found = give()
        monkeypatch.setattr(driver._wakefulness, "stood_still", lambda: asked.append(True) or next(answers, False))
        return found

    monkeypatch.setattr(trainee, "give", stands_still)
    run.contribute({"a": TARGET})
    run.wait_for_commit(1)
    assert asked
    assert trainee.returns == ["this peer was suspended"]


def test_what_is_too_long_is_refused_before_there_is_memory_for_it(runs: list[Run]) -> None:
    run = Run(["a", "b"], Layout(5000, chunk_elements=1000), secure=False)
    runs.append(run)
    run.contribute({"a": 10})  # too few: a round is not begun
    driver = run.drivers["a"]
    driver._traffic.open(b"r" * 16, None)
    wrong = [
        Header(kind=Kind.MESSAGE, length=MAX_MESSAGE_BYTES + 1),
        Header(kind=Kind.REQUEST, length=MAX_QUESTION_BYTES + 1),
        *(Header(kind=kind, round=b"r" * 16, chunk=5, length=4000) for kind in (Kind.INPUT, Kind.RESULT)),
        *(Header(kind=kind, round=b"r" * 16, chunk=1, length=4001) for kind in (Kind.INPUT, Kind.RESULT)),
    ]
    for header in wrong:
        with pytest.raises(WireError):
            driver.room("b", header)
    assert driver.room("b", Header(kind=Kind.INPUT, round=b"r" * 16, chunk=1, length=4000)) is not None
    assert driver.room("b", Header(kind=Kind.INPUT, round=b"x" * 16, chunk=1, length=4000)) is None, "of another round"


@pytest.mark.parametrize("secure", [True, False], ids=["TLS", "in the clear"])
def test_who_floods_is_read_no_further_until_there_is_time_for_it(
    runs: list[Run], secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the sender, whose connection takes no more: nothing piles up in between but the kernel's buffers."""
    limit, count = 2 << 20, 1000
    monkeypatch.setattr(driver_module, "WAITING_BYTES", limit)
    run = Run(["a", "b", "c"], layout_of(10), secure=secure)
    runs.append(run)
    driver, busy, go_on = run.drivers["b"], threading.Event(), threading.Event()

    def takes_long(_: float) -> None:
        busy.set()
        go_on.wait(20.0)

    driver._events.put(takes_long)
    assert busy.wait(20.0)
    data = encode(Missing(round=b"r" * 16, version=0, inputs=True, chunks=tuple(range(MAX_LIST))))
    flood = Header(kind=Kind.MESSAGE, length=len(data))
    for _ in range(count):
        run.town.links["a"].send("b", flood, (data,))
    waiting = driver._events._waiting
    wait_for(lambda: waiting["a"] > limit - len(data), "as much waits as may")
    time.sleep(0.3)
    assert waiting["a"] <= limit
    assert len(run.town.links["a"]._outlets["b"]._urgent) > count / 4, "it was all read, wherever it is"
    run.town.links["c"].send("b", Header(kind=Kind.MESSAGE, length=len(data)), (data,))
    wait_for(lambda: waiting["c"], "others are read all the same")
    go_on.set()
    wait_for(lambda: not waiting and not run.town.links["a"]._outlets["b"]._urgent, "all of it is seen to in the end")


def test_who_sends_slowly_reduces_less(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(["a", "b", "slow"], Layout(60_000, chunk_elements=1000), secure=False)
    runs.append(run)
    plans: list[Plan] = []
    begin, rate = Exchange.begin, Links.upload_rate.fget
    assert rate is not None

    def begins(exchange: Exchange, plan: Plan) -> None:
        plans.append(plan)
        begin(exchange, plan)

    def rate_of(links: Links) -> float:
        return rate(links) * (0.8 if links is run.town.links["slow"] else 1.0)

    monkeypatch.setattr(Exchange, "begin", begins)
    monkeypatch.setattr(Links, "upload_rate", property(rate_of))
    samples = dict.fromkeys(run.trainees, TARGET)
    given = run.contribute(samples)
    run.wait_for_commit(1)
    owners = Counter(plans[0].owners)
    assert abs(owners["a"] - owners["b"]) <= 1
    assert 0 < owners["slow"] < owners["a"] / 2
    for trainee in run.trainees.values():
        assert torch.allclose(trainee.averages[0], mean(given, samples).float(), atol=1e-6)


def only_gives(given: Given) -> Given:
    """And reduces nothing."""
    return Given(offer=replace(given.offer, reduces=False), values=given.values)


def test_a_step_that_is_decided_is_one_though_its_average_cannot_be_had(runs: list[Run]) -> None:
    """Else its samples would be given again, or the peer would wait for a step that it has forgotten."""
    run = Run(["a", "b"], layout_of(10), secure=False)
    runs.append(run)
    chunks, happened = run.drivers["b"]._chunks, list[str]()
    assert chunks is not None
    trainee, result = run.trainees["b"], chunks.result
    committed, failed = trainee.committed, trainee.failed

    def no_result(*_: object, **__: object) -> Tensor | None:
        chunks.result = result  # type: ignore[method-assign]
        raise MemoryError("no more")

    def commits(commit: Commit, average: Tensor | None, left_out: Tensor | None, *, coming: bool = False) -> None:
        happened.append("committed")
        committed(commit, average, left_out, coming=coming)

    def fails(reason: str) -> None:
        happened.append(reason)
        failed(reason)

    chunks.result = no_result  # type: ignore[method-assign, assignment]
    trainee.committed, trainee.failed = commits, fails  # type: ignore[method-assign]
    run.contribute({"a": 32, "b": 32})
    wait_for(lambda: len(happened) == 2 and run.trainees["a"].commits, "it is decided, and has failed")
    assert happened == ["committed", "MemoryError: no more"]
    assert trainee.commits == run.trainees["a"].commits
    assert trainee.averages == [None]


def test_a_rounds_thread_goes_on_though_leaving_a_round_fails_too(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(["a", "b"], layout_of(10), secure=False)
    runs.append(run)
    failures = ["failed"]

    def failed(reason: str) -> None:
        failures.pop()
        raise MemoryError("no more")

    def wrong(_: float) -> None:
        raise ValueError("induced")

    monkeypatch.setattr(run.trainees["b"], "failed", failed)
    run.drivers["b"]._events.put(wrong)
    wait_for(lambda: not failures, "it has failed twice")
    run.contribute({"a": 32, "b": 32})
    run.wait_for_commit(1)


@pytest.mark.parametrize("secure", [True, False], ids=["TLS", "in the clear"])
def test_who_is_late_gets_the_bytes_that_were_committed_whatever_the_others_do_with_theirs(
    runs: list[Run], secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than fits into the kernel's buffers: what waits to be sent is the memory in which the average is."""
    *quick, slow = by_rank(["a", "b", "c"], "run")  # who leads hears of nothing either, while it reads nothing
    run = Run(["a", "b", "c"], layout_of(12 << 20), secure=secure, detect_s=60.0)
    runs.append(run)
    late, go_on = run.drivers[slow], threading.Event()
    arrived = late.arrived

    def slowly(peer: str, header: Header, payload: memoryview | None) -> None:
        if header.kind is Kind.RESULT:
            go_on.wait(30.0)
        arrived(peer, header, payload)

    give = run.trainees[slow].give
    monkeypatch.setattr(late, "arrived", slowly)
    monkeypatch.setattr(run.trainees[slow], "give", lambda: only_gives(give()))
    run.contribute({"a": 10, "b": 30, "c": 24})
    for name in quick:
        wait_for(lambda name=name: run.trainees[name].commits, f"{name} has the commit")  # type: ignore[misc]
    assert all(run.drivers[name]._traffic.owes for name in quick)
    committed = run.trainees[quick[0]].averages[0]
    assert committed is not None
    expected = committed.clone()
    for name in quick:
        average = run.trainees[name].averages[0]
        assert average is not None
        average.zero_()  # a step, with clipping say
    go_on.set()
    wait_for(lambda: run.trainees[slow].came == [True], "the rest is there")
    found = run.trainees[slow].averages[0]
    assert found is not None
    assert torch.equal(found, expected)
    wait_for(lambda: not any(run.drivers[name]._traffic.owes for name in quick), "nothing waits any more")


def test_a_gradient_goes_to_another_peer_over_a_connection_and_into_the_next_step(runs: list[Run]) -> None:
    """As if this peer's line were slow."""
    run = Run(["a", "b", "c"], Layout(5000, chunk_elements=1000), secure=True)
    runs.append(run)
    slow, driver = run.trainees["c"], run.drivers["c"]
    assert driver._carrying is not None
    driver._carrying._line.slow = True
    run.contribute({"c": 24})
    wait_for(lambda: slow.outcomes, "it was handed over")
    ((to, outcome),) = slow.outcomes
    assert outcome is Outcome.TAKEN
    (parcel,) = run.trainees[to].carried
    assert parcel.samples == 24
    assert torch.equal(parcel.values, slow.values)
    run.contribute({"a": 10, "b": 54})
    run.wait_for_commit(1)
    assert {one.peer for one in run.trainees["a"].commits[0].contributions} == {"a", "b"}
