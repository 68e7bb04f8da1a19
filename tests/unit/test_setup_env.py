"""When the environment of the Makefile is made, when it is kept. What pip does is shown by ``make test``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_env.py"


class Machine:
    """One on which things fail when told to; ``done`` is what was done to the environment."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.done, self.fails = module, list[str](), ""
        monkeypatch.setattr(module, "make_venv", self.make)
        monkeypatch.setattr(module, "install_torch", lambda python: self.step("torch", module.NoTorchError("none")))
        monkeypatch.setattr(module, "pip", lambda *_: self.step("package", KeyboardInterrupt()))

    def make(self, venv: Path) -> None:
        self.done.append("made")
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()

    def step(self, name: str, error: BaseException) -> None:
        if self.fails == name:
            raise error
        self.done.append(name)

    def prepare(self, venv: Path, fails: str = "") -> list[str]:
        """What was done this time."""
        self.done.clear()
        self.fails = fails
        try:
            self.module.prepare(venv, {"test"})
        except (self.module.NoTorchError, KeyboardInterrupt):
            assert fails
        return list(self.done)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Machine(module, monkeypatch)


def test_an_environment_is_made_once(machine: Machine, tmp_path: Path) -> None:
    assert machine.prepare(tmp_path / "venv") == ["made", "torch", "package"]
    assert machine.prepare(tmp_path / "venv") == []


def test_a_torch_that_the_user_installs_as_told_is_kept(machine: Machine, tmp_path: Path) -> None:
    assert machine.prepare(tmp_path / "venv", fails="torch") == ["made"]
    assert machine.prepare(tmp_path / "venv", fails="torch") == []
    assert machine.prepare(tmp_path / "venv") == ["torch", "package"]


def test_after_an_interrupted_installation_all_begins_anew(machine: Machine, tmp_path: Path) -> None:
    assert machine.prepare(tmp_path / "venv", fails="package") == ["made", "torch"]
    assert machine.prepare(tmp_path / "venv") == ["made", "torch", "package"]


def test_another_interpreter_needs_another_environment(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.prepare(tmp_path / "venv")
    monkeypatch.setattr(machine.module, "interpreter", lambda: "another")
    assert machine.prepare(tmp_path / "venv") == ["made", "torch", "package"]
