"""What a peer's record in the DHT, which anybody can write, is taken for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.engine.native import whereabouts
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.protocol.messages import Progress
from lightning_hivemind.engine.native.protocol.roster import Place
from lightning_hivemind.engine.native.seam import Status
from lightning_hivemind.engine.native.whereabouts import Whereabouts, _read
from lightning_hivemind.engine.native.wire.encoding import decode, encode

GOOD = [3, b"x" * 16, 300, 20, True, 2, 12.5]


def test_a_record_says_where_a_peer_stands() -> None:
    head = Head(epoch=3, lineage=b"x" * 16, samples=300)
    assert _read(GOOD) == Place(head=head, samples=20, reduces=True, cuts=2, stamp=12.5)


@pytest.mark.parametrize(
    "value", [None, 1, "text", b"bytes", {}, [], GOOD[:6], [*GOOD, 1], tuple(GOOD), {"a": 1}], ids=repr
)
def test_what_is_no_record_is_none(value: object) -> None:
    assert _read(value) is None


@pytest.mark.parametrize(
    ("place", "value"),
    [(place, value) for place in (0, 2, 3, 5) for value in (-1, 2**63, True, 1.0, "1", None, [])]
    + [(1, value) for value in ("text", None, bytes(65), 1, [])]
    + [(4, value) for value in (0, 1, None, "yes")]
    + [(6, value) for value in (1, None, "now", True)],
)
def test_a_record_with_something_wrong_is_none(place: int, value: object) -> None:
    assert _read([*GOOD[:place], value, *GOOD[place + 1 :]]) is None


@pytest.mark.parametrize("stamp", [float("inf"), float("nan"), float("-inf")])
def test_a_stamp_that_is_no_time_is_none(stamp: float) -> None:
    assert _read([*GOOD[:6], stamp]) is None


def test_what_a_record_says_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thousand peers would keep the rounds' thread busy with what it knows."""
    records = {"other": {"place": GOOD}}
    monkeypatch.setattr(whereabouts, "PeerRecords", lambda *_, **__: SimpleNamespace(read=lambda: records))
    told: list[Place] = []
    driver = SimpleNamespace(saw=lambda peer, place: told.append(place), status=Status())
    network = SimpleNamespace(dht=None, peer_id="me")
    introductions = SimpleNamespace(know=lambda *_: None)
    one = Whereabouts(network, "run", driver, introductions, bool, None, reduces=True)  # type: ignore[arg-type]
    for stamp in (12.5, 12.5, 13.5):
        records["other"] = {"place": [*GOOD[:6], stamp]}
        assert len(one._look()) == 1
    assert [place.stamp for place in told] == [12.5, 13.5]
    del records["other"]
    assert one._look() == []
    assert not one._stamps, "of a peer that is gone nothing is kept"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=7),
    max_leaves=8,
)


@given(VALUES | st.tuples(*[VALUES | st.sampled_from(GOOD)] * 7).map(list))
def test_whatever_is_there_is_a_place_that_can_be_told_or_none(value: object) -> None:
    found = _read(msgpack.unpackb(msgpack.packb(value)))
    if found is not None:
        told = Progress(head=found.head, samples=found.samples, swarm_samples=found.samples, cuts=found.cuts)
        assert decode(encode(told)) == told
        assert (type(found.reduces), type(found.stamp)) == (bool, float)


def test_what_goes_wrong_with_one_look_does_not_end_the_looking(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No memory, say: without that thread nobody new would be found, and nobody would find this peer."""
    for wait in ("LOOK_S", "PUBLISH_S"):
        monkeypatch.setattr(whereabouts, wait, 0.01)
    published, failures, places = threading.Event(), [MemoryError("no more")], []

    def read() -> dict[str, object]:
        if failures:
            raise failures.pop()
        return {}

    def publish(*, place: list[object], **_: object) -> None:
        if not failures:
            places.append(place)
            published.set()

    records = SimpleNamespace(read=read, publish=publish, close=lambda _: None)
    monkeypatch.setattr(whereabouts, "PeerRecords", lambda *_, **__: records)
    head = Head.root("run", "me")
    driver = SimpleNamespace(status=Status(head=head, samples=7, swarm_samples=90))
    network = SimpleNamespace(dht=None, peer_id="me")
    one = Whereabouts(network, "run", driver, None, bool, None, reduces=True)  # type: ignore[arg-type]
    one._thread.start()
    try:
        assert published.wait(20.0)
    finally:
        one.stop()
    assert "will be in a moment" in caplog.text
    assert _read(places[0]) == Place(head=head, samples=7, stamp=places[0][-1]), "what it gives to the next step"


def test_who_joins_says_where_it_stands_as_soon_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once hear of one another by that; until then rounds are made without one of them."""
    monkeypatch.setattr(whereabouts, "LOOK_S", 60.0)
    looks, published = threading.Semaphore(0), threading.Event()

    def read() -> dict[str, object]:
        looks.release()
        return {}

    records = SimpleNamespace(read=read, publish=lambda **_: published.set(), close=lambda _: None)
    monkeypatch.setattr(whereabouts, "PeerRecords", lambda *_, **__: records)
    driver = SimpleNamespace(status=Status())
    network = SimpleNamespace(dht=None, peer_id="me")
    one = Whereabouts(network, "run", driver, None, bool, None, reduces=True)  # type: ignore[arg-type]
    one._thread.start()
    try:
        assert looks.acquire(timeout=20.0)
        assert looks.acquire(timeout=20.0), "it looks again soon"
        assert not published.is_set(), "it stands nowhere yet"
        driver.status = Status(head=Head.root("run", "me"))
        assert published.wait(20.0)
    finally:
        one.stop()
