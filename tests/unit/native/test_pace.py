"""Who waits for whom: peers of like speed for one another, nobody for a slow one."""

from __future__ import annotations

import pytest

from lightning_hivemind.engine.native.pace import LEAST_S, OVERTIME, REMEMBERED, Pace

TARGET, LONGEST_S = 100, 20.0


def pace(*, batch_s: float, step_s: float, others: int, longest_s: float = LONGEST_S) -> tuple[Pace, float]:
    """As it is after some batches and steps, and the time of the last step, between two batches."""
    one, now = Pace(TARGET, longest_s=longest_s, gathers_s=LONGEST_S), 1000.0
    for _ in range(3):
        one.begin_batch(now - batch_s)
        one.end_batch(now)
    for number in range(4):
        one.called(now + number * step_s)
        one.step(others, now + number * step_s, mine=TARGET - others, others=1)
    return one, now + 3 * step_s


# ---------------------------------------------------------------------- in the middle of a batch


def test_a_share_is_what_a_peer_gave_of_steps_before_and_at_least_an_equal_one() -> None:
    assert Pace(TARGET, longest_s=LONGEST_S).share(4) == 25, "it knows of no step"
    quick, _ = pace(batch_s=1.0, step_s=1.0, others=20)
    assert quick.share(2) == pytest.approx(80)
    assert pace(batch_s=1.0, step_s=1.0, others=80)[0].share(2) == 50
    more, now = pace(batch_s=1.0, step_s=1.0, others=50)
    for number in range(1, 30):
        more.step(150, now + number, mine=150, others=1)
    assert more.share(2) == pytest.approx(50, rel=1e-3), "of the target, however much the steps were of"
    helped = Pace(TARGET, longest_s=LONGEST_S)
    helped.step(0, now, mine=TARGET, others=0)
    assert helped.share(4) == TARGET, "peers that only help give nothing"


def test_who_computes_nothing_joins_at_once() -> None:
    assert Pace(TARGET, longest_s=LONGEST_S).join_at(5.0) == 5.0
    one, now = pace(batch_s=1.0, step_s=1.0, others=50)
    assert one.join_at(now + 9.0) == now + 9.0


def test_a_batch_of_the_others_length_is_waited_for() -> None:
    one, now = pace(batch_s=4.0, step_s=4.0, others=50)
    one.begin_batch(now)
    assert one.join_at(now + 1.0) == pytest.approx(now + OVERTIME * 4.0)
    one.end_batch(now + 4.0)
    assert one.join_at(now + 4.0) == now + 4.0


def test_a_batch_longer_than_the_others_steps_is_not_waited_for() -> None:
    one, now = pace(batch_s=5.0, step_s=2.0, others=50)
    one.begin_batch(now)
    assert one.join_at(now + 0.1) == now + 0.1


@pytest.mark.parametrize(("mine", "waits"), [(4, False), (20, False), (21, True), (62, True)])
def test_a_batch_of_who_gives_much_less_than_each_of_the_others_is_not_waited_for(mine: int, waits: bool) -> None:
    """Though it is hardly longer than their step: all of them would lose a quarter for a thirtieth of the samples."""
    one, now = Pace(2 * 62 + 4, longest_s=LONGEST_S), 1000.0
    for _ in range(12):
        one.begin_batch(now)
        one.called(now + 0.47)
        one.end_batch(now := now + 0.58)
        one.step(2 * 62, now, mine=mine, others=2)
    one.begin_batch(now)
    assert (one.join_at(now + 0.47) > now + 0.47) is waits


def test_a_round_is_expected_to_call_as_long_after_a_step_as_the_last_ones_did() -> None:
    one, now = pace(batch_s=1.0, step_s=4.0, others=50)
    assert not one.calls_within(2.0, now + 1.0)
    assert one.calls_within(2.0, now + 3.0)
    assert one.calls_within(2.0, now + 5.0), "it is overdue"
    assert not one.calls_within(2.0, now + 7.0), "something holds it up: it may take for ever"
    assert not Pace(TARGET, longest_s=LONGEST_S).calls_within(1e9, now), "no step was made yet"


def test_who_has_only_joined_is_waited_for_as_soon_as_it_gives_as_much_as_the_others() -> None:
    one, now = pace(batch_s=1.0, step_s=1.0, others=50)
    for mine in (0, 0, 0, 50, 50, 50, 50):
        one.step(50, now := now + 1.0, mine=mine, others=1)
    one.begin_batch(now)
    assert one.join_at(now + 0.9) > now + 0.9


def test_the_first_batch_is_waited_for_but_not_long() -> None:
    one = Pace(TARGET, longest_s=LONGEST_S)
    one.begin_batch(0.0)
    assert one.join_at(0.5) - 0.5 <= LEAST_S
    assert one.join_at(0.5) > 0.5


def test_the_first_batch_of_who_has_joined_is_not_waited_for_and_the_second_is() -> None:
    """It compiles its model, say, while the others have a step under way."""
    one = Pace(TARGET, longest_s=LONGEST_S)
    one.join()
    one.begin_batch(1000.0)
    assert one.join_at(1000.3) == 1000.3
    one.end_batch(1001.0)
    one.begin_batch(1001.0)
    assert one.join_at(1001.1) > 1001.1


def test_a_batch_that_does_not_end_is_waited_for_no_longer_than_anybody() -> None:
    one, now = pace(batch_s=10.0, step_s=10.0, others=50, longest_s=3.0)
    one.begin_batch(now)
    assert one.join_at(now + 1.0) == pytest.approx(now + 1.0 + 3.0)
    one, now = pace(batch_s=4.0, step_s=4.0, others=50)
    one.begin_batch(now)
    assert one.join_at(now + 1000.0) <= now + 1000.0 + LEAST_S


def test_who_waits_for_nobody_joins_at_once() -> None:
    one, now = pace(batch_s=4.0, step_s=4.0, others=50, longest_s=0.0)
    one.begin_batch(now)
    assert one.join_at(now + 1.0) == now + 1.0


def test_a_slow_peer_that_becomes_quick_is_waited_for_again() -> None:
    one, now = pace(batch_s=40.0, step_s=2.0, others=50)
    one.begin_batch(now)
    assert one.join_at(now) == now, "it never was slow"
    one.end_batch(now := now + 1.0)
    one.begin_batch(now)
    assert one.join_at(now) > now


def test_a_quick_peer_that_becomes_slow_is_soon_not_waited_for() -> None:
    """Though the others, who wait for it at first, have slow steps then, too."""
    one, now = pace(batch_s=1.0, step_s=1.0, others=50)
    batches = 0
    while True:
        one.begin_batch(now)
        one.called(now := now + 1.0)
        if one.join_at(now) == now:
            break
        one.end_batch(now := now + 19.0)
        one.step(50, now, mine=50, others=1)
        batches += 1
    assert 1 <= batches <= REMEMBERED


def test_one_long_batch_or_one_early_call_changes_nothing() -> None:
    one, now = pace(batch_s=1.0, step_s=1.0, others=50)
    one.begin_batch(now)
    one.end_batch(now := now + 30.0)
    one.step(50, now, mine=50, others=1)
    one.called(now := now + 0.001)
    one.step(50, now, mine=50, others=1)
    one.begin_batch(now)
    assert one.join_at(now) > now


def test_a_batch_that_nobody_began_is_none() -> None:
    one, now = pace(batch_s=1.0, step_s=1.0, others=50)
    one.end_batch(now + 500.0)
    one.begin_batch(now + 500.0)
    assert one.join_at(now + 500.0) > now + 500.0


# ---------------------------------------------------------------------- between two batches


def test_who_would_miss_the_target_with_another_batch_holds() -> None:
    """Two equal peers: this one has finished its batch a little before the other."""
    one, now = pace(batch_s=2.0, step_s=2.0, others=50)
    now += 1.9
    assert now + 0.1 <= one.hold_until(50, now) <= now + 0.1 + 2.0


def test_who_once_began_a_batch_too_many_does_not_do_so_for_ever() -> None:
    """The target is reached when the other's batch ends, but the step then waits for the batch that was begun here."""
    one, now = Pace(TARGET, longest_s=LONGEST_S), 1000.0
    for _ in range(4):
        for end in (0.2, 0.4, 0.6, 0.79):
            one.begin_batch(now + end - 0.2)
            one.end_batch(now + end)
        one.begin_batch(now + 0.79)
        one.called(now + 0.8)
        one.end_batch(now + 0.99)
        one.step(50, now := now + 1.0, mine=50, others=1)
    assert now + 0.8 <= one.hold_until(50, now + 0.79) <= now + 1.01


def test_when_the_target_is_reached_already_nobody_begins_a_batch() -> None:
    one, now = pace(batch_s=2.0, step_s=2.0, others=50)
    assert one.hold_until(TARGET, now) == pytest.approx(now + 2.0)


def test_while_there_is_time_for_a_batch_it_is_begun() -> None:
    one, now = pace(batch_s=1.0, step_s=10.0, others=50)
    assert one.hold_until(10, now + 1.0) == now + 1.0


def test_a_slow_peer_holds_when_the_target_is_near_and_no_longer_than_anybody() -> None:
    one, now = pace(batch_s=100.0, step_s=10.0, others=90, longest_s=5.0)
    assert one.hold_until(10, now + 9.0) == now + 9.0 + 5.0


@pytest.mark.parametrize("samples", [0, 40])
def test_who_is_alone_never_holds(samples: int) -> None:
    one, now = pace(batch_s=2.0, step_s=2.0, others=0)
    assert one.hold_until(samples, now + 1.9) == now + 1.9


def test_who_has_nothing_to_give_does_not_hold() -> None:
    one, now = pace(batch_s=2.0, step_s=2.0, others=90)
    assert one.hold_until(0, now + 1.9) == now + 1.9


def test_who_knows_nothing_yet_does_not_hold() -> None:
    one = Pace(TARGET, longest_s=LONGEST_S)
    assert one.hold_until(50, 3.0) == 3.0
    one.begin_batch(0.0)
    one.end_batch(1.0)
    one.step(50, 1.0, mine=50, others=1)
    assert one.hold_until(50, 3.0) == 3.0


def test_steps_at_one_instant_are_no_speed() -> None:
    one, now = pace(batch_s=2.0, step_s=0.0, others=50)
    assert one.hold_until(50, now) == now


def test_how_many_steps_there_will_be_is_known_from_those_before() -> None:
    one, now = pace(batch_s=1.0, step_s=2.0, others=50)
    assert one.steps_within(0.5, now) == 0
    assert one.steps_within(1.5, now) == 0
    assert one.steps_within(1.7, now) == 1, "it would be there in the last moment"
    assert one.steps_within(0.5, now + 1.5) == 1
    assert one.steps_within(4.0, now) == 2
    assert one.steps_within(0.5, now + 100.0) == 1, "while no step is made, none is missed"
    assert Pace(TARGET, longest_s=LONGEST_S).steps_within(100.0, now) == 0


def test_a_swarm_that_makes_no_step_any_more_needs_everybody() -> None:
    one, now = pace(batch_s=1.0, step_s=4.0, others=50)
    assert not one.stands_still(now + 19.0)
    assert one.stands_still(now + 21.0)
    assert Pace(TARGET, longest_s=LONGEST_S).stands_still(0.0)


def test_parts_that_are_to_be_gathered_are_waited_for_and_asked_for() -> None:
    stale = [True]
    one, now = Pace(TARGET, longest_s=0.0, gathers_s=LONGEST_S, is_stale=lambda: stale[0]), 1000.0
    assert now < one.join_at(now) <= now + LONGEST_S
    assert one.wanted
    stale[0] = False
    assert one.join_at(now) == now


def test_in_the_midst_of_a_batch_they_are_asked_for_at_its_end() -> None:
    """Who is not waited for otherwise is not for that."""
    one, now = Pace(TARGET, longest_s=0.0, gathers_s=LONGEST_S, is_stale=lambda: True), 1000.0
    one.join()
    one.begin_batch(now)
    assert one.join_at(now) == now
    assert one.wanted


def test_who_is_not_waited_for_gathers_before_a_round_calls() -> None:
    one, now = pace(batch_s=1.0, step_s=4.0, others=50)
    assert not any(one.gathers_ahead(now + after) for after in (2.0, 4.0)), "it is waited for, as far as is known"
    for _ in range(6):
        one.step(50, now := now + 4.0, mine=1, others=1)
    assert [one.gathers_ahead(now + after) for after in (2.0, 3.5, 6.0)] == [False, True, False]


def test_so_does_who_needs_longer_for_a_batch_than_anybody_waits() -> None:
    one, now = Pace(TARGET, longest_s=1.0, gathers_s=1.0), 1000.0
    for _ in range(3):
        one.begin_batch(now)
        one.end_batch(now + 3.0)
        one.step(50, now := now + 4.0, mine=50, others=1)
    assert [one.gathers_ahead(now + after) for after in (0.5, 3.0)] == [False, True]
