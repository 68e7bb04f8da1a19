"""The invariants under whatever order of faults Hypothesis can think of; what it finds it makes small."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_hivemind.simulation.faults import Schedule
from unit.seeds import examples, takes_long

NAMES = ["p0", "p1", "p2", "p3"]
TROUBLE_S, CALM_S = 5.0, 20.0
OF_ONE_PEER = ["crash", "freeze", "slow", "restart"]


class Trouble(RuleBasedStateMachine):
    """Four peers; every rule is a fault or time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(seed=0, kinds=(), lossy=False, names=NAMES)
        self.world = self.schedule.world

    @rule(duration_s=st.sampled_from([0.01, 0.1, 1.0, 5.0]))
    def time_passes(self, duration_s: float) -> None:
        self.world.clock.run(self.world.now + duration_s)

    @rule(kind=st.sampled_from(OF_ONE_PEER), name=st.sampled_from(NAMES), lasts_s=st.floats(0.01, 6.0))
    def a_peer_fails(self, kind: str, name: str, lasts_s: float) -> None:
        self.schedule.fault(kind, name, name, lasts_s)

    @rule(pair=st.lists(st.sampled_from(NAMES), min_size=2, max_size=2, unique=True), lasts_s=st.floats(0.01, 6.0))
    def a_link_is_cut(self, pair: list[str], lasts_s: float) -> None:
        self.schedule.fault("cut", *pair, lasts_s)

    @rule(pair=st.lists(st.sampled_from(NAMES), min_size=2, max_size=2, unique=True), lasts_s=st.floats(0.01, 6.0))
    def the_swarm_is_split(self, pair: list[str], lasts_s: float) -> None:
        self.schedule.fault("split", *pair, lasts_s)

    @rule(
        drop=st.sampled_from([0.0, 0.02, 0.2]),
        repeat=st.sampled_from([0.0, 0.05, 0.5]),
        delay_s=st.sampled_from([0.001, 0.05, 0.5]),
    )
    def the_network_changes(self, drop: float, repeat: float, delay_s: float) -> None:
        network = self.schedule.network
        network.drop, network.repeat, network.delay_s = drop, repeat, delay_s

    @precondition(lambda self: self.world.now > 0)
    @rule()
    def all_is_mended(self) -> None:
        before = max(peer.head.samples for peer in self.world.living())  # who was alone may have made many small steps
        self.schedule.mend()
        self.world.clock.run(self.world.now + CALM_S)
        heads = {peer.head.lineage for peer in self.world.living()}
        front = max(self.world.living(), key=lambda peer: peer.head.samples)
        assert front.head.samples > before
        assert heads <= {front.head.lineage, *(commit.parent.lineage for commit in front.applied)}

    @invariant()
    def nothing_counts_twice_or_is_lost(self) -> None:
        for peer in self.world.living():
            self.world.check_ledger(peer)

    def teardown(self) -> None:
        """Every run ends well, not only those in which that is drawn; in many of them no time has passed until now."""
        self.time_passes(TROUBLE_S)
        self.all_is_mended()
        self.nothing_counts_twice_or_is_lost()


Trouble.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=15)
TestTrouble = takes_long(Trouble.TestCase)
