"""What peers tell each other, over a DHT in memory."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from hivemind.utils.timed_storage import ValueWithExpiration

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.swarm_records import MAX_METRICS, MAX_NAME_BYTES, MAX_PRINTED, MAX_WAY, SwarmRecords
from lightning_hivemind.errors import ArgumentError, SchemaMismatchError

IDS = ("12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ", "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM")


class MemoryDHT:
    """All peers' records."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        #: if given, every peer's next look waits for the others' next look
        self.together: threading.Barrier | None = None
        self._looked = threading.local()

    def is_alive(self) -> bool:
        return True

    def store(self, key: str, value: bytes, expiration: float, subkey: str, return_future: bool) -> Future[Any]:
        self.entries[subkey] = ValueWithExpiration(value, expiration)
        return answer(True)

    def get(self, key: str, latest: bool, return_future: bool) -> Future[Any]:
        found = dict(self.entries)
        if self.together is not None and not hasattr(self._looked, "once"):
            self._looked.once = True
            self.together.wait(10)
        return answer(ValueWithExpiration(found, 0.0) if found else None)


def answer(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Peers:
    """Makes peers over one DHT, and closes them."""

    def __init__(self) -> None:
        self.dht = MemoryDHT()
        self._made: list[SwarmRecords] = []

    def make(
        self,
        schema: list[str],
        *,
        target: int = 32,
        way: str = "engine hivemind",
        outside: str = "",
        joins: bool = False,
    ) -> SwarmRecords:
        network: Any = SimpleNamespace(dht=self.dht, peer_id=IDS[len(self._made) % len(IDS)], joins=joins)
        arguments = Arguments.create(target, run_id="run", environ={})
        self._made.append(SwarmRecords(arguments, network, schema, way, ("teacher.weight", outside)))
        return self._made[-1]

    def close(self) -> None:
        for one in self._made:
            one.close(5.0)


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def refusal(records: SwarmRecords) -> str:
    try:
        records.check_schema()
    except SchemaMismatchError as error:
        return str(error)
    return ""


def test_equal_models_are_of_one_run_and_unlike_ones_are_refused_by_name(peers: Peers) -> None:
    peers.make(["a (3,) torch.float32", "b (4,) torch.float32"]).check_schema()
    other = peers.make(["a (3,) torch.float32", "b (4,) torch.bfloat16"])
    assert "What differs first is: b (4,) torch.bfloat16" in refusal(other)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (["a (3,)"], "It has 1 entries, this one has 2."),
        ([f"layer {n}" for n in range(1000)], "It has 1000 entries, this one has 2."),
    ],
    ids=["fewer", "many more"],
)
def test_how_many_tensors_there_are_is_told_where_those_that_both_have_are_alike(
    peers: Peers, theirs: list[str], told: str
) -> None:
    peers.make(theirs).check_schema()
    own = [*theirs[:1], "b (4,)"]
    assert told in refusal(peers.make(own))


@pytest.mark.parametrize("count", [MAX_PRINTED, 148, 1000], ids=str)
def test_of_large_models_it_is_told_about_where_they_differ(peers: Peers, count: int) -> None:
    """GPT-2 has 148 tensors."""
    schema = [f"layer {n} (3,) torch.float32" for n in range(count)]
    peers.make(schema).check_schema()
    schema[count - 3] = f"layer {count - 3} (4,) torch.float32"
    text = refusal(peers.make(schema))
    named = [int(number) for number in re.findall(r"layer (\d+)", text)]
    assert named[0] <= count - 3 <= named[-1]
    assert named[-1] - named[0] < 10


@pytest.mark.parametrize("theirs", ["one", "another", ""])
def test_parameters_that_nobody_averages_and_that_differ_are_told(
    peers: Peers, theirs: str, caplog: pytest.LogCaptureFixture
) -> None:
    peers.make(["a (3,)"], outside=theirs).check_schema()
    peers.make(["a (3,)"], outside="one").check_schema()
    assert ("not in the optimizer (teacher.weight" in caplog.text) is (theirs != "one")


def test_who_averages_otherwise_is_told_how(peers: Peers) -> None:
    peers.make(["a (3,)"], way="engine native, gradients float16").check_schema()
    text = refusal(peers.make(["a (3,)"], way="engine native, gradients exact"))
    assert "averages by engine native, gradients float16, this one by engine native, gradients exact" in text
    assert "Give all peers the same engine and codecs" in text


def test_only_peers_that_can_average_go_by_one_name(peers: Peers) -> None:
    """Should two unlike ones miss each other at the start, their rounds still never meet."""
    alike = {peers.make(["a (3,)"]).run for _ in range(2)}
    unlike = {peers.make(["a (4,)"]).run, peers.make(["a (3,)"], target=64).run}
    unlike.add(peers.make(["a (3,)"], way="engine native, gradients exact").run)
    assert (len(alike), len(alike | unlike)) == (1, 4)
    assert all(name.startswith("run.") for name in alike | unlike)


def test_unlike_peers_that_start_at_the_same_time_do_not_miss_each_other(peers: Peers) -> None:
    pair = [peers.make(["a (3,)"]), peers.make(["a (4,)"])]
    assert all(one._records.refresh(10.0) for one in pair)  # what their threads do first is over
    peers.dht.together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        refusals = list(pool.map(refusal, pair))
    assert any(refusals)


def test_as_many_and_as_long_names_as_are_promised_fit_beside_the_largest_schema(peers: Peers) -> None:
    schema, way, outside = [f"parameter {n}" for n in range(MAX_PRINTED)], "x" * 2 * MAX_WAY, "f" * 16
    records = peers.make(schema, target=2**53, way=way, outside=outside)
    records.check_schema()
    names = [f"{'é' * (MAX_NAME_BYTES // 2 - 1)}{n:02}" for n in range(MAX_METRICS)]
    assert {len(name.encode()) for name in names} == {MAX_NAME_BYTES}
    for number, name in enumerate(names):
        assert records.mean(name, number + 0.1, 2**40) == pytest.approx(number + 0.1)


@pytest.mark.parametrize("name", ["one too many", "x" * (MAX_NAME_BYTES + 1), "é" * MAX_NAME_BYTES])
def test_a_refused_name_does_not_spoil_the_others(peers: Peers, name: str) -> None:
    records = peers.make(["a (3,)"])
    for number in range(MAX_METRICS):
        records.mean(str(number), 1.0, 1)
    with pytest.raises(ArgumentError, match="at most 20 names of at most 40 bytes"):
        records.mean(name, 1.0, 1)
    assert records.mean("0", 3.0, 1) == 3.0


def test_what_the_record_cannot_hold_does_not_spoil_later_calls(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    records = peers.make(["a (3,)"])
    monkeypatch.setattr("lightning_hivemind.engine.swarm_records.MAX_NAME_BYTES", 4096)
    with pytest.raises(ArgumentError, match="bytes"):
        records.mean("x" * 3000, 1.0, 1)
    assert records.mean("loss", 3.0, 1) == 3.0


def test_the_mean_over_peers_is_weighted_by_samples(peers: Peers) -> None:
    first, second = peers.make(["a (3,)"]), peers.make(["a (3,)"])
    first.mean("loss", 1.0, 30)
    assert first._records.refresh(10.0)
    assert second._records.refresh(10.0)
    assert second.mean("loss", 5.0, 10) == pytest.approx(2.0)


@pytest.mark.parametrize("value", [7.0, math.nan])
def test_what_is_of_no_samples_is_not_published_and_does_not_count(peers: Peers, value: float) -> None:
    first, helper = peers.make(["a (3,)"]), peers.make(["a (3,)"])
    assert helper.mean("loss", 7.0, 0) == 7.0, "there is no other"
    first.mean("loss", 1.0, 30)
    assert first._records.refresh(10.0)
    assert helper._records.refresh(10.0)
    assert helper.mean("loss", value, 0) == 1.0
    assert first._records.refresh(10.0)
    assert "metrics" not in first._others().get(IDS[1], {})


def test_who_is_known_to_be_dead_counts_no_more(peers: Peers) -> None:
    """Its record stays for half a minute."""
    first, second = peers.make(["a (3,)"]), peers.make(["a (3,)"])
    second.mean("loss", 5.0, 10)
    assert second._records.refresh(10.0)
    assert first._records.refresh(10.0)
    assert first.mean("loss", 1.0, 30, alive={IDS[1]}) == pytest.approx(2.0)
    assert first.mean("loss", 1.0, 30, alive=set()) == 1.0


def test_who_joined_nobody_founds_the_run(peers: Peers) -> None:
    founder, joiner = peers.make(["a (3,)"]), peers.make(["a (3,)"], joins=True)
    for one in (founder, joiner, founder):
        one.check_schema()
    assert joiner.founders == {IDS[0]}
    assert founder.founders == set()
