"""The printed line, run on "another machine": another network namespace, reached over a cable and not over loopback."""

from __future__ import annotations

import pytest

from swarm.namespaces import joined_namespaces, why_unavailable
from swarm.network_process import SCRIPT, PeerProcess

pytest.importorskip("hivemind")
pytestmark = pytest.mark.swarm


def test_the_printed_line_joins_from_another_machine() -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    with (
        joined_namespaces() as (here, there),
        PeerProcess(here.command("python", SCRIPT, "--run-id", "a run")) as first,
    ):
        up = first.wait_until_up()
        (line,) = [line for line in up["invitation"].splitlines() if line.startswith("INITIAL_PEERS=")]
        assert f"/ip4/{here.address}/tcp/" in line
        assert "127.0.0.1" not in line
        assert line.endswith(f" python {SCRIPT} --run-id 'a run'")
        with PeerProcess(there.command("bash", "-c", line)) as second:
            joined = second.wait_until_up()
            assert any(f"/ip4/{there.address}/" in address for address in joined["addresses"])
            ids = up["peer_id"], joined["peer_id"]
            assert second.wait_until_sees(*ids)[ids[0]]["pid"] == up["pid"]
            assert first.wait_until_sees(*ids)[ids[1]]["pid"] == joined["pid"]
            second.stop()
            first.wait_until_sees(ids[0])
        first.stop()
