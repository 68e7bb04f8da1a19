"""Whom a peer waits for at the end of an epoch."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.stock.epoch import EpochRounds
from lightning_hivemind.engine.stock.rounds import RoundResult
from lightning_hivemind.events import EventBus


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
