"""A stock ``hivemind.Optimizer`` script, without this package, in a run of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.harness import Peer, Swarm
from swarm.replay import distance
from swarm.spec import PeerSpec

pytestmark = pytest.mark.swarm


def said(peer: Peer, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line[5:]) for line in peer.output.splitlines() if line.startswith("SAID ")]
    return [line for line in lines if line["event"] == event]


def test_a_stock_script_joins_a_run_of_ours_and_averages_with_it(swarm: Swarm) -> None:
    # both wait for one another longer than a busy machine can make a batch last
    patient = {"matchmaking_time": 10.0, "averaging_timeout": 30.0}
    (ours,) = swarm.start(1, together=False, hold_at=[1], trainer={"max_steps": -1}, delay_s=0.05, strategy=patient)
    ours.wait_for("holding", epoch=1)
    script = Path(__file__).with_name("stock_peer.py")
    stock = swarm.launch(
        PeerSpec(),
        name="stock",
        entry=str(script),
        sys_argv=[str(script), ",".join(swarm.addresses()), "lightning_run", "8"],
    )
    stock.wait_until(lambda: bool(said(stock, "loaded")), timeout_s=60, what="the stock peer takes our state")
    ours.release(1)
    stock.wait_until(lambda: bool(said(stock, "done")), timeout_s=120, what="the stock peer has made its epochs")
    (done,) = said(stock, "done")
    assert done["epoch"] >= 8
    assert done["ours"] is False, "the stock peer must not use this package"
    assert said(stock, "loaded")[0]["epoch"] == 1
    assert "Averaged gradients with 2 peers" in stock.output
    joint = [event for event in ours.said("EpochCommitted") if event["contributors"] == 2 and event["fraction"] == 1.0]
    assert len(joint) >= 2
    ours.wait_epoch(joint[-1]["epoch"])  # the event comes before the parameters are recorded
    # Where both averaged whole rounds, both hold the same parameters. hivemind lets a peer be one epoch behind, for
    # good: after a round that one of them missed, the stock peer's count of the same steps may be one less.
    theirs = {line["epoch"]: np.array(line["parameters"]) for line in said(stock, "epoch")}
    apart = [
        distance(theirs[theirs_epoch], ours.parameters(event["epoch"]))
        for event in joint
        for theirs_epoch in (event["epoch"], event["epoch"] - 1)
        if theirs_epoch in theirs
    ]
    assert apart
    assert min(apart) < 1e-5
