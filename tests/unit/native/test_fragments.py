"""Each value is in one fragment, or in two where they would be of unlike length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hivemind.engine.native.fragments import Fragments
from lightning_hivemind.engine.native.outer import OuterStep
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.outer import DiLoCo, StreamingDiLoCo


@pytest.mark.parametrize("sizes", [[5, 0, 7, 1], [9], [3, 4], [1] * 8, [100, 1], [1000]], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_after_a_turn_each_value_had_a_round(sizes: list[int], count: int) -> None:
    fragments, seen = Fragments(sizes, count), [torch.zeros(size, dtype=torch.int64) for size in sizes]
    for epoch in range(10 * count, 11 * count):
        pieces = fragments.of(epoch)
        assert [sum(piece.elements for piece in pieces)] == fragments.sizes
        assert pieces == fragments.of(epoch + count)
        for piece in pieces:
            piece.of(seen[piece.place]).add_(1)
    all_seen = torch.cat(seen)
    assert set(all_seen.tolist()) <= {1, 2}
    assert all_seen.sum() - sum(sizes) < count, "they overlap by more than evens them out"


@pytest.mark.parametrize(("values", "count"), [(9, 8), (100, 64), (393, 393)])
def test_no_value_has_more_rounds_than_another_but_for_one(values: int, count: int) -> None:
    fragments, seen = Fragments([values], count), torch.zeros(values, dtype=torch.int64)
    for epoch in range(count):
        for piece in fragments.of(epoch):
            piece.of(seen).add_(1)
    assert set(seen.tolist()) <= {1, 2}


def test_more_fragments_than_values_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"fragments=14\): this model has 13 values"):
        Fragments([5, 0, 7, 1], 14)


def test_one_is_the_tensors_as_they_are() -> None:
    fragments = Fragments([5, 0, 7])
    assert fragments.sizes == [5, 0, 7]
    assert [(one.place, one.begin, one.end) for one in fragments.of(3)] == [(0, 0, 5), (1, 0, 0), (2, 0, 7)]


def statistics_of(tensors: list[torch.Tensor]) -> Statistics:
    """The first of them are in fragments, the last is averaged in every round."""
    outer = OuterStep(StreamingDiLoCo(0.5, 0.0, nesterov=False, fragments=2), tensors[:-1])
    return Statistics(tensors, carries=True, outer=outer)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
def test_a_round_moves_its_fragment_and_what_has_none(form: torch.memory_format) -> None:
    weight = torch.zeros(2, 3, 2, 1).to(memory_format=form)
    bias, buffer = torch.zeros(4), torch.zeros(1)
    statistics = statistics_of([weight, bias, buffer])
    for tensor in (weight, bias, buffer):
        tensor.add_(1.0)
    given = statistics.changes(0)
    assert given.tolist() == [1.0] * 9, "of 16 values in two fragments, and the buffer"
    weight.add_(0.25)  # while the round is under way
    statistics.step(torch.full((9,), 3.0), 1, given)
    statistics.publish()
    assert weight.flatten().tolist() == [1.75] * 8 + [1.25] * 4, "half of 3, and what came since; the rest as it was"
    assert bias.tolist() == [1.0] * 4
    assert buffer.tolist() == [3.0]
    assert statistics.base[0].flatten().tolist() == [1.5] * 8 + [0.0] * 4
    assert statistics.changes(1).tolist() == [1.25] * 4 + [1.0] * 4 + [0.0]


def test_what_this_peer_has_not_given_stays_for_the_next_round_of_that_fragment() -> None:
    weight, buffer = torch.zeros(4), torch.zeros(1)
    statistics = statistics_of([weight, buffer])
    weight.add_(1.0)
    statistics.step(torch.tensor([2.0, 2.0, 0.0]), 1)  # without this peer
    statistics.publish()
    assert weight.tolist() == [2.0, 2.0, 1.0, 1.0]
    statistics.step(torch.tensor([0.0, 0.0, 0.0]), 2)
    statistics.publish()
    assert statistics.changes(2).tolist() == [1.0, 1.0, 0.0]


def test_whoever_takes_a_state_begins_with_what_all_have() -> None:
    weight, buffer = torch.zeros(4), torch.zeros(1)
    statistics = statistics_of([weight, buffer])
    weight.add_(1.0)
    for base in statistics.base:
        base.fill_(7.0)
    statistics.adopted(5)
    statistics.publish()
    assert weight.tolist() == [7.0] * 4
    assert statistics.changes(5).tolist() == [0.0] * 3


@pytest.mark.parametrize("fragments", [1, 0, -2, True, 2.0, "4"])
def test_impossible_fragments_are_refused(fragments: object) -> None:
    with pytest.raises(ArgumentError, match=r"StreamingDiLoCo\(fragments="):
        StreamingDiLoCo(fragments=fragments)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    outer = StreamingDiLoCo(lr=np.float32(0.5), fragments=np.int64(4))  # type: ignore[arg-type]
    assert (type(outer.lr), type(outer.fragments), outer.fragments) == (float, int, 4)


def test_a_rate_that_is_no_float_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"DiLoCo\(lr=1000"):
        DiLoCo(lr=10**400)


def test_its_outer_step_is_checked_like_the_others() -> None:
    with pytest.raises(ArgumentError, match=r"StreamingDiLoCo\(lr=0\)"):
        StreamingDiLoCo(lr=0)
