"""A state in ranges: every byte in one, each with a digest, what is a peer's own apart from what all have."""

from __future__ import annotations

import pytest
import torch

from lightning_hivemind.engine.native.state.content import Content
from lightning_hivemind.engine.native.state.ranges import RANGE_BYTES, RangePace, digest_of, digest_of_shared, spans

SIZES = [0, 1, RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, 3 * RANGE_BYTES]


@pytest.mark.parametrize("own", SIZES)
@pytest.mark.parametrize("shared", SIZES)
def test_ranges_cover_a_state_without_gap_or_overlap(shared: int, own: int) -> None:
    places = spans(shared, shared + own)
    assert [byte for place in places for byte in (place.start, place.stop)] == sorted(
        2 * [place.stop for place in places[:-1]] + ([0, shared + own] if places else [])
    )
    assert all(0 < place.stop - place.start <= RANGE_BYTES for place in places)
    assert not any(place.start < shared < place.stop for place in places), "a range is of both"


def test_every_byte_is_in_the_digest_of_its_range_and_what_is_shared_in_the_whole() -> None:
    memory = torch.arange(251, dtype=torch.uint8).repeat(3 * RANGE_BYTES // 251)
    shared, places = 2 * RANGE_BYTES, spans(2 * RANGE_BYTES, memory.numel())
    before = Content.of(memory).describe(places)
    assert before is not None
    assert before[0] == digest_of(bytes(memory[:RANGE_BYTES].numpy()))
    for place in (0, shared - 1, shared, memory.numel() - 1):
        changed = memory.clone()
        changed[place] += 1
        after = Content.of(changed).describe(places)
        touched = [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
        assert touched == [place // RANGE_BYTES]
        same = digest_of_shared(before, places, shared) == digest_of_shared(after, places, shared)
        assert same == (place >= shared)


def test_the_pace_is_that_of_the_slower_of_the_mean_and_now() -> None:
    pace = RangePace(100.0)
    assert pace.range_s(0, 100.5) == 0.5
    assert pace.range_s(4, 102.0) == 0.5
    assert pace.range_s(4, 105.0) == 3.0, "nothing has come since"
    assert pace.range_s(5, 106.0) == 1.2
