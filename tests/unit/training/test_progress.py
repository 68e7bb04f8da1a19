"""What Lightning's loops and bars say of a swarm's steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_hivemind.training.progress import LoopProgress


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
