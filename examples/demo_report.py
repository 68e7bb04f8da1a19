"""How the demo ends: figures of every peer and of the run, a table, and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from demo_display import number
from demo_view import DemoError, PeerView

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: Recorded losses (two a second) that are one figure in the table and one point of the plotted line.
SMOOTHED_LINES = 10
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class PeerResult:
    """One peer at its end. Losses in nats per byte."""

    name: str
    steps: int
    samples: int
    loss_before: float
    loss_after: float
    held_out_loss: float
    samples_per_s: float
    peers_per_step: float
    incomplete_rounds: int


@dataclass(frozen=True)
class RunResult:
    """The whole run. ``largest_difference`` is between any two peers' values of any one parameter.

    ``epochs`` has one number if all peers ended after the same global step; otherwise the difference means little.
    """

    peers: list[PeerResult]
    epochs: list[int]
    largest_difference: float
    seconds_per_step: float
    text: str


def collect(views: Sequence[PeerView]) -> RunResult:
    """Read what the peers left in their folders.

    Raises:
        DemoError: a peer ended without training, or without a result.
    """
    for view in views:
        if not view.train or not (view.folder / "result.json").exists():
            raise DemoError(f"{view.name} ended without having trained: see {view.folder / 'log.txt'}")
    results = [json.loads((view.folder / "result.json").read_text(encoding="utf-8")) for view in views]
    parameters = [np.load(view.folder / "parameters.npy") for view in views]
    return RunResult(
        peers=[_peer_result(view, result) for view, result in zip(views, results, strict=True)],
        epochs=sorted({int(result["epoch"]) for result in results}),
        largest_difference=max(float(np.abs(a - b).max()) for a, b in combinations(parameters, 2)),
        seconds_per_step=_seconds_per_step(views[0]),
        text=results[0]["text"],
    )


def save(result: RunResult, path: Path) -> None:
    path.write_text(json.dumps(asdict(result), indent=2), encoding="utf-8")


def print_table(console: Console, result: RunResult) -> None:
    """The table, and below it what belongs to the run as a whole."""
    table = Table(title="loss in nats per byte", title_justify="left", title_style="dim")
    table.add_column("peer", no_wrap=True)
    names = ("loss before", "loss after", "held-out", "samples", "samples/s", "steps", "peers/step", "incomplete")
    for name in names:
        table.add_column(name, justify="right")
    for peer in result.peers:
        table.add_row(
            peer.name,
            number(peer.loss_before),
            number(peer.loss_after),
            f"[bold]{peer.held_out_loss:.3f}[/bold]",
            str(peer.samples),
            f"{peer.samples_per_s:.1f}",
            str(peer.steps),
            f"{peer.peers_per_step:.2f}",
            str(peer.incomplete_rounds),
        )
    console.print(table)
    samples = sum(peer.samples for peer in result.peers)
    ended = f"all after step {result.epochs[0]}" if len(result.epochs) == 1 else f"after steps {result.epochs}"
    console.print(
        f"{samples} samples; {result.seconds_per_step:.2f} s per step; the peers ended {ended}; "
        f"largest difference between their parameters: {result.largest_difference:.1e}",
        highlight=False,
        soft_wrap=True,
    )


def plot(views: Sequence[PeerView], result: RunResult, started_at: float, bar: float, path: Path) -> None:
    """Losses over time with the joins marked, and below how many peers were in each step."""
    figure, (losses, steps) = plt.subplots(
        2, 1, figsize=(10, 6.5), sharex=True, height_ratios=(4, 1), layout="constrained"
    )
    for index, view in enumerate(views):
        colour = COLOURS[index % len(COLOURS)]
        when, loss = _smoothed(view.train, started_at)
        losses.plot(when, loss, color=colour, linewidth=1.2, alpha=0.75, label=f"{view.name}, training")
        when, loss = _since(view.held_out, started_at)
        losses.plot(when, loss, "o", color=colour, markersize=4.5, markeredgecolor="white", markeredgewidth=0.6)
        if view.joined_at is not None:
            joined_s = view.joined_at - started_at
            losses.axvline(joined_s, color=colour, linestyle=":", linewidth=1)
            losses.annotate(
                f"{view.name} joins",
                (joined_s, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -6 - 12 * index),
                textcoords="offset points",
                color=colour,
                fontsize=8,
                va="top",
            )
        counted = _since([(one.time, one.contributors) for one in view.commits], started_at)
        steps.plot(*counted, ".", color=colour, markersize=3, alpha=0.5)
    losses.plot([], [], "o", color="grey", markersize=4.5, label="held-out text")
    losses.axhline(bar, color="black", linewidth=0.8, linestyle="--")
    losses.annotate(
        f"bar for held-out text: {bar:g}", (1.0, bar), xycoords=("axes fraction", "data"), xytext=(-4, 3),
        textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    worst = max(peer.held_out_loss for peer in result.peers)
    losses.set_title(
        f"{len(views)} peers train one byte-level GPT: held-out loss {worst:.2f} nats per byte", loc="left"
    )
    losses.set_ylabel("loss, nats per byte")
    losses.legend(loc="upper right", frameon=False, fontsize=9)
    steps.set_ylabel("peers\nin a step")
    steps.set_yticks(range(len(views) + 1))
    steps.set_ylim(0.5, len(views) + 0.5)
    steps.set_xlabel("time since the start, s")
    for axes in (losses, steps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_xlim(left=0)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _peer_result(view: PeerView, result: dict[str, float]) -> PeerResult:
    losses = [loss for _, loss in view.train]
    return PeerResult(
        name=view.name,
        steps=len(view.commits),
        samples=int(result["samples"]),
        loss_before=losses[0],
        loss_after=_mean(losses[-SMOOTHED_LINES:]),
        held_out_loss=result["held_out_loss"],
        samples_per_s=view.samples_per_s_overall,
        peers_per_step=view.peers_per_step,
        incomplete_rounds=view.incomplete,
    )


def _seconds_per_step(view: PeerView) -> float:
    if len(view.commits) < 2:
        return float("nan")
    first, last = view.commits[0], view.commits[-1]
    return (last.time - first.time) / (last.epoch - first.epoch)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _since(points: Sequence[tuple[float, float]], started_at: float) -> tuple[list[float], list[float]]:
    return [when - started_at for when, _ in points], [value for _, value in points]


def _smoothed(points: Sequence[tuple[float, float]], started_at: float) -> tuple[list[float], list[float]]:
    """Running mean over the last :data:`SMOOTHED_LINES` points."""
    when, values = _since(points, started_at)
    return when, [_mean(values[max(0, i + 1 - SMOOTHED_LINES) : i + 1]) for i in range(len(values))]
