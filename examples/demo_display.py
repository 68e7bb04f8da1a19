"""What the demo shows while the peers train: one live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo_view import PeerView

#: Seconds between two plain lines about one peer.
PLAIN_EVERY_S = 10.0
#: The newest notes that the live display has room for.
NOTES_SHOWN = 6

STATE_STYLES = {
    "training": "green",
    "averaging": "cyan",
    "starting": "dim",
    "joining": "yellow",
    "waiting": "yellow",
    "catching up": "yellow",
    "stopped": "dim",
    "finished": "dim",
    "failed": "bold red",
}
#: The hues of the plot, where a terminal has them.
PEER_COLOURS = ("dodger_blue2", "dark_orange", "green3", "hot_pink", "gold1", "sky_blue1")


class Display(Protocol):
    """Shows the peers; a context manager around the run."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, peers: Sequence[PeerView]) -> None:
        """Show what is known now; called a few times a second."""


def make_display(console: Console, *, started_at: float, total_s: float) -> Display:
    """Live on a terminal, plain lines otherwise. ``started_at`` is Unix time, ``total_s`` the planned length."""
    kind = LiveDisplay if console.is_terminal else PlainDisplay
    return kind(console, started_at=started_at, total_s=total_s)


class LiveDisplay:
    """One table that is redrawn in place: a row per peer with its progress bar, the newest notes below."""

    def __init__(self, console: Console, *, started_at: float, total_s: float) -> None:
        self._started_at, self._total_s = started_at, total_s
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, peers: Sequence[PeerView]) -> None:
        self._live.update(self.render(peers), refresh=True)

    def render(self, peers: Sequence[PeerView]) -> RenderableType:
        elapsed_s = time.time() - self._started_at
        clock = Table.grid(padding=(0, 2))
        clock.add_row(
            Text("lightning-hivemind demo", style="bold"),
            f"{clock_text(elapsed_s)} / {clock_text(self._total_s)}",
            ProgressBar(total=self._total_s, completed=min(elapsed_s, self._total_s), width=40),
        )
        return Group(clock, self._table(peers), self._notes(peers))

    def _table(self, peers: Sequence[PeerView]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("peer")
        table.add_column("state", min_width=11)
        for name in ("epoch", "loss", "held-out", "peers", "samples/s"):
            table.add_column(name, justify="right")
        table.add_column("towards the next step", min_width=26)
        for index, peer in enumerate(peers):
            table.add_row(
                Text(peer.name, style=PEER_COLOURS[index % len(PEER_COLOURS)]),
                Text(peer.state, style=STATE_STYLES.get(peer.state, "")),
                str(peer.epoch),
                number(peer.loss),
                number(peer.held_out[-1][1] if peer.held_out else None),
                str(peer.num_peers or "-"),
                f"{peer.samples_per_s:.0f}" if peer.samples else "-",
                _towards_target(peer),
            )
        return table

    def _notes(self, peers: Sequence[PeerView]) -> Text:
        notes = sorted((when, peer.name, text) for peer in peers for when, text in peer.notes)[-NOTES_SHOWN:]
        lines = [f"{clock_text(when - self._started_at)}  {name}: {text}" for when, name, text in notes]
        return Text("\n".join(lines), style="dim", overflow="ellipsis", no_wrap=True)


class PlainDisplay:
    """A line per peer every few seconds, and a line for every note: for logs and pipes."""

    def __init__(self, console: Console, *, started_at: float, total_s: float) -> None:
        self._console, self._started_at, self._total_s = console, started_at, total_s
        self._printed_at: dict[str, float] = {}
        self._notes_printed: dict[str, int] = {}

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, peers: Sequence[PeerView]) -> None:
        now = time.time()
        for peer in peers:
            for when, text in peer.notes[self._notes_printed.get(peer.name, 0) :]:
                self._print(when, f"{peer.name}: {text}")
            self._notes_printed[peer.name] = len(peer.notes)
            if now - self._printed_at.setdefault(peer.name, now) >= PLAIN_EVERY_S:
                self._printed_at[peer.name] = now
                self._print(now, _plain_line(peer))

    def _print(self, when: float, text: str) -> None:
        self._console.print(f"{clock_text(when - self._started_at)}  {escape(text)}", highlight=False, soft_wrap=True)


def clock_text(seconds: float) -> str:
    """``m:ss``."""
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    return f"{minutes}:{rest:02d}"


def number(value: float | None) -> str:
    """A loss with three digits after the point, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def _towards_target(peer: PeerView) -> RenderableType:
    if not peer.target:
        return "-"
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=peer.target, completed=min(peer.swarm_samples, peer.target), width=16)
    row.add_row(bar, f"{peer.swarm_samples}/{peer.target}")
    return row


def _plain_line(peer: PeerView) -> str:
    return (
        f"{peer.name}: {peer.state}, epoch {peer.epoch}, loss {number(peer.loss)}, {peer.num_peers} peers, "
        f"{peer.swarm_samples}/{peer.target} samples, {peer.samples_per_s:.0f} samples/s"
        if peer.samples
        else f"{peer.name}: {peer.state}"
    )
