"""Ranks of a peer sum their parts of gradients: the sum is given once it was gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.sums import Summing, add


class Ranks:
    """One, that has all of it, and notes what it is asked for."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums = [torch.full_like(one, float("nan")) for one in parameters]
        self._reached = [False] * len(parameters)
        self.gathered = 0
        self.meanwhile: Any = lambda: None

    def add(self, factor: float, *, first: bool) -> None:
        for number, one in enumerate(self._parameters):
            add(one.grad, factor, self._sums[number], first=first)
            self._reached[number] = one.grad is not None or (self._reached[number] and not first)

    def gather(self, whole: Sequence[Tensor]) -> list[bool]:
        self.gathered += 1
        self.meanwhile()
        for one, part in zip(whole, self._sums, strict=True):
            one.copy_(part)
        return list(self._reached)


class Peers:
    """One whose ranks sum, and a plain one that has the same batches."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.parameters = [torch.zeros(3, 2, requires_grad=True), torch.zeros(4, requires_grad=True)]
        self.ranks = Ranks(self.parameters)
        given: Any = "me", self.parameters, Statistics([])
        self.parts = Gradients(*given, max_staleness=1, summing=Summing(ranks=self.ranks))
        self.plain = Gradients(*given, max_staleness=1)

    def batch(self, samples: int, *, reaches: int = 2, epoch: int = 0) -> None:
        for number, one in enumerate(self.parameters):
            one.grad = torch.randn_like(one) if number < reaches else None
        for gradients in (self.parts, self.plain):
            assert gradients.add(samples, epoch) == 0

    def assert_equal(self) -> None:
        mine, plain = self.parts.give(), self.plain.give()
        assert mine is not None
        assert plain is not None
        assert mine[0].samples == plain[0].samples
        assert torch.equal(mine[1], plain[1])


def test_nothing_is_given_before_it_was_gathered() -> None:
    peers = Peers()
    peers.batch(8)
    assert peers.parts.is_stale()
    assert peers.parts.samples == peers.parts.ready == 8, "it counts towards the target"
    assert peers.parts.give() is None
    peers.parts.gather()
    assert not peers.parts.is_stale()
    peers.assert_equal()


def test_what_nobody_gathers_now_is_not_counted_for_it_cannot_be_given() -> None:
    peers = Peers()
    peers.batch(8)
    peers.parts.away = True
    assert (peers.parts.samples, peers.parts.ready) == (8, 0)
    peers.parts.away = False
    peers.parts.gather()
    peers.parts.away = True
    assert peers.parts.ready == 8


def test_several_batches_are_gathered_once_with_the_bits_of_a_peer_that_has_them_whole() -> None:
    peers = Peers()
    for sizes in ((8, 8, 8, 8), (8, 8, 8, 8), (3, 5, 6), (7,)):
        for number, samples in enumerate(sizes):
            peers.batch(samples, reaches=1 if number == 0 else 2)
        peers.parts.gather()
        peers.assert_equal()
        for gradients in (peers.parts, peers.plain):
            gradients.refused()
    assert peers.ranks.gathered == 4


def test_a_batch_after_it_was_gathered_is_gathered_with_the_others() -> None:
    peers = Peers()
    peers.batch(8)
    peers.parts.gather()
    peers.batch(4)
    assert peers.parts.is_stale()
    assert peers.parts.give() is None
    peers.parts.gather()
    peers.parts.gather()
    assert peers.ranks.gathered == 2, "the second one found nothing new"
    peers.assert_equal()


def test_what_came_back_from_a_round_is_given_while_the_sum_is_elsewhere() -> None:
    peers = Peers()
    peers.batch(8)
    peers.parts.gather()
    peers.assert_equal()
    for gradients in (peers.parts, peers.plain):
        gradients.returned()
    peers.batch(4)
    found = peers.parts.give()
    assert found is not None
    assert found[0].samples == 8
    peers.parts.returned()
    peers.parts.gather()
    peers.assert_equal()


@pytest.mark.parametrize("forget", ["discard", "moved"])
def test_what_was_forgotten_while_it_was_gathered_is_not_given(forget: str) -> None:
    peers = Peers()
    peers.batch(8)
    peers.ranks.meanwhile = lambda: peers.parts.discard() if forget == "discard" else peers.parts.moved(3)
    peers.parts.gather()
    assert peers.parts.samples == 0
    assert peers.parts.give() is None
    peers.plain.discard()
    peers.plain.moved(3)
    for samples in (2, 5):
        peers.batch(samples, epoch=3)
    peers.ranks.meanwhile = lambda: None
    peers.parts.gather()
    peers.assert_equal()


def test_what_is_too_old_is_dropped_where_it_lies() -> None:
    peers = Peers()
    peers.batch(8)
    assert peers.parts.committed([], 2) == 8
    assert not peers.parts.is_stale()
    assert peers.parts.samples == 0
