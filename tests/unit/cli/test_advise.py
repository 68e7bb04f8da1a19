"""``lightning-hivemind advise``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lightning_hivemind
from lightning_hivemind.cli import main

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.example_input_array = torch.zeros(4, 8)
        self.first, self.second = torch.nn.Linear(8, width), torch.nn.Linear(width, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "advised_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_it_says_what_to_write_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "advised_model:Net", "--line", "100"]) == 0
    said = capsys.readouterr().out
    assert "706 values" in said
    assert "auto, 1 device" in said
    assert "HivemindStrategy(target_batch_size=32)" in said
    assert "Gradients are averaged" in said


def test_what_it_writes_is_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    """Over slow lines, too, and for a machine that is not here."""
    machine = ["--devices", "8", "--device-memory", "24", "--device-tflops", "100", "--host-memory", "500"]
    for width in ("64", "2000000", "200000000"):
        for mbit in ("10000", "100", "1"):
            arguments = ["--arguments", json.dumps({"width": int(width)}), "--line", mbit]
            assert main(["advise", "advised_model:Net", *machine, *arguments]) == 0
            (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("HivemindStrategy(")]
            names: dict[str, Any] = {name: getattr(lightning_hivemind, name) for name in lightning_hivemind.__all__}
            strategy = eval(line.replace("HivemindStrategy(", "HivemindStrategy(initial_peers=[], "), names)
            assert strategy.arguments.target_batch_size >= 32


def test_a_program_may_ask_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "advised_model:Net", "--line", "100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["parameters"] == 706
    assert told["advice"]["way"]["name"] == "auto"


def test_what_fits_in_no_way_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--arguments", '{"width": 10000000000}']
    assert main(["advise", "advised_model:Net", "--line", "100", *large]) == 1
    assert "fits in no way" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say which model"),
        (["advised_model:Net"], "--line MBIT, or --measure"),
        (["advised_model:Net", "--line", "-1"], "--line=-1.0: give a number above 0"),
        (["advised_model:Net", "--line", "9", "--peers", "1"], "--peers=1: give 2 or more"),
        (["advised_model:Net", "--measure", "somewhere"], "give HOST:PORT"),
        (["advised_model:Not", "--line", "9"], "cannot be had"),
        (["--listen", "99999"], "--listen=99999"),
    ],
)
def test_what_is_wrong_is_said_with_the_fix(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *arguments]) == 2
    assert says in capsys.readouterr().err
