"""A stock ``hivemind.Optimizer`` script, without this package, in a run of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.harness import Peer, Swarm
from swarm.marks import HIVEMIND_ONLY
from swarm.replay import distance
from swarm.spec import ENDLESS, PeerSpec

pytestmark = pytest.mark.swarm


def said(peer: Peer, event: str) -> list[dict[str, Any]]:
    whole, _, _ = peer.output.rpartition("\n")  # the last line may be half written
    lines = [json.loads(line[5:]) for line in whole.splitlines() if line.startswith("SAID ")]
    return [line for line in lines if line["event"] == event]


@HIVEMIND_ONLY
def test_a_stock_script_joins_a_run_of_ours_and_averages_with_it(swarm: Swarm, tmp_path: Path) -> None:
    # Both wait for one another longer than a busy machine can make a batch last; and a step takes longer than hivemind
    # needs to hear of a report (with steps of 0.2 s they were seen to go on alone for minutes, at a load of 19).
    patient = {"matchmaking_time": 10.0, "averaging_timeout": 30.0}
    (ours,) = swarm.start(1, together=False, hold_at=[1], trainer=ENDLESS, delay_s=0.5, strategy=patient)
    ours.wait_for("holding", epoch=1)
    script, stop = Path(__file__).with_name("stock_peer.py"), tmp_path / "stop"
    stock = swarm.launch(
        PeerSpec(),
        name="stock",
        entry=str(script),
        sys_argv=[str(script), ",".join(swarm.addresses()), "lightning_run", str(stop)],
    )
    stock.wait_until(lambda: bool(said(stock, "loaded")), timeout_s=90, what="the stock peer takes our state")
    assert said(stock, "loaded")[0]["epoch"] == 1
    ours.release(1)
    # (its averager may be in a round of which its optimizer, on a busy machine, has thought the worse already)
    stock.wait_until(
        lambda: (
            "Averaged gradients with 2 peers" in stock.output
            and len(whole_rounds(ours)) >= 2
            and min(apart(ours, stock), default=1.0) < 1e-5
        ),
        timeout_s=240,
        what="both hold the same parameters after rounds that both were in",
    )
    stop.touch()
    stock.wait_until(lambda: bool(said(stock, "done")), timeout_s=120, what="the stock peer ends")
    assert said(stock, "done")[0]["ours"] is False, "the stock peer must not use this package"


def whole_rounds(peer: Peer) -> list[int]:
    """Epochs that this peer recorded after a round with another one in which everything arrived."""
    epochs = [event["epoch"] for event in peer.said("EpochCommitted", contributors=2, fraction=1.0)]
    return [epoch for epoch in epochs if epoch in peer.commits]


def apart(ours: Peer, stock: Peer) -> list[float]:
    """How far the stock peer's parameters are from ours, after each whole round.

    hivemind lets a peer be one epoch behind, for good: after a round that one of them missed, the stock peer's count of
    the same steps may be one less.
    """
    theirs = {line["epoch"]: np.array(line["parameters"]) for line in said(stock, "epoch")}
    return [
        distance(theirs[theirs_epoch], ours.parameters(epoch))
        for epoch in whole_rounds(ours)
        for theirs_epoch in (epoch, epoch - 1)
        if theirs_epoch in theirs
    ]
