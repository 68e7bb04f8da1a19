"""The quick core answers as the protocol's own does, whatever it hears; and so a forecast is the same with both."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, Head
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Plan
from lightning_hivemind.engine.native.protocol.roster import FORGET_S, Place, Roster
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.simulation import forecast as forecast_module
from lightning_hivemind.simulation.forecast import Forecast, forecast
from lightning_hivemind.simulation.paced import PacedPeer
from lightning_hivemind.simulation.quick import QuickRoster, Ranks, computed_once
from lightning_hivemind.simulation.scenario import Scenario

SETTINGS = Settings(run="run", target_samples=64, chunks=3)
NAMES = [f"p{number}" for number in range(6)]
HEADS = [Head(epoch=epoch, lineage=bytes([number]), samples=8 * epoch) for epoch in range(3) for number in range(2)]


@pytest.mark.parametrize("seed", range(60))
def test_a_quick_roster_answers_as_the_plain_one(seed: int) -> None:
    chance = random.Random(seed)
    ranks = Ranks("run")
    ranks.names += NAMES
    reduces = chance.random() < 0.5
    plain, quick = Roster(SETTINGS, "p0", reduces), QuickRoster(SETTINGS, "p0", reduces, ranks)
    probed: list[list[str]] = []
    for stamp in range(200):
        peer, head, other = chance.choice(NAMES), chance.choice(HEADS), chance.choice(HEADS)
        samples, flag = chance.randint(0, 40), chance.random() < 0.5
        what = chance.choice(
            (
                "record",
                "note",
                "lost",
                "forget",
                "alive",
                "moved",
                "let_pass",
                "told",
                "came",
                "begin_anew",
                "samples",
                "cuts_of",
                "probe",
            )
        )
        for one in (plain, quick):
            match what:
                case "record":
                    place = Place(head=head, samples=samples, reduces=flag, cuts=samples % 3, stamp=stamp - samples)
                    one.record(peer, place, stamp, outdated=not flag)
                case "note":
                    one.note(peer, head, samples, outdated=flag)
                case "lost":
                    one.lost(peer, stamp)
                case "forget":
                    one.forget(stamp + FORGET_S - samples)
                case "alive" | "let_pass":
                    getattr(one, what)(peer)
                case "moved":
                    one.moved({peer, "p1", "p2"}, head, other, stamp)
                case "came":
                    one.came({peer: samples, "p1": 0})
                case "told":
                    one.told(samples)
                case "cuts_of":
                    one.cuts_of(peer, samples % 3)
                case "probe":
                    probed.append(one.to_probe(stamp))
                case "begin_anew":
                    one.begin_anew()
                case _:
                    one.samples = samples
        assert probed[::2] == probed[1::2]
        assert (quick.living(), quick.cut) == (plain.living(), plain.cut)
        asked = chance.choice(HEADS)
        assert quick.candidate(asked) == plain.candidate(asked)
        assert quick.progress(asked) == plain.progress(asked)
        assert quick.enough(asked) == plain.enough(asked)


def test_properties_are_computed_once_and_put_back() -> None:
    before = vars(Commit)["head"], vars(Plan)["contributors"]
    one = Contribution(peer="a", number=1, samples=8)
    commit = Commit(round=b"r", parent=HEADS[0], contributions=(one,), digest=b"d")
    head = commit.head
    with computed_once():
        assert commit.head == head
        assert commit.head is commit.head
    assert (vars(Commit)["head"], vars(Plan)["contributors"]) == before


class PlainPeer(Peer):
    """The protocol's own, and what :class:`.PacedWorld` asks of it."""

    wants_something = True


def forecast_of(scenario: Scenario) -> tuple[Forecast, list[tuple[int, float]]]:
    """With the time of each step."""
    steps: list[tuple[int, float]] = []
    found = forecast(scenario, lambda *step: steps.append(step))
    return found, steps


CHURN = Scenario(peers=8, parameters=200_000, batch_s=2.0, steps=10, churn_per_min=12.0, restart_s=5.0)
LONG = Scenario(peers=12, parameters=1_000_000, steps=6, churn_per_min=20.0, restart_s=5.0, averaging_timeout=10.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scenario", [CHURN, LONG], ids=["short rounds", "long rounds"])
def test_a_forecast_is_the_same_with_the_plain_core(
    scenario: Scenario, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = replace(scenario, seed=seed)
    quick = forecast_of(scenario)

    def make_plain(peer: PacedPeer, tag: str) -> Peer:
        return PlainPeer(peer.settings, peer.name, tag.encode(), reduces=peer.habits.reduces)

    monkeypatch.setattr(PacedPeer, "_make_core", make_plain)
    monkeypatch.setattr(forecast_module, "computed_once", contextlib.nullcontext)
    assert forecast_of(scenario) == quick
    assert quick[0].crashes > 3
    assert quick[0].steps == scenario.steps
