"""The invariants under seeded random faults on virtual time: what is lost, late, twice, dead, frozen or cut off.

A failing seed replays exactly. ``make hostile SEEDS=0:10000`` runs as many as one likes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.simulation.faults import KINDS, Schedule
from lightning_hivemind.simulation.world import World
from unit.seeds import MANY, seeds

SEEDS = seeds(200)
#: for further tests of the same: fewer in ``make test``
AGAIN = SEEDS if MANY else SEEDS[:50]


def assert_one_lineage(world: World) -> None:
    """After the calm everybody is on one lineage, four steps behind its end at most (I4); nothing counts twice (I3)."""
    front = max(world.living(), key=lambda peer: peer.head.samples)
    on_it = {front.head, *(commit.parent for commit in front.applied)}
    for peer in world.living():
        world.check_ledger(peer)
        assert peer.head in on_it, f"{peer.name} is on a lineage of its own"
        assert front.head.epoch - peer.head.epoch <= 4, f"{peer.name} is left behind"


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_one_lineage_survives_and_goes_on(seed: int) -> None:
    schedule = Schedule(seed=seed)
    schedule.world.clock.run(schedule.trouble_s)
    before = max(peer.head.samples for peer in schedule.world.living())
    world = schedule.run()
    steps = 3 * world.settings.target_samples  # counted in samples: a lineage of fewer steps may win
    assert_one_lineage(world)
    assert min(peer.head.samples for peer in world.living()) >= before + steps, "no progress in the calm"


@pytest.mark.parametrize("seed", AGAIN)
def test_without_faults_nothing_forks_whatever_the_network_does(seed: int) -> None:
    world = Schedule(seed=seed, kinds=(), calm_s=5.0).run()
    assert world.forks == 0
    assert_one_lineage(world)
    assert {peer.name: peer.dropped for peer in world.living() if peer.dropped} == {}


def test_the_schedules_have_every_kind_of_fault() -> None:
    fired = [kind for seed in SEEDS[:20] for kind in kinds_fired(seed)]
    assert set(fired) == set(KINDS)


def test_who_restarts_is_another_life_whose_beginning_nobody_notices() -> None:
    schedule = Schedule(seed=1, kinds=(), lossy=False, names=["p0", "p1"])
    world, before = schedule.world, schedule.world.peers["p1"]
    other = world.peers["p0"]
    world.clock.run(1.0)
    schedule.fault("restart", "p1", "p1", 1.0)
    again = world.peers["p1"]
    assert schedule.fired == [(1.0, "restart", "p1")]
    assert (before.alive, again.alive, again.tag) == (False, True, "p1#2")
    assert other.core.living == ("p1",)
    world.clock.run(11.0)
    assert again.applied[-1] == other.applied[-1]
    assert other.applied[-1].parent.samples > 0, "no steps since"
    assert any(one.peer == "p1" for one in other.applied[-1].contributions)


def kinds_fired(seed: int) -> list[str]:
    schedule = Schedule(seed=seed)
    schedule.world.clock.run(schedule.trouble_s)
    return [kind for _, kind, _ in schedule.fired]


def test_a_seed_is_one_run_in_every_process() -> None:
    """Nothing follows the order of a set of names, which differs between processes."""
    code = "from unit.protocol.test_hostile import heads; print(heads())"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hashing, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashing in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].strip() == str(heads())


def heads() -> list[tuple[str, Head | None]]:
    """Where three runs end."""
    return [(peer.name, peer.head) for seed in (3, 7, 11) for peer in Schedule(seed=seed).run().living()]
