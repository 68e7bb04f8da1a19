"""Runs ``network_peer.py`` in a process of its own and follows what it says."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from swarm.processes import descendants, state_of

FOLDER = Path(__file__).resolve().parent
SCRIPT = "network_peer.py"
#: Importing torch and hivemind takes seconds on a busy machine.
START_TIMEOUT_S = 90.0


class PeerProcess:
    """One peer, in a process group of its own; a context manager that leaves nothing behind."""

    def __init__(self, command: Sequence[str] | None = None, *, initial_peers: Sequence[str] = ()) -> None:
        environ = {k: v for k, v in os.environ.items() if k not in ("INITIAL_PEERS", "PL_INITIAL_PEERS")}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ.get('PATH', '')}"
        if initial_peers:
            environ["INITIAL_PEERS"] = ",".join(initial_peers)
        self.process = subprocess.Popen(
            command or [sys.executable, SCRIPT, "--loopback"],
            cwd=FOLDER,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # a shell starts background jobs, this test run perhaps among them, with SIGINT ignored
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        )
        self.said: list[dict[str, Any]] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        family = [*descendants(self.process.pid), self.process.pid]
        for step in self.said:
            family += [step["dht_pid"], *step["daemon_pids"]] if step["step"] == "up" else []
        for pid in set(family):
            if is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def wait_for(
        self, step: str, condition: Callable[[dict[str, Any]], bool] = lambda said: True, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """The next line of this ``step`` that fulfils ``condition``."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {step!r} within {timeout_s} s; said so far: {self.said}") from None
            assert line is not None, f"ended (exit code {self.process.poll()}) before {step!r}; said: {self.said}"
            said = json.loads(line)
            self.said.append(said)
            if said["step"] == step and condition(said):
                return said

    def wait_until_up(self) -> dict[str, Any]:
        return self.wait_for("up", timeout_s=START_TIMEOUT_S)

    def wait_until_sees(self, *peer_ids: str) -> dict[str, Any]:
        """Wait until it sees the records of exactly these peers."""
        return self.wait_for("sees", lambda said: set(said["records"]) == set(peer_ids))["records"]

    def tell(self, word: str) -> None:
        """What ``network_peer.py`` obeys."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """Stop it politely; what it said last."""
        self.tell("stop")
        down = self.wait_for("down")
        assert self.process.wait(30) == 0
        return down

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)


def is_alive(pid: int) -> bool:
    """False for a zombie, too."""
    return state_of(pid) not in ("", "Z", "X")
