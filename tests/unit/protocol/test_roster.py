"""Whom a peer knows of, in a run that many come to and leave."""

from __future__ import annotations

import pytest

from lightning_hivemind.engine.native.protocol.actions import Send
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.protocol.messages import Call, Join
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.plan import Offer
from lightning_hivemind.engine.native.protocol.roster import FORGET_S, Place, Roster
from lightning_hivemind.engine.native.protocol.settings import Settings

HEAD = Head.root("run", "me")
SETTINGS = Settings(run="run", target_samples=16, chunks=1)


@pytest.fixture
def roster() -> Roster:
    return Roster(SETTINGS, "me", reduces=True)


def place(stamp: float) -> Place:
    return Place(head=HEAD, samples=8, stamp=stamp)


def test_who_was_lost_long_ago_is_forgotten_and_offers_do_not_grow(roster: Roster) -> None:
    for number in range(1000):
        now = float(number)
        roster.record(f"p{number}", place(now), now, outdated=False)
        roster.lost(f"p{number}", now)
        roster.forget(now)
    assert len(roster.out_of_reach) == FORGET_S
    roster.forget(1000 + FORGET_S)
    assert roster.out_of_reach == ()
    assert roster.head_of("p999") is None


def test_who_lives_or_came_back_is_not_forgotten(roster: Roster) -> None:
    for name in ("lives", "back", "cut off"):
        roster.record(name, place(1.0), 0.0, outdated=False)
    for name in ("back", "cut off"):
        roster.lost(name, 0.0)
    roster.alive("back")
    roster.record("cut off", place(2.0), 1.0, outdated=False)
    roster.record("cut off", place(3.0), 2.0, outdated=False)
    roster.forget(FORGET_S + 1.0)
    assert (roster.living(), roster.cut) == (["back", "lives"], ("cut off",))


def test_until_then_an_old_record_does_not_bring_it_back_and_later_one_is_of_a_peer_that_is_new(roster: Roster) -> None:
    roster.record("p", place(2.0), 0.0, outdated=False)
    roster.lost("p", 0.0)
    roster.forget(FORGET_S - 1.0)
    assert not roster.record("p", place(1.0), FORGET_S - 1.0, outdated=False)
    roster.forget(FORGET_S)
    assert roster.record("p", place(3.0), FORGET_S, outdated=False)
    assert roster.living() == ["p"]


@pytest.mark.parametrize(("later_s", "cut"), [(FORGET_S - 1.0, ("gone",)), (FORGET_S, ())])
def test_who_is_forgotten_is_in_no_offer(later_s: float, cut: tuple[str, ...]) -> None:
    me, round_id = Peer(SETTINGS, "me", b"life"), bytes(16)
    me.adopt(HEAD, (), 0.0)
    for name in ("gone", "leads"):
        me.saw(name, place(1.0), 0.0)
    me.lost("gone", 0.0)
    me.tick(later_s)
    me.receive("leads", Call(round=round_id, head=HEAD), later_s)
    me.join(round_id, Offer(contribution=None), later_s)
    (join,) = [one.message for one in me.take() if isinstance(one, Send) and isinstance(one.message, Join)]
    assert join.offer.cut == cut


def test_who_was_forgotten_is_the_last_to_lead(roster: Roster) -> None:
    """Its call may have waited here for the end of a long round."""
    assert roster.outranks("me", "forgotten", 0)
    assert not roster.outranks("forgotten", "me", 0)
