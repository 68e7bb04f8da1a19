"""Peers whose parameters are not those of most find out, and say why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_hivemind.engine.native import agreement
from lightning_hivemind.engine.native.agreement import REMEMBERED, Agreement, Difference, digest_of_tensors, kind_of
from lightning_hivemind.engine.native.protocol.lineage import Head
from swarm.training import training_of


def head(epoch: int, lineage: bytes = b"one") -> Head:
    return Head(epoch=epoch, lineage=lineage, samples=epoch)


def swarm(*kinds: str) -> dict[str, Agreement]:
    return {f"p{number}": Agreement(f"p{number}", kind, 2) for number, kind in enumerate(kinds)}


def compare(peers: dict[str, Agreement], epoch: int, *values: float) -> list[Difference | None]:
    for peer, value in zip(peers.values(), values, strict=True):
        peer.note(head(epoch), [torch.full((3,), value), torch.tensor(value)])
    for name, peer in peers.items():
        for other in peers.values():
            other.heard(name, peer.record())
    return [peer.difference() for peer in peers.values()]


def test_equal_peers_have_nothing_to_say() -> None:
    peers = swarm("cpu", "cpu", "gpu")
    assert compare(peers, 2, 1.0, 1.0, 1.0) == [None] * 3


def test_who_differs_from_most_is_told_once() -> None:
    peers = swarm("cpu", "cpu", "gpu", "cpu")
    found = compare(peers, 2, 1.0, 1.0, 1.5, 2.0)
    others = frozenset({"p0", "p1"})
    assert found == [None, None, Difference(2, others, like=False), Difference(2, others, like=True)]
    assert [peer.difference() for peer in peers.values()] == [None] * 4
    assert compare(peers, 4, 1.0, 1.0, 1.0, 1.0) == [None] * 4
    assert compare(peers, 6, 1.0, 1.0, 1.0, 3.0)[3] == Difference(6, frozenset({"p0", "p1", "p2"}), like=True)


def test_unlike_peers_train_for_longer_than_they_take_states(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now)
    peers = swarm("cpu", "cpu", "gpu", "cpu")
    assert compare(peers, 2, 1.0, 1.0, 2.0, 3.0)[2:] != [None, None]
    for one in peers.values():
        one.took(6.0)
    now += 60.0
    assert compare(peers, 4, 1.0, 1.0, 2.0, 3.0)[2:] == [None, Difference(4, frozenset({"p0", "p1"}), like=True)]
    now += 61.0
    assert compare(peers, 6, 1.0, 1.0, 2.0, 1.0)[2] == Difference(6, frozenset({"p0", "p1", "p3"}), like=False)


def test_who_has_left_does_not_judge() -> None:
    peers = swarm("cpu", "cpu", "cpu")
    for peer, value in zip(peers.values(), (1.0, 1.0, 2.0), strict=True):
        peer.note(head(2), [torch.tensor(value)])
    last = peers["p2"]
    for name, peer in peers.items():
        last.heard(name, peer.record())
    last.present([])
    assert last.difference() is None


def test_who_goes_back_to_an_earlier_step_of_another_lineage_still_compares() -> None:
    peers = swarm("cpu", "cpu", "cpu")
    for epoch in range(2, 2 * REMEMBERED + 4, 2):
        compare(peers, epoch, 1.0, 1.0, 1.0)
    assert compare(peers, 200, 1.0, 1.0, 2.0)[2] is not None
    back = head(6, b"another")
    for peer, value in zip(peers.values(), (1.0, 1.0, 3.0), strict=True):
        assert peer.due(back)
        peer.note(back, [torch.tensor(value)])
        assert not peer.due(back)
    for name, peer in peers.items():
        for other in peers.values():
            other.heard(name, peer.record())
    found = [peer.difference() for peer in peers.values()]
    assert found == [None, None, Difference(6, frozenset({"p0", "p1"}), like=True)]


def test_nothing_is_told_twice_when_others_come() -> None:
    peers = swarm(*["cpu"] * 5)
    different = peers["p4"]
    assert compare(peers, 2, 1.0, 1.0, 1.0, 1.0, 2.0)[-1] is not None
    for name, value in (("p0", 1.0), ("p1", 1.0), ("p2", 1.0), ("p4", 2.0)):
        peers[name].note(head(4), [torch.tensor(value)])
        different.heard(name, peers[name].record())
    assert different.difference() is not None
    different.heard("p5", Agreement("p5", "cpu", 2).record())  # three of six are not most any more, four are
    assert different.difference() is None


def test_of_two_exactly_one_gives_way() -> None:
    found = compare(swarm("cpu", "cpu"), 2, 1.0, 2.0)
    assert sorted(one is None for one in found) == [False, True]


def test_nobody_judges_before_most_have_spoken() -> None:
    """Else a sound peer that hears the changed one first would take its state."""
    peers = swarm("cpu", "cpu", "cpu")
    assert compare(peers, 2, 1.0, 1.0, 1.0) == [None] * 3
    sound, other, changed = peers.values()
    for peer, value in ((sound, 1.0), (changed, 2.0)):
        peer.note(head(4), [torch.tensor(value)])
    sound.heard("p2", changed.record())
    assert sound.difference() is None
    sound.present(["p2"])  # the third has left: these are all
    assert (sound.difference() is None) != (_told(changed, sound) is None)
    assert other.difference() is None


def _told(peer: Agreement, other: Agreement) -> Difference | None:
    peer.heard("p0", other.record())
    peer.present(["p0"])
    return peer.difference()


def test_other_lineages_and_other_steps_are_no_difference() -> None:
    peer, other = swarm("cpu", "cpu").values()
    peer.note(head(2), [torch.zeros(1)])
    for place in (head(2, b"other"), head(4)):
        other.note(place, [torch.ones(1)])
        peer.heard("p1", other.record())
    assert peer.difference() is None


def test_compared_every_so_many_steps_and_noted_once() -> None:
    (peer,) = swarm("cpu").values()
    assert [epoch for epoch in range(7) if peer.due(head(epoch))] == [2, 4, 6]
    peer.note(head(4), [torch.zeros(1)])
    assert not peer.due(head(4))


def test_what_is_no_record_is_passed_over_and_memory_is_bounded() -> None:
    peer = Agreement("me", "cpu", 1)
    peer.note(head(1), [torch.zeros(1)])
    good = [1, b"one", bytes(16)]
    bad: list[Any] = [None, 3, [], good[:2], ["1", *good[1:]], [1, "one", bytes(16)], [1, b"one", bytes(99)]]
    for value in [None, 3, [], ["x" * 200, [good]], ["cpu", 3], ["cpu", bad], ["cpu", [[1, b"o" * 100, bytes(16)]]]]:
        peer.heard("other", value)
    assert peer.difference() is None
    for epoch in range(1000):
        peer.heard("other", ["cpu", [[epoch, b"one", bytes(16)]] * 1000])
    assert len(peer._found) <= REMEMBERED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_digest_tells_the_last_bit(dtype: torch.dtype) -> None:
    one, other = torch.ones(1000, dtype=dtype), torch.ones(1000, dtype=dtype)
    assert digest_of_tensors([one, torch.empty(0)]) == digest_of_tensors([other, torch.empty(0)])
    other[999] += torch.finfo(dtype).eps
    assert digest_of_tensors([one]) != digest_of_tensors([other])


def test_a_kind_is_whatever_the_last_bits_depend_on() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    plain, fused = (torch.optim.AdamW(parameters, fused=one) for one in (None, True))
    training = training_of(plain)
    kinds = [kind_of(training, plain), kind_of(training, fused), kind_of(replace(training, steps_by="other"), plain)]
    assert len(set(kinds)) == 3
    assert all("torch" in one for one in kinds)
    assert kind_of(training, torch.optim.AdamW(parameters)) == kinds[0]
