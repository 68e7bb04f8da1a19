"""How a model is cut into chunks."""

from __future__ import annotations

import pytest

from lightning_hivemind.engine.native.layout import (
    CHUNK_ELEMENTS,
    LEAST_ELEMENTS,
    MOST_CHUNKS,
    ROUND,
    SHARED_BY,
    layout_of,
)
from lightning_hivemind.engine.native.wire.encoding import MAX_LIST


@pytest.mark.parametrize("elements", [0, 1, LEAST_ELEMENTS + 1, 220_000, 1_000_000, 5_000_000, 40 * CHUNK_ELEMENTS + 7])
def test_the_chunks_are_all_of_the_vector_once(elements: int) -> None:
    layout = layout_of(elements)
    ends = [0] + [span.stop for span in layout.spans]
    assert [span.start for span in layout.spans] == ends[:-1]
    assert ends[-1] == elements
    assert [layout.size(chunk) for chunk in range(layout.chunks)] == [span.stop - span.start for span in layout.spans]


@pytest.mark.parametrize(
    ("elements", "chunks"),
    [
        (10, 1),
        (LEAST_ELEMENTS, 1),
        (220_000, 14),
        (524_289, 26),
        (1_000_000, 31),
        (5_000_000, 32),
        (SHARED_BY * CHUNK_ELEMENTS, SHARED_BY),
        (100_000_000, 96),
    ],
)
def test_many_peers_can_share_the_reducing_also_of_a_small_model(elements: int, chunks: int) -> None:
    layout = layout_of(elements)
    assert layout.chunks == chunks
    assert LEAST_ELEMENTS <= layout.chunk_elements <= CHUNK_ELEMENTS


def test_a_model_of_any_size_has_chunks_that_a_message_can_list() -> None:
    layout = layout_of(10**12)
    assert layout.chunks <= MOST_CHUNKS < MAX_LIST
    assert layout.chunk_elements % ROUND == 0
