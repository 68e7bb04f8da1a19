"""What a user reads without asking for more."""

from __future__ import annotations

import io
import logging

import pytest
from tqdm import tqdm

from lightning_hivemind import events, subscribers


def test_drops_of_one_reason_do_not_hide_the_first_of_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscribers.log, "propagate", True)
    subscriber = subscribers.LogSubscriber(verbose=False)
    with caplog.at_level(logging.INFO, logger="lightning_hivemind"):
        for reason in [*["left out"] * 6, "not finite"]:
            subscriber(events.BatchDropped(epoch=1, samples=8, reason=reason))
    assert ["left out" in text for text in caplog.messages] == [True, True, True, False]


def committed(epoch: int) -> events.EpochCommitted:
    return events.EpochCommitted(epoch=epoch, samples=8, contributors=2, fraction=1.0, duration_s=0.1)


@pytest.mark.parametrize(("verbose", "said"), [(False, [1, 3]), (True, [1, 2, 3])])
def test_a_global_step_is_written_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, verbose: bool, said: list[int]
) -> None:
    now = 100.0
    monkeypatch.setattr(subscribers.time, "monotonic", lambda: now)
    monkeypatch.setattr(subscribers.log, "propagate", True)
    subscriber = subscribers.LogSubscriber(verbose=verbose)
    with caplog.at_level(logging.INFO, logger="lightning_hivemind"):
        subscriber(committed(1))
        subscriber(committed(2))
        now += subscribers.PROGRESS_EVERY_S
        subscriber(committed(3))
    assert [text.split(":")[0] for text in caplog.messages] == [f"global step {epoch}" for epoch in said]


def test_a_line_of_the_log_does_not_end_in_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(subscribers.log, "handlers", [])
    monkeypatch.setattr(subscribers.log, "propagate", False)
    monkeypatch.setattr(subscribers.log, "level", logging.NOTSET)
    monkeypatch.setattr("sys.stderr", out)
    subscribers.make_log_visible()
    with tqdm(total=4, file=out, desc="pass") as bar:
        bar.update(1)
        subscribers.log.info("a peer came")
        bar.refresh()
    subscribers.log.info("it went")
    lines = [line.rsplit("\r", 1)[-1] for line in out.getvalue().split("\n")]
    assert "[swarm] a peer came" in lines
    assert lines[-2:] == ["[swarm] it went", ""]
