"""What a donor gives: the model's own bytes while they stay as they are, and the same ones afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.state import content as content_module
from lightning_hivemind.engine.native.state.content import Content, Piece

#: of bytes: dtype, count, where they begin
LAYOUT = [
    (torch.float32, 100, 0),
    (torch.float32, 0, 448),
    (torch.bool, 3, 448),
    (torch.complex64, 5, 512),
    (torch.bfloat16, 700, 576),
    (torch.int64, 1, 1984),
]
SIZE = 2048


def pieces() -> list[Piece]:
    torch.manual_seed(1)
    made = [(torch.randn(count).mul(9).to(dtype), offset) for dtype, count, offset in LAYOUT]
    made[-1] = made[-1][0].reshape(()), made[-1][1]
    return [Piece(source, offset) for source, offset in made]


def all_bytes(given: list[Piece]) -> bytes:
    whole = bytearray(SIZE)
    for piece in given:
        whole[piece.offset : piece.end] = bytes(piece.source.reshape(-1).view(torch.uint8).numpy())
    return bytes(whole)


@pytest.fixture(autouse=True)
def memory_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "bytes", lambda _, count: torch.full((count,), 7, dtype=torch.uint8))


@pytest.mark.parametrize("step", [1, 63, 64, 300, 1000, SIZE])
def test_every_range_is_what_lies_there_with_zeros_between(step: int) -> None:
    given = pieces()
    content, expected = Content(given, SIZE), all_bytes(given)
    for begin in range(0, SIZE, step):
        place = slice(begin, min(begin + step, SIZE))
        found = content.read(place)
        assert found is not None
        assert bytes(found) == expected[place]
    copy = content.copy()
    assert copy is not None
    assert bytes(copy.numpy()) == expected


@pytest.mark.parametrize("early", [True, False], ids=["copied before", "copied then"])
def test_what_somebody_wants_outlives_a_step(early: bool) -> None:
    given = pieces()
    content, expected = Content(given, SIZE), all_bytes(given)
    before = content.read(slice(0, 64))
    if early:
        content.copy()
    assert content.is_at_risk is not early
    content.change()
    given[0].source.fill_(0.0)
    for place in (slice(0, 64), slice(0, SIZE)):
        found = content.read(place)
        assert found is not None
        assert bytes(found) == expected[place]
    assert before is not None
    assert bytes(before) == expected[:64], "it is being sent"
    assert not content.is_at_risk


def test_what_nobody_wants_is_gone_and_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    content = Content(pieces(), SIZE)
    content.wanted = False
    monkeypatch.setattr(Memory, "bytes", lambda *_: pytest.fail("memory for a copy"))
    content.change()
    assert content.gone
    assert content.read(slice(0, 64)) is None
    assert content.copy() is None


def test_without_memory_it_is_gone_and_the_step_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object) -> torch.Tensor:
        raise MemoryError

    content = Content(pieces(), SIZE)
    monkeypatch.setattr(Memory, "bytes", none_left)
    content.change()
    assert content.gone
    assert "has to begin anew" in caplog.text


def test_a_step_does_not_wait_for_memory_that_is_being_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    given, preparing, go_on = pieces(), threading.Event(), threading.Event()
    content, expected = Content(given, SIZE), all_bytes(given)

    def slow(_: torch.Tensor) -> None:
        preparing.set()
        assert go_on.wait(10)

    monkeypatch.setattr(content_module, "populate", slow)
    copied: list[torch.Tensor | None] = []
    thread = threading.Thread(target=lambda: copied.append(content.copy()))
    thread.start()
    assert preparing.wait(10)
    content.change()
    given[0].source.fill_(0.0)
    go_on.set()
    thread.join()
    assert copied[0] is not None
    assert bytes(copied[0].numpy()) == expected


PLACES = [slice(begin, begin + 512) for begin in range(0, SIZE, 512)]


def test_what_somebody_else_changes_meanwhile_is_not_given() -> None:
    """A hook that clamps weights after each batch, say."""
    given = pieces()
    content = Content(given, SIZE)
    assert content.describe(PLACES) is not None
    assert content.read(PLACES[0]) is not None
    given[0].source[3] += 1
    assert content.read(PLACES[1]) is not None
    assert not content.was_changed
    assert content.read(PLACES[0]) is None
    assert content.was_changed
    assert content.read(PLACES[1]) is None
    content.wanted = False
    content.change()
    assert content.was_changed, "whatever comes later"


def test_whoever_asks_again_and_again_makes_this_peer_hold_no_more_than_a_copy() -> None:
    content = Content(pieces(), SIZE)
    content.describe(PLACES)
    held = [content.read(place) for place in PLACES * 2]
    assert content.is_at_risk
    held += [content.read(place) for place in PLACES * 9]
    assert not content.is_at_risk
    copy = content.copy()
    assert copy is not None
    whole = copy.numpy()
    for data, place in zip(held, PLACES * 11, strict=True):
        assert data is not None
        assert bytes(data) == bytes(whole[place])


def test_whatever_goes_wrong_with_a_copy_the_step_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = Content(pieces(), SIZE)

    def fails(*_: object) -> None:
        raise RuntimeError("a tensor that is none")

    monkeypatch.setattr(content, "_write", fails)
    content.change()
    assert content.gone
    assert "has to begin anew" in caplog.text


def test_memory_stays_what_it_is() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    content = Content.of(memory)
    content.change()
    assert content.copy() is memory
    assert (content.size, content.gone, content.is_at_risk) == (100, False, False)
