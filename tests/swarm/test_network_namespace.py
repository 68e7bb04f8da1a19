"""Peers on "several machines": network namespaces, reached over cables and not over loopback."""

from __future__ import annotations

import contextlib
import time

import pytest

from swarm.checks import assert_complete, assert_ledger, together
from swarm.harness import Swarm
from swarm.namespaces import homes, joined_namespaces, star_of_namespaces, why_no_homes, why_unavailable
from swarm.network_process import SCRIPT, PeerProcess
from swarm.spec import ENDLESS

pytest.importorskip("hivemind")
pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("may_make_namespaces")]


@pytest.fixture
def may_make_namespaces() -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)


def test_the_printed_line_joins_from_another_machine() -> None:
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


@pytest.mark.thorough
def test_a_peer_that_nobody_can_reach_is_reached_through_a_relay() -> None:
    """Minutes of waiting: libp2p looks around for three before it is content with fewer than four relays.

    (It passes on nothing for peers with private addresses, hence the public network; where a firewall stands between
    peers, they find out by themselves what these are told.)
    """
    with star_of_namespaces("45.77") as (middle, left, right), contextlib.ExitStack() as stack:
        public, hidden = ["--reachable", "public"], ["--reachable", "private", "--relayed"]
        relay = stack.enter_context(PeerProcess(middle.command("python", SCRIPT, *public)))
        addresses = relay.wait_until_up()["addresses"]
        peers = []
        for number, space in enumerate((left, right)):
            theirs = [one for one in addresses if one.startswith(f"/ip4/45.77.{number}.1/tcp/")]
            command = space.command("python", SCRIPT, *hidden)
            peers.append(stack.enter_context(PeerProcess(command, initial_peers=theirs)))
        ids = [peer.wait_until_up()["peer_id"] for peer in peers]
        answers = []
        while not any(answers) and len(answers) < 60:
            time.sleep(5.0)
            peers[1].tell(f"reach {ids[0]}")
            answers.append(peers[1].wait_for("asked")["answered"])
        assert not answers[0], "they can reach one another without any relay"
        assert answers[-1]
        for one in (*peers, relay):
            one.stop()


class TestNative:
    """What libp2p's daemon does for hivemind's averagers, the native engine must do by itself."""

    @pytest.fixture
    def engine(self) -> str:
        return "native"

    def test_two_peers_that_cannot_reach_one_another_train_through_a_third(self, swarm: Swarm) -> None:
        with star_of_namespaces() as spaces:
            places = [{"network": space.name} for space in spaces]
            peers = swarm.start(3, peers=places, trainer=ENDLESS, delay_s=0.05)

            def in_step() -> bool:
                found = together(peers)[-20:]
                return len(found) == 20 and found[-1] - found[0] == 19

            peers[0].wait_until(in_step, timeout_s=60, what="twenty steps in a row with all three")
            for peer in peers:
                loaded = [event["epoch"] for event in peer.said("StateLoaded")]
                assert len(loaded) == len(set(loaded)), "it has fetched what it had"

    def test_who_is_cut_off_goes_on_alone_and_with_the_others_once_they_meet_again(self, swarm: Swarm) -> None:
        with star_of_namespaces() as (middle, left, right):
            places = [{"network": space.name} for space in (middle, left, right)]
            places[1]["delay_s"] = 0.2  # so that the two others have more samples when they meet again
            peers = swarm.start(3, peers=places, trainer=ENDLESS, delay_s=0.05)
            first, alone, other = peers
            first.wait_until(lambda: len(together(peers)) >= 3, timeout_s=60, what="three steps of all")
            middle.cable(0, plugged=False)
            before = max(max(peer.commits) for peer in peers)
            for peer in peers:
                peer.wait_epoch(before + 5, timeout_s=60)
            digests = [{one["epoch"]: one["digest"] for one in peer.said("step")} for peer in peers]
            assert digests[0][before + 3] == digests[2][before + 3] != digests[1][before + 3]
            loaded, missed = len(alone.said("StateLoaded")), [len(peer.said("RoundMissed")) for peer in (first, other)]
            middle.cable(0, plugged=True)
            alone.wait_until(lambda: len(alone.said("StateLoaded")) > loaded, timeout_s=90, what="they have met")
            epoch = alone.said("StateLoaded")[-1]["epoch"]
            (undone,) = alone.said("StepsUndone")
            steps = [one for one in alone.said("EpochCommitted") if one["time"] < undone["time"]]
            assert undone["first"] <= before + 3 <= undone["last"] == steps[-1]["epoch"]
            assert undone["samples"] == sum(one["samples"] for one in steps if one["epoch"] >= undone["first"]) > 0
            alone.wait_until(lambda: together(peers)[-1] > epoch, timeout_s=60, what="all three in one step")
            epoch = together(peers)[-1]
            assert len({peer.wait_epoch(epoch).digest for peer in peers}) == 1
            # Who comes back may make a step before it reaches both: one takes that state then, and nothing is lost.
            assert [len(peer.said("RoundMissed")) for peer in (first, other)] == missed
            assert not first.said("StepsUndone") + other.said("StepsUndone")

    def test_a_peer_on_a_slow_line_is_waited_for_until_that_is_known_and_not_taken_for_dead(self, swarm: Swarm) -> None:
        """Of 1.3 MB of a gradient it sends what others reduce: eight seconds, where who says nothing is dead after two.

        Three rounds: then its line is known to be slow (test_slow_lines.py).
        """
        if reason := why_no_homes():
            pytest.skip(reason)
        with homes(3, 1000.0, slower={2: 1.0}) as spaces:
            steps, places = 3, [{"network": space.name} for space in spaces]
            peers = swarm.start(
                3, peers=places, model={"width": 512}, trainer={"max_steps": steps}, delay_s=0.05, quick=False
            )
            swarm.finish(timeout_s=180)
            assert_complete(peers, range(1, steps + 1))
            assert_ledger(peers)
            first, *_ = peers[0].said("EpochCommitted")
            assert first["duration_s"] > 5.0, "its line is quick"
            for peer in peers:
                first, *_, last = peer.said("EpochCommitted")
                fewer = [one for one in peer.said("PeersChanged") if one["num_peers"] < 3]
                assert not [one for one in fewer if first["time"] < one["time"] < last["time"]], "taken for dead"

    def test_two_peers_that_have_forwarded_the_port_of_libp2p_only_train_all_the_same(self, swarm: Swarm) -> None:
        port = 31_337
        with joined_namespaces() as spaces:
            for space in spaces:
                space.drops_what_comes_to(port + 1)
            host = {"host_maddrs": [f"/ip4/0.0.0.0/tcp/{port}"]}
            places = [{"network": space.name, "strategy": host} for space in spaces]
            peers = swarm.start(2, peers=places, trainer=ENDLESS, delay_s=0.05)
            carried = "is reached through libp2p only"
            peers[0].wait_until(lambda: all(carried in one.output for one in peers), timeout_s=90, what=carried)
            together_by_then = len(together(peers))
            peers[0].wait_until(
                lambda: len(together(peers)) >= together_by_then + 10, timeout_s=60, what="ten steps of both"
            )

    @pytest.mark.parametrize("lost", ["one connection", "all connections"])
    def test_connections_that_carry_one_way_only_are_replaced(self, swarm: Swarm, lost: str) -> None:
        """What a router does that has forgotten them: it lets new ones through, and of the old ones one direction.

        Who still hears the other one there must not go on in the belief that all is well.
        """
        with joined_namespaces() as (here, there):
            places = [{"network": here.name}, {"network": there.name}]
            peers = swarm.start(2, peers=places, trainer=ENDLESS, delay_s=0.05)
            _, second = peers
            second.wait_until(lambda: len(together(peers)) >= 5, timeout_s=60, what="five steps of both")
            before = there.connections(second.pid)
            assert len(before) >= 2, "one for each direction"
            dropped = before[:1] if lost == "one connection" else before
            there.drops_what_comes_over(dropped)
            second.wait_until(
                lambda: not set(dropped) & set(there.connections(second.pid)), timeout_s=30, what="they are given up"
            )
            by_then = together(peers)[-1]
            second.wait_until(
                lambda: len([epoch for epoch in together(peers) if epoch > by_then]) >= 20,
                timeout_s=60,
                what="twenty steps of both after that",
            )
            assert_ledger(peers)

    def test_a_helper_in_the_middle_passes_the_state_on_to_who_cannot_fetch_it(self, swarm: Swarm) -> None:
        with star_of_namespaces() as (middle, left, right):
            helps = {"network": middle.name, "strategy": {"auxiliary": True}, "trainer": ENDLESS}
            swarm.start(1, together=False, peers=[helps])
            (first,) = swarm.start(1, together=False, peers=[{"network": left.name}], trainer=ENDLESS, delay_s=0.1)
            first.wait_epoch(3)
            (late,) = swarm.start(1, together=False, peers=[{"network": right.name}], trainer=ENDLESS, delay_s=0.1)
            late.wait_until(lambda: bool(together([first, late])), timeout_s=60, what="both in one step")
            assert late.said("StateLoaded")
