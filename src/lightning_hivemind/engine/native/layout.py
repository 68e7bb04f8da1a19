"""How the flat vector of a model is cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass

#: 4 MiB of float32: large enough that frames cost nothing, small enough that sending and reducing overlap
CHUNK_ELEMENTS = 1 << 20
#: of a small model less, so that many peers can share the reducing: else all lines would wait for that of one
SHARED_BY = 32
#: but not so little that messages would be what it costs
LEAST_ELEMENTS = 1 << 14
#: whole blocks of all codecs
ROUND = 4096
#: so many at most, however large the model is: messages list them
MOST_CHUNKS = 1 << 13


def layout_of(elements: int) -> Layout:
    """That all peers of a model of so many values have."""
    share, least = (-(-elements // (count * ROUND)) * ROUND for count in (SHARED_BY, MOST_CHUNKS))
    return Layout(elements, max(least, min(CHUNK_ELEMENTS, max(LEAST_ELEMENTS, share))))


@dataclass(frozen=True, slots=True)
class Layout:
    """``elements`` values in chunks of ``chunk_elements``, of which the last may be smaller."""

    elements: int
    chunk_elements: int

    @property
    def chunks(self) -> int:
        return max(1, -(-self.elements // self.chunk_elements))

    def span(self, chunk: int) -> slice:
        """Where it lies in the vector."""
        start = chunk * self.chunk_elements
        return slice(start, min(start + self.chunk_elements, self.elements))

    @property
    def spans(self) -> list[slice]:
        """Of all chunks."""
        return [self.span(chunk) for chunk in range(self.chunks)]

    def size(self, chunk: int) -> int:
        """Elements of a chunk."""
        return min(self.chunk_elements, self.elements - chunk * self.chunk_elements)
