"""The published code blocks run."""

from __future__ import annotations

import pytest

from swarm.harness import START_S, Swarm
from swarm.published import BLOCKS
from swarm.spec import PeerSpec

pytestmark = pytest.mark.swarm


@pytest.mark.parametrize("block", BLOCKS)
def test_a_published_code_block_trains_as_it_stands(swarm: Swarm, block: str) -> None:
    """With the edits that :mod:`swarm.published` names. What each does is tested where its arguments are."""
    peer = swarm.launch(PeerSpec(scenario="swarm.published:run_block", env={"BLOCK": block}))
    ran = peer.wait_for("ran", timeout_s=START_S)
    assert (ran["global_step"], ran["engine"]) == (2, swarm.engine)
    assert ran["finite"]
    assert ran["moved"] == ran["of"]
    peer.wait_exit()
