"""A process that stood still knows it; one whose threads work long does not think so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from lightning_hivemind.engine.native.wakefulness import Wakefulness

PROCESS = """
import sys
from lightning_hivemind.engine.native.wakefulness import Wakefulness

wakefulness = Wakefulness(1.0)
wakefulness.start()
for _ in sys.stdin:
    print(wakefulness.stood_still(), flush=True)
"""


def test_a_process_that_was_suspended_is_told_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("?\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        ask()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        assert ask() == "True"
        ask()
        process.stdin.close()


def test_a_thread_that_is_busy_for_long_did_not_stand_still() -> None:
    wakefulness = Wakefulness(5.0)
    wakefulness.start()
    time.sleep(6.0)
    assert not wakefulness.stood_still()
    wakefulness.stop()
