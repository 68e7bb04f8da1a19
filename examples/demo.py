"""Three peers on this machine train one byte-level GPT together; the third joins while the others train.

    python demo.py                        # about five minutes on two cores; or: make demo
    python demo.py --minutes 10 --peers 4

Each peer is a process that runs ``byte_gpt.py``, the script that you would copy. The exit status is 0 only if every
peer ended well and predicts held-out text better than the bar.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import demo_report
from demo_display import Display, make_display
from demo_processes import PeerProcess, stop_all
from demo_view import DemoError, PeerView

#: Held-out loss in nats per byte that every peer must be below, by engine: it takes more than the frequencies of pairs.
BARS = {"native": 2.0, "hivemind": 2.5}
#: Seconds between two looks at the peers' files.
LOOK_EVERY_S = 0.25
#: Seconds of the planned time that are kept for leaving the swarm, the last validation and the plot.
ENDING_S = 25.0
#: Seconds within which the wish of one peer to stop must have reached all, with the next global step.
STOP_REACHES_ALL_S = 10.0
#: Seconds that peers may take beyond the planned time before the demo gives up.
OVERTIME_S = 60.0
#: Seconds that the first peer has until it can be joined: importing takes most of it.
FIRST_PEER_S = 120.0
#: Seconds after the start at which the last peer joins, or a fifth of the time if that is less.
LATE_JOIN_S = 60.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ERASED = ("peer-*", "loss.png", "summary.json")


class Stopped(BaseException):
    """Ctrl+C or a signal: everything has to be stopped and nothing reported."""


class Demo:
    """The peers of one run, started in turn, watched, and stopped."""

    def __init__(self, options: argparse.Namespace, started_at: float) -> None:
        self.options = options
        self.started_at = started_at
        self.total_s = options.minutes * 60
        self.views: list[PeerView] = []
        self.processes: list[PeerProcess] = []

    def run(self, display: Display) -> None:
        """Start the peers when their time has come and return once all have ended well.

        Raises:
            DemoError: a peer failed, or they take too long. Peers may still be running: call :meth:`stop`.
        """
        while len(self.processes) < self.options.peers or any(one.status is None for one in self.processes):
            if self._next_is_due():
                self._start_peer()
            for view in self.views:
                view.refresh()
            self._check()
            self._end_in_time()
            display.update(self.views)
            time.sleep(LOOK_EVERY_S)
        for view in self.views:
            view.refresh()
        self._check()  # the last one may have failed since the last look
        display.update(self.views)

    def stop(self) -> None:
        stop_all(self.processes)

    def _elapsed_s(self) -> float:
        return time.time() - self.started_at

    def _next_is_due(self) -> bool:
        started = len(self.processes)
        if started == 0:
            return True
        if started == self.options.peers or not self.views[0].address:
            return False
        late = started == self.options.peers - 1 and started > 1
        return not late or self._elapsed_s() >= min(LATE_JOIN_S, self.total_s / 5)

    def _start_peer(self) -> None:
        index = len(self.processes)
        arguments = {
            "--run-id": self.options.run_id,
            "--engine": self.options.engine,
            "--target-batch-size": self.options.target_batch_size,
            "--listen": LOOPBACK,
            "--seed": index + 1,
        }
        options = [str(text) for pair in arguments.items() for text in pair]
        folder = self.options.out / f"peer-{index + 1}"
        address = self.views[0].address if self.views else ""
        self.processes.append(PeerProcess(folder, [*options, "--no-progress"], address))
        self.views.append(PeerView(f"peer {index + 1}", folder))

    def _end_in_time(self) -> None:
        """The first peer ends the run for all; a peer that this does not reach is told as well."""
        over_s = self._elapsed_s() - (self.total_s - ENDING_S)
        for index, process in enumerate(self.processes):
            if over_s > (0.0 if index == 0 else STOP_REACHES_ALL_S):
                process.request_end_of_run()

    def _check(self) -> None:
        for view, process in zip(self.views, self.processes, strict=True):
            if process.status == 0:
                view.state = "finished"
            elif process.status is not None:
                view.state = "failed"
                raise DemoError(
                    f"{view.name} failed with status {process.status}; the end of {process.folder / 'log.txt'}:\n"
                    f"{process.log_tail()}"
                )
        if not self.views[0].address and self._elapsed_s() > FIRST_PEER_S:
            log = self.processes[0].folder / "log.txt"
            raise DemoError(f"the first peer could not be joined after {FIRST_PEER_S:.0f} s: see {log}")
        if self._elapsed_s() > self.total_s + OVERTIME_S:
            slow = ", ".join(v.name for v, p in zip(self.views, self.processes, strict=True) if p.status is None)
            raise DemoError(f"{slow} did not end within {OVERTIME_S:.0f} s after the planned {self.total_s:.0f} s")


def report(console: Console, demo: Demo) -> None:
    """Table, text and plot; raises DemoError unless every peer is below the bar."""
    out: Path = demo.options.out
    bar = BARS[demo.options.engine]
    result = demo_report.collect(demo.views)
    demo_report.save(result, out / "summary.json")
    demo_report.plot(demo.views, result, demo.started_at, bar, out / "loss.png")
    console.print(Panel(Text(result.text), title="sampled text", title_align="left", border_style="dim"))
    demo_report.print_table(console, result)
    console.print(f"plot: {(out / 'loss.png').resolve()}", highlight=False, soft_wrap=True)
    above = [f"{peer.name} ({peer.held_out_loss:.3f})" for peer in result.peers if not peer.held_out_loss < bar]
    if above:
        raise DemoError(f"the held-out loss of {', '.join(above)} is not below {bar} nats per byte")
    console.print(f"held-out loss of every peer below {bar} nats per byte: well done", style="green", highlight=False)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="length of the whole demo (default: 5)")
    parser.add_argument("--peers", type=int, default=3, help="peers on this machine (default: 3)")
    parser.add_argument("--target-batch-size", type=int, default=64, help="samples per step of the swarm (default: 64)")
    parser.add_argument("--engine", default="native", choices=tuple(BARS), help="what averages")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for logs, figures and the plot")
    options = parser.parse_args(argv)
    if options.minutes < 1:
        parser.error(f"--minutes={options.minutes:g}: starting and ending take most of a minute; give at least 1")
    if options.peers < 2:
        parser.error(f"--peers={options.peers}: a swarm has at least 2")
    options.run_id = f"demo-{time.time_ns():x}"
    return options


def prepare(out: Path) -> None:
    """Make ``out``, ignored by git, and remove what an earlier demo left there."""
    out.mkdir(parents=True, exist_ok=True)
    (out / ".gitignore").write_text("*\n", encoding="utf-8")
    for pattern in ERASED:
        for path in out.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def on_signal(number: int, frame: FrameType | None) -> None:
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second Ctrl+C must not interrupt the cleaning up
        signal.signal(one, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    prepare(options.out)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    demo = Demo(options, time.time())
    console.print(f"logs and results: {options.out.resolve()}", highlight=False, soft_wrap=True)
    try:
        with make_display(console, started_at=demo.started_at, total_s=demo.total_s) as display:
            demo.run(display)
        report(console, demo)
    except DemoError as error:
        console.print(f"demo failed: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except Stopped as stopped:
        console.print(f"stopped by {stopped}", style="yellow")
        return 130
    finally:
        demo.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
