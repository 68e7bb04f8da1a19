"""Starts the demo's peers as processes of their own and stops them again, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).with_name("demo_peer.py")
#: A peer that is told to stop has this long; leaving a swarm takes up to 10 s.
GRACE_S = 15.0
#: What an ended peer has left running has this long.
HELPERS_GRACE_S = 1.0


class PeerProcess:
    """One peer: ``demo_peer.py`` in a session of its own, so that Ctrl+C reaches the demo alone and it decides."""

    def __init__(self, folder: Path, options: Sequence[str], initial_peers: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        environment = os.environ | {
            "LIGHTNING_HIVEMIND_EVENTS": str(folder / "events.jsonl"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        for inherited in ("INITIAL_PEERS", "PL_INITIAL_PEERS"):  # this swarm is the demo's own
            environment.pop(inherited, None)
        if initial_peers:
            environment["INITIAL_PEERS"] = initial_peers
        with open(folder / "log.txt", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder), *options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        """Exit status; ``None`` while it runs, minus the signal's number if one ended it."""
        if self._status is None and (status := self._process.poll()) is not None:
            self._status = status
            self._end_session()  # at once: later the number might belong to somebody else
        return self._status

    def request_end_of_run(self) -> None:
        """Have this peer ask the swarm to stop: all peers end after the same global step."""
        (self.folder / "stop").touch()

    def ask_to_stop(self) -> None:
        """End this process alone, as Ctrl+C would."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)

    def finish(self, timeout_s: float) -> None:
        """Wait for its end, at most ``timeout_s``; then nothing of its session is left."""
        deadline = time.monotonic() + timeout_s
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.status is None:
            self._kill_session()
            self._process.wait()

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of what it printed."""
        text = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _end_session(self) -> None:
        """Give helpers of the ended peer (torch's shared memory manager, say) a moment to clean up, then kill them."""
        deadline = time.monotonic() + HELPERS_GRACE_S
        try:
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
            self._kill_session()
        except ProcessLookupError:  # the usual case: nobody is left
            return

    def _kill_session(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)


def stop_all(peers: Sequence[PeerProcess], grace_s: float = GRACE_S) -> None:
    """Stop every peer that still runs: politely, then not. Returns when all are gone."""
    for peer in peers:
        peer.ask_to_stop()
    deadline = time.monotonic() + grace_s
    for peer in peers:
        peer.finish(deadline - time.monotonic())
