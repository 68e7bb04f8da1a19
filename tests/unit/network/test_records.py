"""Peer records against a DHT in memory that can be slow, broken or hostile."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hivemind.errors import ArgumentError

pytest.importorskip("hivemind")

from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from lightning_hivemind.network.records import (
    MAX_PEERS,
    MAX_RECORD_BYTES,
    SEAL_BYTES,
    PeerRecords,
    pack_record,
    seal,
    unpack_record,
)

ID_A = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"
ID_B = "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM"
TIMEOUT_S = 10.0


class MemoryDHT:
    """Keeps, like the real one, of two values the one that expires later.

    ``mode``: "up", "silent", "broken" or "gone".
    """

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        self.mode = "up"
        self.calls = 0
        self.called = threading.Event()

    def is_alive(self) -> bool:
        return self.mode != "gone"

    def _answer(self, value: object) -> Future[Any]:
        self.calls += 1
        self.called.set()
        if self.mode == "broken":
            raise BrokenPipeError("the DHT process is gone")
        future: Future[Any] = Future()
        if self.mode == "up":
            future.set_result(value)
        return future

    def store(self, key: str, value: bytes, expiration: float, subkey: str, return_future: bool) -> Future[Any]:
        assert return_future
        old = self.entries.get(subkey)
        newer = old is None or expiration > old.expiration_time
        if newer and self.mode == "up":
            self.entries[subkey] = ValueWithExpiration(value, expiration)
        return self._answer(newer)

    def get(self, key: str, latest: bool, return_future: bool) -> Future[Any]:
        assert return_future
        assert latest
        return self._answer(ValueWithExpiration(dict(self.entries), 0.0) if self.entries else None)

    def plant(self, peer: object, value: object, expires_in_s: float = 30.0, *, run: str = "run") -> None:
        expires = get_dht_time() + expires_in_s
        if isinstance(value, bytes) and isinstance(peer, str):  # whoever made it knows the run
            value = seal(f"{run}_lightning_peers", peer, value, expires) + value
        self.entries[peer] = ValueWithExpiration(value, expires)


@pytest.fixture
def dht() -> MemoryDHT:
    return MemoryDHT()


@pytest.fixture
def records(dht: MemoryDHT) -> Any:
    one = PeerRecords(dht, "run", ID_A, refresh_s=5.0, expiration_s=30.0)
    yield one
    one.close()
    assert not one._thread.is_alive()


def test_a_published_record_is_stored_and_read_by_others(dht: MemoryDHT, records: PeerRecords) -> None:
    records.publish(schema="abc", samples=7)
    records.publish(samples=8)
    assert records.read() == {ID_A: {"schema": "abc", "samples": 8}}
    assert records.refresh(TIMEOUT_S)
    other = PeerRecords(dht, "run", ID_B)
    assert other.refresh(TIMEOUT_S)
    assert other.read() == {ID_A: {"schema": "abc", "samples": 8}}
    other.close()


def test_a_field_of_none_is_removed(dht: MemoryDHT, records: PeerRecords) -> None:
    records.publish(a=1, b=2)
    records.publish(a=None)
    assert records.refresh(TIMEOUT_S)
    assert unpack_record(dht.entries[ID_A].value[SEAL_BYTES:]) == {"b": 2}


def test_a_record_is_stored_again_before_it_expires(dht: MemoryDHT) -> None:
    records = PeerRecords(dht, "run", ID_A, refresh_s=0.02, expiration_s=30.0)
    records.publish(a=1)
    assert records.refresh(TIMEOUT_S)
    first = dht.entries[ID_A].expiration_time
    while dht.entries[ID_A].expiration_time == first:
        dht.called.clear()
        assert dht.called.wait(TIMEOUT_S)
    records.close()
    assert dht.entries[ID_A].expiration_time > first


def test_close_withdraws_the_record_and_may_be_called_twice(dht: MemoryDHT) -> None:
    records, other = PeerRecords(dht, "run", ID_A), PeerRecords(dht, "run", ID_B)
    records.publish(a=1)
    assert records.refresh(TIMEOUT_S)
    assert other.refresh(TIMEOUT_S)
    assert ID_A in other.read()
    records.close()
    records.close()
    assert other.refresh(TIMEOUT_S)
    assert other.read() == {}
    records.publish(a=2)
    assert records.read() == {}
    other.close()


def test_expired_records_are_not_read(dht: MemoryDHT, records: PeerRecords) -> None:
    dht.plant(ID_B, pack_record({"a": 1}), expires_in_s=-1.0)
    assert records.refresh(TIMEOUT_S)
    assert records.read() == {}


@pytest.mark.parametrize("mode", ["broken", "silent"])
def test_network_trouble_blocks_and_raises_nothing_and_ends_by_itself(
    mode: str, dht: MemoryDHT, caplog: pytest.LogCaptureFixture
) -> None:
    dht.mode = mode
    with caplog.at_level(logging.INFO, "lightning_hivemind"):
        records = PeerRecords(dht, "run", ID_A, refresh_s=0.05, expiration_s=0.2)
        records.publish(a=1)
        assert not records.refresh(0.5)
        assert records.read() == {ID_A: {"a": 1}}
        while not caplog.messages:
            dht.called.clear()
            assert dht.called.wait(TIMEOUT_S)
        dht.mode = "up"
        assert records.refresh(TIMEOUT_S)
        records.close()
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "retrying" in warnings[0].getMessage()


@pytest.mark.parametrize(("mode", "asked"), [("silent", False), ("silent", True), ("gone", False)])
def test_close_leaves_no_thread_though_the_dht_does_not_answer(mode: str, asked: bool, dht: MemoryDHT) -> None:
    """A thread that looks at one of hivemind's futures while Python ends aborts the process."""
    records = PeerRecords(dht, "run", ID_A)
    records.publish(a=1)
    assert records.refresh(TIMEOUT_S)
    dht.mode = mode
    dht.called.clear()
    records.publish(a=2)
    if asked:
        assert dht.called.wait(TIMEOUT_S)
    records.close(timeout_s=1.0)
    assert not records._thread.is_alive()


def test_close_that_comes_while_something_is_sent_to_the_dht_leaves_no_thread(dht: MemoryDHT) -> None:
    records = PeerRecords(dht, "run", ID_A)
    assert records.refresh(TIMEOUT_S)
    dht.mode, answer = "silent", dht._answer

    def closes(value: object) -> Future[Any]:
        records._closing, records._closed_by = True, time.monotonic() + 0.2
        return answer(value)

    dht._answer = closes  # type: ignore[method-assign]
    records.publish(a=1)
    records._thread.join(2.0)
    assert not records._thread.is_alive()


def test_close_says_nothing_of_trouble(dht: MemoryDHT, caplog: pytest.LogCaptureFixture) -> None:
    records = PeerRecords(dht, "run", ID_A)
    assert records.refresh(TIMEOUT_S)
    dht.mode = "silent"
    dht.called.clear()
    records.publish(a=1)
    assert dht.called.wait(TIMEOUT_S)
    records.close(timeout_s=1.0)
    assert not records._thread.is_alive()
    assert not caplog.messages


def test_a_dht_process_that_is_gone_is_not_waited_for(dht: MemoryDHT, caplog: pytest.LogCaptureFixture) -> None:
    records = PeerRecords(dht, "run", ID_A)
    dht.mode = "gone"
    records.publish(a=1)
    start = time.monotonic()
    while not caplog.messages:
        assert time.monotonic() < start + TIMEOUT_S
        time.sleep(0.01)
    records.close()


HOSTILE: list[tuple[object, object]] = [
    (ID_B, b"\xc1"),
    (ID_B, b"\xdf\xff\xff\xff\xff"),
    (ID_B, b"\x90"),
    (ID_B, msgpack.packb({1: 2})),
    (ID_B, msgpack.packb({"a": msgpack.ExtType(5, b"x")})),
    (ID_B, msgpack.packb({"a": [[[[[[1]]]]]]})),
    (ID_B, msgpack.packb({"a": "x" * MAX_RECORD_BYTES})),
    (ID_B, {"a": 1}),
    (ID_B, 7),
    (ID_B, None),
    (b"bytes", pack_record({})),
    ("not a peer", pack_record({})),
    (5, pack_record({})),
]


@pytest.mark.parametrize(("peer", "value"), HOSTILE)
def test_a_malformed_record_is_ignored_and_logged_once(
    peer: object, value: object, dht: MemoryDHT, records: PeerRecords, caplog: pytest.LogCaptureFixture
) -> None:
    dht.plant(peer, value)
    records.publish(mine=1)
    with caplog.at_level(logging.WARNING, "lightning_hivemind"):
        for _ in range(3):
            assert records.refresh(TIMEOUT_S)
    assert records.read() == {ID_A: {"mine": 1}}
    assert len([m for m in caplog.messages if m.startswith("ignoring the record")]) == 1


def test_who_does_not_know_the_run_makes_no_record_and_prolongs_none(
    dht: MemoryDHT, records: PeerRecords, caplog: pytest.LogCaptureFixture
) -> None:
    dht.plant(ID_B, pack_record({"a": 1}), run="another run")
    assert records.refresh(TIMEOUT_S)
    assert records.read() == {}
    assert "was not sealed by a peer of this run" in caplog.text

    dht.plant(ID_B, pack_record({"a": 1}))
    assert records.refresh(TIMEOUT_S)
    assert records.read() == {ID_B: {"a": 1}}
    value, expires = dht.entries[ID_B]
    dht.entries[ID_B] = ValueWithExpiration(value, expires + 60.0)
    assert records.refresh(TIMEOUT_S)
    assert records.read() == {}


def test_records_that_claim_to_live_for_ever_are_ignored(dht: MemoryDHT, records: PeerRecords) -> None:
    dht.plant(ID_B, pack_record({"a": 1}), expires_in_s=1e9)
    assert records.refresh(TIMEOUT_S)
    assert records.read() == {}


def test_a_clock_that_was_set_back_is_told_once(
    dht: MemoryDHT, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take a record for none of ours that would expire hours from now."""
    back_s = [0.0]
    monkeypatch.setattr("lightning_hivemind.network.records.get_dht_time", lambda: get_dht_time() - back_s[0])
    with contextlib.closing(PeerRecords(dht, "run", ID_A, refresh_s=0.05, expiration_s=1.0)) as records:
        records.publish(step=1)
        assert records.refresh(TIMEOUT_S)
        assert "clock" not in caplog.text
        back_s[0] = 7200.0
        for step in range(2, 5):
            records.publish(step=step)
            assert records.refresh(TIMEOUT_S)
        assert caplog.text.count("clock was set back by 2.0 hours") == 1


def test_more_peers_than_can_be_are_cut_off(
    dht: MemoryDHT, records: PeerRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hivemind.network.records.is_peer_id", lambda text: True)
    packed = pack_record({"a": 1})
    for number in range(MAX_PEERS + 10):
        dht.plant(f"peer{number}", packed)
    assert records.refresh(TIMEOUT_S)
    assert len(records.read()) == MAX_PEERS


@pytest.mark.parametrize(
    "fields",
    [{"a": "x" * MAX_RECORD_BYTES}, {"a": object()}, {"a": {1: 2}}, {"a": 2**70}, {"a": list(range(1000))}],
)
def test_what_no_record_can_hold_is_refused_and_the_record_unchanged(
    fields: dict[str, object], records: PeerRecords
) -> None:
    records.publish(a=1)
    with pytest.raises(ArgumentError, match="record is unchanged"):
        records.publish(**fields)
    assert records.read() == {ID_A: {"a": 1}}


def test_times_that_make_live_peers_disappear_are_refused(dht: MemoryDHT) -> None:
    with pytest.raises(ArgumentError, match="refresh_s=5, expiration_s=8"):
        PeerRecords(dht, "run", ID_A, refresh_s=5.0, expiration_s=8.0)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.binary(max_size=10)
)
flat = st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars, max_size=3)
plain = scalars | flat | st.lists(flat, max_size=3) | st.dictionaries(st.text(max_size=5), flat, max_size=3)


@settings(max_examples=100)
@given(st.dictionaries(st.text(max_size=8), plain, max_size=4))
def test_unpacking_gives_what_was_packed(record: dict[str, object]) -> None:
    assert unpack_record(pack_record(record)) == record


@given(st.binary(max_size=200))
def test_unpacking_any_bytes_gives_a_record_or_a_value_error(packed: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(unpack_record(packed), dict)
