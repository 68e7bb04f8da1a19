"""``lightning-hivemind collate``: what it refuses. (What it makes is seen in ``tests/swarm/test_in_parts.py``.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hivemind.cli import main


def test_what_nobody_saved_so_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collate", str(tmp_path), str(tmp_path / "whole.ckpt")]) == 2
    assert "is no directory that FSDP2, FSDP or DeepSpeed have saved" in capsys.readouterr().err
    assert not (tmp_path / "whole.ckpt").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "whole.ckpt"
    file.write_text("mine")
    assert main(["collate", str(tmp_path), str(file)]) == 2
    assert "exists" in capsys.readouterr().err
    assert file.read_text() == "mine"
