"""A peer of two ranks as a user starts it: Lightning itself starts the script again for rank 1, and watches it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from swarm.harness import CLEAN_S, START_S

pytestmark = pytest.mark.swarm
SCRIPT = Path(__file__).with_name("ranks_script.py")
#: two processes import torch and all else, while other tests do
COLD_S = 2 * START_S


@pytest.fixture
def engine() -> str:
    return "native"


class Script:
    def __init__(self, folder: Path, *arguments: str) -> None:
        self._path = folder / "output"
        environment = {name: value for name, value in os.environ.items() if "INITIAL_PEERS" not in name}
        with open(self._path, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self._path.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def wait(self) -> int:
        """Its exit status. If it does not end, the assertion says where its processes are."""
        try:
            return self.process.wait(COLD_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGUSR1)
            time.sleep(2)
            raise AssertionError(self.text) from None

    @property
    def is_gone(self) -> bool:
        """With all that it has started."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Script]:
    script = Script(folder, *arguments)
    try:
        yield script
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.process.pid, signal.SIGKILL)
        script.process.wait()


@pytest.mark.parametrize("how", ["Ctrl+C", "SIGTERM", "error"])
def test_however_it_ends_it_leaves_the_swarm_and_nothing_behind(tmp_path: Path, engine: str, how: str) -> None:
    """Lightning kills rank 0 once it finds that another one has failed: it must have left by then."""
    with started(tmp_path, *(["error"] if how == "error" else [])) as script:
        script.wait_until(lambda: "global step 5:" in script.text or script.process.poll() is not None, COLD_S)
        if how == "Ctrl+C":
            os.killpg(script.process.pid, signal.SIGINT)
        elif how == "SIGTERM":
            script.process.terminate()
        code = script.wait()
        script.wait_until(lambda: script.is_gone, CLEAN_S)
        assert "left the swarm at global step" in script.text
        if how == "error":
            assert code == 1
            assert "ValueError: induced failure at rank 1" in script.text  # rank 0 has gloo's, or ours
        else:
            assert "RanksError" not in script.text
