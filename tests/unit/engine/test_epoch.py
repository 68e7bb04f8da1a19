"""Whom a peer waits for at the end of an epoch."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.stock import epoch as epoch_module
from lightning_hivemind.engine.stock.epoch import EpochRounds
from lightning_hivemind.engine.stock.rounds import RoundResult
from lightning_hivemind.events import EventBus, RoundIncomplete


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("members", [{b"me", b"other"}, set()])
def test_with_local_updates_who_was_in_the_last_round_is_waited_for_though_its_report_is_old(
    members: set[bytes], delayed: bool
) -> None:
    arguments = Arguments(
        target_batch_size=32, engine="hivemind", use_local_updates=True, delay_state_averaging=delayed
    )
    tracker = SimpleNamespace(
        refresh=lambda *_: None,
        others_since=lambda epoch: {b"other"},
        others_at=lambda *epochs: {b"other"} if 0 in epochs else set(),  # as it said two seconds ago
        others_heard_within=lambda age_s: set(),
        global_epoch=1,
    )
    state = SimpleNamespace(local_epoch=1, step=lambda **_: None, guard=SimpleNamespace(check=lambda: None))
    parts: Any = SimpleNamespace(tracker=tracker, state=state, grads=None)
    records: Any = SimpleNamespace(trainers=set())
    training: Any = SimpleNamespace(should_abort=lambda: False)
    rounds = EpochRounds(arguments, parts, records, training, EventBus())
    watched: Future[RoundResult] = Future()
    watched.set_result(RoundResult(fraction=1.0 if members else 0.0, members=frozenset(members)))
    if delayed:
        rounds._background_state = (watched, 1, 1)
        rounds.apply_finished()
    else:
        rounds._judge_state_round(watched, 1, 1)
    assert rounds._expected_others() == members - {b"me"}


ALL = frozenset({b"me", b"one", b"other"})


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (RoundResult(fraction=1.0, members=ALL), []),
        (RoundResult(fraction=0.5, members=ALL), [(0.5, 3, "stepped on what arrived")]),
        (RoundResult(fraction=0.997, members=ALL), [(0.997, 3, "stepped on what arrived")]),
        (RoundResult(fraction=1.0, members=ALL - {b"other"}), [(1.0, 2, "stepped with them")]),
    ],
)
def test_gradients_that_did_not_arrive_whole_are_told_with_the_share_that_did(
    result: RoundResult, told: list[tuple[float, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever hivemind says of its success."""
    monkeypatch.setattr(epoch_module, "await_round", lambda *_, **__: result)
    parts: Any = SimpleNamespace(tracker=None, state=SimpleNamespace(), grads=SimpleNamespace())
    training: Any = SimpleNamespace(should_abort=lambda: False)
    events = EventBus()
    heard: list[Any] = []
    events.subscribe(heard.append)
    records: Any = SimpleNamespace(trainers=set())
    rounds = EpochRounds(Arguments(target_batch_size=32, engine="hivemind"), parts, records, training, events)
    monkeypatch.setattr(rounds, "_use_gradients", lambda: None)
    control: Any = None
    assert rounds._finish_gradients(control, 7, 2, backup=None) is result
    assert all(isinstance(one, RoundIncomplete) and one.expected == 3 and one.epoch == 7 for one in heard)
    assert [(one.fraction, one.contributors, one.action) for one in heard] == told
