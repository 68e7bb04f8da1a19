"""The example as a user runs it: a script, and the line that it prints, pasted elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarm.harness import CLEAN_S, START_S
from swarm.namespaces import joined_namespaces, why_unavailable

pytestmark = [pytest.mark.swarm, pytest.mark.above_engines]

ROOT = Path(__file__).resolve().parents[2]
#: these import torch and all else by themselves, while other tests do
COLD_S = 2 * START_S
SMALL = ["--batch-size", "4", "--target-batch-size", "16", "--no-progress", "--minutes", "10"]


class Terminal:
    """A shell with one command in it, whose events go to a file."""

    def __init__(self, folder: Path, name: str, command: list[str]) -> None:
        self._path, self._events = folder / name, folder / f"{name}.jsonl"
        environment = {name: value for name, value in os.environ.items() if "INITIAL_PEERS" not in name}
        environment["LIGHTNING_HIVEMIND_EVENTS"] = str(self._events)
        with open(self._path, "wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                # a shell starts background jobs, this test run perhaps among them, with SIGINT ignored
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
            )

    @property
    def text(self) -> str:
        return self._path.read_text(encoding="utf-8", errors="replace")

    def await_step(self, contributors: int, timeout_s: float) -> None:
        """Until it has made a global step with gradients of so many peers."""
        deadline = time.monotonic() + timeout_s
        while not any(one["contributors"] == contributors for one in self._commits()):
            assert self.process.poll() is None, f"it has ended:\n{self.text}"
            assert time.monotonic() < deadline, f"no step with {contributors} peers in {timeout_s:.0f} s:\n{self.text}"
            time.sleep(0.2)

    def _commits(self) -> list[dict[str, Any]]:
        lines = self._events.read_text(encoding="utf-8").splitlines() if self._events.exists() else []
        events = (json.loads(line) for line in lines if line.endswith("}"))
        return [one for one in events if one["event"] == "EpochCommitted"]

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    try:
        yield opened
    finally:
        for one in opened:
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


@contextmanager
def machines() -> Iterator[tuple[Callable[[list[str]], list[str]], Callable[[list[str]], list[str]]]]:
    """Two, each as what makes of a command one that runs there."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with joined_namespaces() as (here, there):
        yield (lambda command: here.command(*command)), (lambda command: there.command(*command))


def test_the_example_trains_with_whoever_pastes_the_line_that_it_prints(tmp_path: Path, engine: str) -> None:
    script = [sys.executable, "examples/byte_gpt.py", "--engine", engine, "--run-id", tmp_path.name, *SMALL]
    with machines() as (here, there), terminals() as opened:
        first = Terminal(tmp_path, "first", here(script))
        opened.append(first)
        first.await_step(1, COLD_S)
        (line,) = [line for line in first.text.splitlines() if line.startswith("INITIAL_PEERS=")]
        second = Terminal(tmp_path, "second", there(["bash", "-c", line]))
        opened.append(second)
        second.await_step(2, COLD_S)
        for one in opened:
            one.interrupt()
        for one in opened:
            one.process.wait(CLEAN_S)
            assert "left the swarm at global step" in one.text
            assert "Traceback" not in one.text
            assert "Detected call of `lr_scheduler.step()`" not in one.text
