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
from matplotlib.axes import Axes

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
    """The whole run.

    ``epochs`` has one number if all peers ended after the same global step. ``largest_difference`` is between any two
    peers' values of any one parameter after ``compared_epoch``, the last step that all of them had.
    """

    peers: list[PeerResult]
    epochs: list[int]
    compared_epoch: int
    largest_difference: float
    seconds_per_step: float
    text: str


def collect(views: Sequence[PeerView]) -> RunResult:
    """Read what the peers left in their folders.

    Raises:
        DemoError: a peer ended without training or without a result, or the peers have no step in common.
    """
    for view in views:
        if not view.train or not (view.folder / "result.json").exists():
            raise DemoError(f"{view.name} ended without having trained: see {view.folder / 'log.txt'}")
    results = [json.loads((view.folder / "result.json").read_text(encoding="utf-8")) for view in views]
    compared_epoch, difference = _compare([view.folder / "parameters.npz" for view in views])
    return RunResult(
        peers=[_peer_result(view, result) for view, result in zip(views, results, strict=True)],
        epochs=sorted({int(result["epoch"]) for result in results}),
        compared_epoch=compared_epoch,
        largest_difference=difference,
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
        f"largest difference between their parameters after step {result.compared_epoch}: "
        f"{result.largest_difference:.1e}",
        highlight=False,
        soft_wrap=True,
    )


def plot(views: Sequence[PeerView], result: RunResult, started_at: float, bar: float, path: Path) -> None:
    """Losses over time with the joins marked, and below how many peers were in each step."""
    figure, (losses, steps) = plt.subplots(
        2, 1, figsize=(10, 6.5), sharex=True, height_ratios=(5, 1), layout="constrained"
    )
    _draw_losses(losses, views, started_at)
    losses.axhline(bar, color="black", linewidth=0.8, linestyle="--")
    losses.text(0.995, bar + 0.03, f"bar: {bar:g}", transform=losses.get_yaxis_transform(), ha="right", fontsize=8)
    worst = max(peer.held_out_loss for peer in result.peers)
    title = f"{len(views)} peers train one byte-level GPT: held-out loss {worst:.2f} after {result.epochs[-1]} steps"
    losses.set_title(title, loc="left")
    losses.set_ylabel("loss, nats per byte")
    losses.legend(loc="upper right", frameon=False, fontsize=9)
    _draw_steps(steps, views, started_at)
    for axes in (losses, steps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_xlim(left=0)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw_losses(axes: Axes, views: Sequence[PeerView], started_at: float) -> None:
    held_out = sorted(point for view in views for point in view.held_out)
    axes.plot(
        *_since(held_out, started_at), color="0.35", linewidth=1.2, marker="o", markersize=5, label="held-out text"
    )
    for index, view in enumerate(views):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(*_smoothed(view.train, started_at), color=colour, linewidth=1.3, alpha=0.8, label=view.name)
        when, loss = _since(view.held_out, started_at)
        axes.plot(when, loss, "o", color=colour, markersize=5, zorder=3)
        if view.joined_at is not None:
            joined_s = view.joined_at - started_at
            axes.axvline(joined_s, color=colour, linestyle=":", linewidth=1.2, zorder=1)
            axes.text(
                joined_s,
                1.0 - 0.045 * index,
                f" {view.name} joins",
                transform=axes.get_xaxis_transform(),
                color=colour,
                fontsize=9,
                va="top",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )


def _draw_steps(axes: Axes, views: Sequence[PeerView], started_at: float) -> None:
    """One dot per global step: the most peers that any of them knows to be in it."""
    most: dict[int, tuple[float, float]] = {}
    for commit in (commit for view in views for commit in view.commits):
        when, known = most.get(commit.epoch, (commit.time, 0))
        most[commit.epoch] = (min(when, commit.time), max(known, commit.contributors))
    axes.plot(*_since(list(most.values()), started_at), ".", color="0.35", markersize=4)
    axes.set_ylabel("peers\nin a step")
    axes.set_yticks(range(1, len(views) + 1))
    axes.set_ylim(0.5, len(views) + 0.5)
    axes.set_xlabel("time since the start, s")


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


def _compare(paths: Sequence[Path]) -> tuple[int, float]:
    """The last epoch that is in all files, and the largest difference between any two peers' values there."""
    peers = []
    for path in paths:
        with np.load(path) as saved:
            peers.append(dict(zip(saved["epochs_E"].tolist(), saved["parameters_EP"], strict=True)))
    common = set.intersection(*(set(peer) for peer in peers))
    if not common:
        ends = ", ".join(str(max(peer)) for peer in peers)
        raise DemoError(f"the peers ended too far apart to compare their parameters: after steps {ends}")
    values = [peer[max(common)] for peer in peers]
    return max(common), max(float(np.abs(a - b).max()) for a, b in combinations(values, 2))


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
