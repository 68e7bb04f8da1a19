"""What Lightning's loops and bars say of a swarm's steps."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning_utilities.core import rank_zero

from lightning_hivemind.training.progress import LoopProgress, StopTogether


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_bar_counts_the_batches_of_a_pass_however_few_steps_are_left(kind: Any, tmp_path: Path) -> None:
    bar: ProgressBar = kind()
    trainer = pl.Trainer(callbacks=[bar], max_steps=10, max_epochs=-1, logger=False, default_root_dir=tmp_path)
    fitting = SimpleNamespace(max_epochs=-1, max_steps=10, global_step=4, num_training_batches=128)
    bar.__dict__["_trainer"] = fitting
    assert bar.total_train_batches == 6, "Lightning takes each batch for a step"
    progress = LoopProgress(trainer)
    progress.attach()
    assert bar.total_train_batches == 128
    assert isinstance(bar, kind)
    progress.detach()
    progress.detach()
    assert type(bar) is kind
    assert bar.total_train_batches == 6


def test_without_a_bar_nothing_is_wanted(tmp_path: Path) -> None:
    trainer = pl.Trainer(enable_progress_bar=False, logger=False, default_root_dir=tmp_path)
    progress = LoopProgress(trainer)
    progress.attach()
    progress.detach()


@pytest.mark.parametrize(("given", "said"), [(None, False), (9, True)])
def test_limits_that_nobody_gave_are_not_told(
    given: int | None, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While others are there, Lightning is held by its own ``min_steps`` until the next global step."""
    trainer = pl.Trainer(min_steps=given, max_steps=20, logger=False, default_root_dir=tmp_path)
    trainer.should_stop = True
    stopping = StopTogether(trainer)
    stopping.hold(4, alone=False)
    stopping.hold(5, alone=False)
    with caplog.at_level(logging.INFO):
        assert not trainer.fit_loop.epoch_loop.done
        assert any("was signaled to stop but" in text for text in caplog.messages) == said
        rank_zero.rank_zero_info("something else")
        assert "something else" in caplog.messages
    stopping.release()
    assert not rank_zero.log.filters
