"""Pieces of parameters to rank 0 and back: two processes, gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hivemind.peer import pieces
from lightning_hivemind.peer.pieces import Piece, Pieces, interval
from unit.two_ranks import Told, of_both

#: by rank, of each of the parameters below: rows, an interval across rows, nothing at one of them, and all at both
MINE = [
    [Piece((5, 3), ((0, 3), (0, 3))), interval(15, 0, 7), interval(4, 0, 4), interval(4, 0, 4)],
    [Piece((5, 3), ((3, 5), (0, 3))), interval(15, 7, 15), interval(4, 4, 4), interval(4, 0, 4)],
]
SHAPES = [(5, 3), (5, 3), (4,), (2, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float64]


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = zip(SHAPES, DTYPES, strict=True)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in made]


def there_and_back(rank: int, group: Any) -> Any:
    pieces.MESSAGE_BYTES = 64  # several messages
    ranks: Any = Told(rank)
    all_of_it, mine = Pieces(ranks, MINE[rank], None), MINE[rank]
    parts = [piece.of(one).clone() for piece, one in zip(mine, values(), strict=True)]
    whole = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)] if not rank else []
    all_of_it.gather(range(4), parts, DTYPES, whole)
    gathered = [one.clone() for one in whole]
    back = [torch.zeros_like(one) for one in parts]
    which = [3, 1]  # some of them, in any order
    doubled = [2 * whole[n] for n in which] if not rank else []
    all_of_it.spread(which, [back[n] for n in which], [DTYPES[n] for n in which], doubled)
    return gathered, parts, back


def test_what_all_ranks_have_is_whole_at_rank_0_and_comes_back() -> None:
    (gathered, *first), (nothing, *second) = of_both(there_and_back)
    assert nothing == []
    for found, expected in zip(gathered, values(), strict=True):
        assert torch.equal(found, expected)
    for parts, back in (first, second):
        assert torch.equal(back[1], 2 * parts[1])
        assert torch.equal(back[3], 2 * parts[3])
        assert not back[0].any()


def test_of_pieces_that_several_ranks_have_one_goes_to_rank_0() -> None:
    ranks: Any = SimpleNamespace(share=lambda what, value: [value, value], rank=1, size=2, leads=False)
    assert not any(Pieces(ranks, [interval(4, 0, 4)], None)._messages(1, [0], [torch.float32], every=False))


@pytest.mark.parametrize(("begin", "end", "expected"), [(0, 3, (0, 3)), (3, 9, (3, 5)), (7, 9, (5, 5))])
def test_an_interval_ends_with_its_parameter(begin: int, end: int, expected: tuple[int, int]) -> None:
    """What is behind is padding."""
    assert interval(5, begin, end).box == (expected,)
