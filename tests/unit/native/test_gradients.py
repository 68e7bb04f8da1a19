"""What a peer gathers, gives, gets back, and puts where the optimizer looks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.low_rank import LowRank
from lightning_hivemind.engine.native.means import Mean
from lightning_hivemind.engine.native.protocol.lineage import MOST_SAMPLES, Contribution
from lightning_hivemind.engine.native.seam import Parcel
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.sums import Summing


def parameters() -> list[Tensor]:
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    return [torch.nn.Parameter(torch.zeros(2, 3)), frozen, torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]


@pytest.fixture
def gradients() -> Gradients:
    return Gradients("me", parameters(), Statistics([]), max_staleness=1)


def add(gradients: Gradients, value: float, samples: int, epoch: int = 0) -> int:
    for parameter in gradients.parameters:
        parameter.grad = torch.full_like(parameter, value)
    gradients.add(samples, epoch)
    return gradients.samples


def marked(gradients: Gradients) -> tuple[Contribution, Tensor, list[float]]:
    """What is given, and which parameters have a gradient."""
    found = gradients.give()
    assert found is not None
    contribution, values = found
    assert values.numel() == gradients.elements
    return contribution, values[: -gradients.marks], values[-gradients.marks :].tolist()


def given(gradients: Gradients) -> tuple[Contribution, Tensor]:
    """Where every parameter has a gradient."""
    contribution, values, marks = marked(gradients)
    assert set(marks) == {1.0}
    return contribution, values


def left_out(value: float) -> Tensor:
    """Of both parameters."""
    return torch.cat((torch.full((10,), value), torch.zeros(2)))


def test_one_batch_is_given_bit_for_bit(gradients: Gradients) -> None:
    first, last = gradients.parameters
    first.grad, last.grad = torch.randn(2, 3), torch.randn(4, dtype=torch.bfloat16)
    assert gradients.add(7, 0) == 0
    assert gradients.samples == 7
    contribution, values = given(gradients)
    assert contribution.samples == 7
    assert torch.equal(values, torch.cat((first.grad.flatten(), last.grad.float())))


def test_batches_of_unlike_size_are_averaged_over_samples(gradients: Gradients) -> None:
    add(gradients, 1.0, 6)
    assert add(gradients, 4.0, 2) == 8
    contribution, values = given(gradients)
    assert contribution.samples == 8
    assert torch.allclose(values, torch.full((10,), 1.75))


@pytest.mark.parametrize("before", [0, 1, 2, 3, 4, 16])
def test_equal_batches_are_what_a_plain_trainer_accumulates(before: int) -> None:
    """However many there were in the step before."""
    weights = torch.nn.Parameter(torch.zeros(1000))
    gradients, plain = Gradients("me", [weights], Statistics([]), max_staleness=1), torch.zeros(1000)
    for _ in range(before):
        weights.grad = torch.randn(1000)
        gradients.add(3, 0)
    if before:
        gradients.committed([given(gradients)[0]], 1)
    for _ in range(4):
        weights.grad = torch.randn(1000)
        plain += weights.grad / 4
        gradients.add(3, 0)
    assert torch.equal(given(gradients)[1], plain)


def test_a_parameter_without_a_gradient_counts_as_zeros(gradients: Gradients) -> None:
    add(gradients, 2.0, 4)
    gradients.parameters[0].grad = None
    gradients.add(4, 0)
    _, values = given(gradients)
    assert values.tolist() == [1.0] * 6 + [2.0] * 4


@pytest.mark.parametrize("in_place", [False, True])
def test_it_is_told_of_which_parameters_there_is_no_gradient_at_all(in_place: bool) -> None:
    gradients = Gradients("me", parameters(), Statistics([]), max_staleness=1, summing=Summing(in_place=in_place))
    first, last = gradients.parameters
    for number, reached in enumerate((first, last, None)):
        for parameter in gradients.parameters:
            parameter.grad = torch.ones_like(parameter) if parameter is reached else None
        gradients.weight(4)
        gradients.add(4, number)
        contribution, _, marks = marked(gradients)
        assert marks == [float(parameter is reached) for parameter in gradients.parameters]
        gradients.committed([contribution], number + 1)
    assert not in_place or first.grad is None, "nothing made one of it"


def test_it_is_told_of_all_that_is_given_together(gradients: Gradients) -> None:
    first, last = gradients.parameters
    first.grad = torch.ones_like(first)
    gradients.add(4, 0)
    assert marked(gradients)[2] == [1.0, 0.0]
    gradients.returned()
    first.grad, last.grad = None, torch.ones_like(last)
    gradients.add(4, 0)
    assert marked(gradients)[2] == [1.0, 1.0]


def test_what_was_left_out_of_a_parameter_is_something_of_it(gradients: Gradients) -> None:
    gradients.committed([], 0, torch.cat((torch.zeros(9), torch.ones(1), torch.zeros(2))))
    for parameter in gradients.parameters:
        parameter.grad = None
    gradients.add(4, 0)
    _, values, marks = marked(gradients)
    assert values.tolist() == [0.0] * 9 + [0.25]
    assert marks == [0.0, 1.0]


@pytest.mark.parametrize("way", ["beside", "in place", "low rank", "top-k"])
def test_what_is_frozen_during_the_fit_is_something_once_more_at_most(way: str) -> None:
    """Where nobody trains it any more a zero gradient would let weight decay and momentum move it."""
    trained = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    rank = LowRank([(2, 3), (4,)], [2], rank=1, min_compression_ratio=-9.0) if way == "low rank" else None
    gradients = Gradients(
        "me", trained, Statistics([]), max_staleness=1, summing=Summing(in_place=way == "in place"), low_rank=rank
    )

    def marks(epoch: int, *reached: Tensor) -> list[float]:
        if rank is not None:
            rank.begin(epoch)
        for parameter in trained if way != "in place" else ():
            parameter.grad = None
        torch.autograd.backward(sum((one.sum() for one in reached), torch.zeros(())))
        gradients.add(4, epoch)
        found = gradients.give()
        assert found is not None
        left = torch.cat((torch.ones(10), torch.zeros(2))) if way == "top-k" else None
        gradients.committed([found[0]], epoch + 1, left)
        return found[1][-2:].tolist()

    first, last = trained
    assert marks(0, first, last) == [1.0, 1.0]
    first.requires_grad_(False)
    assert marks(1, last) == [0.0, 1.0]
    assert marks(2, last) == [0.0, 1.0]
    first.requires_grad_(True)
    assert marks(3, first, last) == [1.0, 1.0]


def test_nothing_gathered_is_nothing_given(gradients: Gradients) -> None:
    assert gradients.give() is None


def test_what_a_round_has_does_not_change_while_batches_go_on(gradients: Gradients) -> None:
    add(gradients, 1.0, 8)
    _, values = given(gradients)
    assert add(gradients, 5.0, 8) == 16
    assert values.tolist() == [1.0] * 10
    assert gradients.committed([], 0) == 0


def test_after_a_failed_round_everything_is_given_again_with_what_came_since(gradients: Gradients) -> None:
    add(gradients, 1.0, 6)
    first, _ = given(gradients)
    add(gradients, 4.0, 2)
    gradients.returned()
    assert gradients.samples == 8
    second, values = given(gradients)
    assert (second.samples, second.number > first.number) == (8, True)
    assert torch.allclose(values, torch.full((10,), 1.75))


def test_what_is_summed_in_place_is_ready_between_two_batches_only() -> None:
    gradients = Gradients("me", parameters(), Statistics([]), max_staleness=1, summing=Summing(in_place=True))
    add(gradients, 1.0, 6)
    assert (gradients.samples, gradients.ready) == (6, 6)
    gradients.begin_batch()
    assert (gradients.samples, gradients.ready) == (6, 0)
    assert gradients.give() is None
    gradients.end_batch()
    assert gradients.ready == 6


def test_numbers_grow_over_restarts(gradients: Gradients) -> None:
    """Else what an earlier life of this peer gave, or gives late, might count as this one's."""
    numbers = []
    for life in (gradients, Gradients("me", parameters(), Statistics([]), max_staleness=1)):
        for _ in range(3):
            add(life, 1.0, 6)
            numbers.append(given(life)[0].number)
            life.returned()
    assert numbers == sorted(set(numbers))


def test_what_is_committed_is_gone_and_the_rest_is_kept(gradients: Gradients) -> None:
    add(gradients, 1.0, 6)
    mine, _ = given(gradients)
    add(gradients, 4.0, 2)
    assert gradients.committed([mine], 1) == 0
    contribution, values = given(gradients)
    assert contribution.samples == 2
    assert values.tolist() == [4.0] * 10


def test_what_was_left_out_is_added_to_what_is_given_next(gradients: Gradients) -> None:
    """(By sums: 6 samples that left out 0.5 each weigh as much as 3 that left out 1.)"""
    add(gradients, 1.0, 6)
    mine, _ = given(gradients)
    gradients.committed([mine], 1, left_out(3.0))
    add(gradients, 4.0, 2, epoch=1)
    for _ in range(2):
        mine, values = given(gradients)
        assert values.tolist() == [5.5] * 10
        gradients.returned()  # the round came to nothing, and changes nothing
    given(gradients)
    gradients.committed([], 2, left_out(1.0))  # not in the commit, but it has reduced for it
    mine, values = given(gradients)
    assert values.tolist() == [6.0] * 10
    gradients.committed([mine], 3, left_out(0.0))
    add(gradients, 4.0, 2, epoch=3)
    assert given(gradients)[1].tolist() == [4.0] * 10


@pytest.mark.parametrize("in_place", [False, True])
def test_a_batch_that_was_begun_in_another_lineage_does_not_count_in_this_one(in_place: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    gradients = Gradients("me", [weight], Statistics([]), max_staleness=1, summing=Summing(in_place=in_place))
    gradients.stands_at(7)
    for lost in (8, 0):
        gradients.begin_batch()
        assert gradients.weight(8) == 1.0
        weight.grad = torch.ones(2)
        if lost:
            assert gradients.moved(8) == 0
        assert gradients.add(8, 7) == lost
        gradients.end_batch()
        assert gradients.samples == 8 - lost


def test_a_sum_in_place_follows_the_loss_scale() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    gradients = Gradients("me", [weight], Statistics([]), max_staleness=1, summing=Summing(in_place=True))
    assert gradients.weight(4) == 1.0
    weight.grad = torch.full((2,), 8.0)
    gradients.add(4, 0, 8.0)
    gradients.rescale(2.0)
    weight.grad += 16.0
    gradients.add(4, 0, 16.0)
    given = gradients.give()
    assert given is not None
    assert given[1].tolist() == [1.0, 1.0, 1.0], "the mean of two ones, and that there is one"


def test_who_loses_track_of_its_contributions_forgets_what_was_left_out(gradients: Gradients) -> None:
    gradients.committed([], 1, left_out(3.0))
    gradients.moved(7)
    add(gradients, 4.0, 2, epoch=7)
    assert given(gradients)[1].tolist() == [4.0] * 10


def test_a_commit_without_this_peer_leaves_its_gradients_until_they_are_too_old(gradients: Gradients) -> None:
    add(gradients, 1.0, 6, epoch=0)
    given(gradients)
    assert gradients.committed([], 1) == 0
    assert gradients.samples == 6
    add(gradients, 1.0, 3, epoch=1)
    assert gradients.committed([], 2) == 6
    assert gradients.samples == 3
    assert gradients.committed([], 3) == 3
    assert gradients.samples == 0


def test_what_nobody_can_use_is_not_given_again(gradients: Gradients) -> None:
    add(gradients, float("nan"), 8)
    gradients.give()
    add(gradients, 1.0, 4)
    assert (gradients.refused(), gradients.refused()) == (8, 0)
    assert gradients.committed((), 1) == 0
    contribution, values = given(gradients)
    assert contribution.samples == 4
    assert torch.equal(values, torch.ones(10))


def test_discarding_forgets_what_no_round_has(gradients: Gradients) -> None:
    add(gradients, 1.0, 6)
    mine, _ = given(gradients)
    add(gradients, float("nan"), 2)
    assert gradients.discard() == 2
    assert gradients.samples == 6
    gradients.committed([mine], 1)
    assert gradients.samples == 0


def test_a_batch_that_is_too_old_when_it_is_finished_is_dropped(gradients: Gradients) -> None:
    gradients.committed([], 3)
    for parameter in gradients.parameters:
        parameter.grad = torch.ones_like(parameter)
    assert gradients.add(5, 1) == 5
    assert gradients.add(4, 2) == 0
    assert gradients.samples == 4


def test_what_came_back_does_not_count_again_when_its_round_turns_out_to_be_committed(gradients: Gradients) -> None:
    add(gradients, 1.0, 6)
    mine, _ = given(gradients)
    gradients.returned()
    add(gradients, 3.0, 2)
    assert gradients.committed([mine], 1) == 0
    contribution, values = given(gradients)
    assert contribution.samples == 2
    assert values.tolist() == [3.0] * 10


def test_what_was_given_again_with_more_is_lost_but_for_what_is_committed(gradients: Gradients) -> None:
    add(gradients, 1.0, 6)
    mine, _ = given(gradients)
    gradients.returned()
    add(gradients, 3.0, 2)
    again, _ = given(gradients)
    assert again.samples == 8
    gradients.returned()
    assert gradients.committed([mine], 1) == 2
    assert gradients.samples == 0


def test_who_goes_where_its_contributions_cannot_be_followed_keeps_nothing(gradients: Gradients) -> None:
    add(gradients, 1.0, 6)
    given(gradients)
    add(gradients, 1.0, 3)
    assert gradients.moved(7) == 9
    assert gradients.samples == 0


def test_a_sum_in_place_that_is_discarded_begins_anew_with_the_next_batch() -> None:
    """A batch that overflowed was added to it: without this every batch after it would overflow, too."""
    weight = torch.zeros(2, requires_grad=True)
    gradients = Gradients("me", [weight], Statistics([]), max_staleness=1, summing=Summing(in_place=True))
    weight.grad = torch.tensor([float("inf"), 1.0])
    gradients.begin_batch()
    assert gradients.discard() == 0
    assert gradients.weight(4) == 1.0
    gradients.begin_batch()
    weight.grad += torch.tensor([3.0, 5.0])
    assert gradients.add(4, 0) == 0
    assert given(gradients)[1].tolist() == [3.0, 5.0]


@pytest.fixture
def in_place() -> tuple[Gradients, Tensor]:
    """One weight, whose gradient the batches add up in."""
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.zeros(2)
    return Gradients("me", [weight], Statistics([]), max_staleness=1, summing=Summing(in_place=True)), weight


def batch_in_place(gradients: Gradients, weight: Tensor, value: float, samples: int) -> None:
    factor = gradients.weight(samples)
    gradients.begin_batch()
    assert weight.grad is not None
    weight.grad += value * factor
    assert gradients.add(samples, 0) == 0


def test_a_round_that_calls_while_an_average_is_in_the_buffers_does_not_clear_it(
    in_place: tuple[Gradients, Tensor],
) -> None:
    """It takes what was summed before, which has made room."""
    gradients, weight = in_place
    batch_in_place(gradients, weight, 3.0, 4)
    with gradients.lent():
        weight.grad = torch.full((2,), 7.0)
        contribution, values = given(gradients)
        assert weight.grad.tolist() == [7.0, 7.0]
    assert (contribution.samples, values.tolist()) == (4, [3.0, 3.0])
    gradients.begin_batch()
    assert weight.grad.tolist() == [0.0, 0.0], "the next sum begins at zero"
    batch_in_place(gradients, weight, 1.0, 4)
    assert gradients.samples == 8


def test_what_made_room_for_an_average_and_what_comes_back_from_a_round_are_both_kept(
    in_place: tuple[Gradients, Tensor],
) -> None:
    gradients, weight = in_place
    batch_in_place(gradients, weight, 3.0, 4)
    given(gradients)
    batch_in_place(gradients, weight, 6.0, 8)
    with gradients.lent():
        pass
    gradients.returned()
    again = given(gradients)
    assert (again[0].samples, again[1].tolist()) == (12, [5.0, 5.0])
    batch_in_place(gradients, weight, 2.0, 2)
    with gradients.lent():
        pass
    assert gradients.committed([again[0]], 1) == 0
    assert gradients.samples == 2, "only what the commit has is done with"


def test_a_batch_whose_step_is_left_out_loses_nothing(in_place: tuple[Gradients, Tensor]) -> None:
    gradients, weight = in_place
    batch_in_place(gradients, weight, 3.0, 4)
    gradients.begin_batch()
    gradients.end_batch()
    with gradients.lent():
        pass
    assert gradients.samples == 4
    assert given(gradients)[1].tolist() == [3.0, 3.0]


def test_a_sparse_gradient_counts_as_a_dense_one() -> None:
    for in_place in (False, True):
        weight = torch.zeros(3, 2, requires_grad=True)
        gradients = Gradients("me", [weight], Statistics([]), max_staleness=1, summing=Summing(in_place=in_place))
        assert gradients.weight(1) == 1.0
        weight.grad = torch.sparse_coo_tensor([[1]], [[4.0, 6.0]], (3, 2))
        gradients.add(1, 0)
        assert given(gradients)[1].tolist() == [0.0, 0.0, 4.0, 6.0, 0.0, 0.0]


# ---------------------------------------------------------------------- handed from one peer to another


def handed(gradients: Gradients, steps: int = 0) -> Parcel:
    lost, parcel = gradients.hand_over(steps)
    assert not lost
    assert parcel is not None
    return parcel


def test_a_gradient_that_another_peer_carries_is_given_with_its_own_by_samples(gradients: Gradients) -> None:
    other = Gradients("other", parameters(), Statistics([]), max_staleness=1)
    add(other, 1.0, 30)
    parcel = handed(other)
    assert (parcel.samples, parcel.epoch) == (30, 0)
    assert other.samples == 0
    add(gradients, 3.0, 10)
    assert gradients.carry(parcel)
    assert gradients.samples == gradients.ready == 40
    contribution, values = given(gradients)
    assert contribution.samples == 40
    assert torch.equal(values, torch.full((10,), 1.5))
    assert gradients.committed([contribution], 1) == 0
    assert gradients.samples == 0


def test_what_is_carried_is_given_though_there_is_nothing_else(gradients: Gradients) -> None:
    assert gradients.carry(Parcel(torch.cat((torch.full((10,), 2.0), torch.tensor([1.0, 0.0]))), 8, 0, 1))
    contribution, values, marks = marked(gradients)
    assert contribution.samples == 8
    assert torch.equal(values, torch.full((10,), 2.0))
    assert marks == [1.0, 0.0]


def test_a_parameter_has_a_gradient_if_one_of_the_two_has_one(gradients: Gradients) -> None:
    first, last = gradients.parameters
    first.grad, last.grad = torch.ones(2, 3), None
    gradients.add(8, 0)
    gradients.carry(Parcel(torch.cat((torch.zeros(6), torch.ones(4), torch.tensor([0.0, 1.0]))), 8, 0, 1))
    _, values, marks = marked(gradients)
    assert marks == [1.0, 1.0]
    assert torch.equal(values, torch.full((10,), 0.5))


def test_what_is_carried_comes_back_from_a_failed_round_and_counts_once(gradients: Gradients) -> None:
    add(gradients, 3.0, 10)
    gradients.carry(Parcel(torch.cat((torch.ones(10), torch.ones(2))), 30, 0, 1))
    first, _ = given(gradients)
    gradients.returned()
    add(gradients, 5.0, 10)
    assert gradients.samples == 50
    second, values = given(gradients)
    assert torch.allclose(values, torch.full((10,), (3.0 * 10 + 5.0 * 10 + 1.0 * 30) / 50))
    assert second.samples == 50
    assert gradients.committed([first], 1) == 10, "the round had it after all: only what came since is lost"
    assert gradients.samples == 0


def test_each_gradient_that_is_carried_gets_old_by_itself(gradients: Gradients) -> None:
    gradients.committed([], 1)
    gradients.carry(Parcel(torch.ones(12), 30, 0, 1))
    add(gradients, 3.0, 10, epoch=1)
    assert gradients.committed([], 2) == 30
    assert gradients.samples == 10
    assert not gradients.carry(Parcel(torch.ones(12), 30, 0, 1))
    assert gradients.too_old(1)
    assert not gradients.too_old(2)


def test_a_round_that_is_under_way_goes_without_what_comes_now(gradients: Gradients) -> None:
    gradients.committed([], 1)
    add(gradients, 3.0, 10, epoch=1)
    given(gradients)
    assert not gradients.carry(Parcel(torch.ones(12), 30, 0, 1)), "for the step after that it is too old"
    assert gradients.carry(Parcel(torch.ones(12), 30, 1, 2))


def test_how_old_a_gradient_may_be_says_the_peer_that_has_computed_it(gradients: Gradients) -> None:
    """Not the one that carries it; and what may be very old is dropped in the end, too, if no step takes it."""
    gradients.committed([], 5)
    assert not gradients.carry(Parcel(torch.ones(12), 30, 1, 4))
    assert gradients.carry(Parcel(torch.ones(12), 30, 1, 5))
    assert gradients.committed([], 6) == 30
    assert gradients.samples == 0
    assert gradients.carry(Parcel(torch.ones(12), 30, 1, 1 << 62))
    gradients.committed([], 8)
    assert gradients.samples == 30, "as if it were of the next step's parameters"
    gradients.committed([], 9)
    assert gradients.samples == 0


def test_what_will_be_too_old_when_it_is_there_is_not_handed_over(gradients: Gradients) -> None:
    add(gradients, 1.0, 10, epoch=0)
    gradients.committed([], 1)
    assert gradients.hand_over(steps=2) == (0, None), "nothing that is here could be there in time"
    assert gradients.samples == 10
    assert gradients.hand_over(steps=1) == (10, None)
    add(gradients, 1.0, 10, epoch=1)
    assert handed(gradients, steps=1).epoch == 1


def test_what_is_too_old_once_the_line_is_free_does_not_drag_down_what_comes_then(gradients: Gradients) -> None:
    add(gradients, 1.0, 10, epoch=0)
    assert gradients.make_fresh(1, in_all=1) == 0
    assert gradients.make_fresh(2, in_all=2) == 0, "nothing could be there in time: rounds may have it yet"
    assert gradients.make_fresh(1, in_all=2) == 10
    add(gradients, 1.0, 6, epoch=0)
    gradients.committed([], 1)
    add(gradients, 1.0, 4, epoch=1)
    assert gradients.make_fresh(1, in_all=1) == 10, "a sum is as old as its oldest batch"
    add(gradients, 1.0, 4, epoch=1)
    assert handed(gradients, steps=1).samples == 4


def test_what_could_not_be_handed_over_is_this_peers_again(gradients: Gradients) -> None:
    add(gradients, 1.0, 10)
    handed(gradients)
    add(gradients, 3.0, 10)
    assert gradients.handed_over(back=True) == 0
    contribution, values = given(gradients)
    assert contribution.samples == 20
    assert torch.equal(values, torch.full((10,), 2.0))


def test_what_was_handed_over_is_gone_whatever_commits_say(gradients: Gradients) -> None:
    add(gradients, 1.0, 10)
    handed(gradients)
    add(gradients, 3.0, 5)
    assert gradients.committed([], 1) == 0
    assert gradients.handed_over(back=False) == 0
    assert gradients.samples == 5


def test_who_loses_track_forgets_what_it_carries(gradients: Gradients) -> None:
    add(gradients, 1.0, 10)
    gradients.carry(Parcel(torch.ones(12), 30, 0, 1))
    assert gradients.moved(7) == 40
    assert gradients.give() is None


def test_what_a_round_had_already_is_given_to_rounds_only(gradients: Gradients) -> None:
    """Only who gave it hears whether that round has it after all."""
    add(gradients, 1.0, 10)
    contribution, _ = given(gradients)
    gradients.returned()
    assert gradients.was_given
    assert gradients.hand_over(0) == (0, None)
    assert gradients.committed([contribution], 1) == 0
    assert not gradients.was_given
    add(gradients, 1.0, 10, epoch=1)
    assert handed(gradients).samples == 10


def test_what_comes_back_to_who_has_gone_elsewhere_is_lost_and_told(gradients: Gradients) -> None:
    add(gradients, 1.0, 10)
    handed(gradients)
    gradients.moved(7)
    assert gradients.handed_over(back=True) == 10
    assert gradients.samples == 0
    add(gradients, 1.0, 10, epoch=7)
    handed(gradients)
    assert gradients.handed_over(back=True) == 0
    assert gradients.samples == 10


def test_of_many_gradients_that_are_carried_there_is_one_sum_for_each_epoch(gradients: Gradients) -> None:
    gradients.committed([], 1)
    for number in range(50):
        assert gradients.carry(Parcel(torch.full((12,), float(number % 2)), 2, number % 2, number % 2 + 1))
    assert len(gradients._carried._means) == 2
    contribution, values = given(gradients)
    assert contribution.samples == 100
    assert torch.allclose(values, torch.full((10,), 0.5))
    gradients.returned()
    assert gradients.carry(Parcel(torch.ones(12), 2, 1, 2)), "what a round has had is not changed"
    assert len(gradients._carried._means) == 3


@pytest.mark.parametrize("carries", [False, True])
def test_what_comes_back_is_not_lost_for_want_of_memory(
    gradients: Gradients, monkeypatch: pytest.MonkeyPatch, carries: bool
) -> None:
    add(gradients, 1.0, 6)
    if carries:
        assert gradients.carry(Parcel(torch.ones(gradients.elements), 4, 0, 1))
    given(gradients)
    add(gradients, 4.0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(gradients._memory, "floats", no_memory)
        gradients.returned()  # nothing to merge it with yet
        with pytest.raises(MemoryError):
            gradients.give()
    assert gradients.samples == (12 if carries else 8)
    assert given(gradients)[0].samples == (12 if carries else 8)


def test_a_contribution_stays_until_there_is_memory_to_merge_it(
    gradients: Gradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(gradients, 1.0, 6)
    given(gradients)
    gradients.returned()
    add(gradients, 4.0, 2)
    contribution, _ = given(gradients)
    gradients._back = Mean(torch.zeros(gradients.whole), 3, 0)
    with monkeypatch.context() as patch:
        patch.setattr(gradients._memory, "floats", no_memory)
        with pytest.raises(MemoryError):
            gradients.returned()
    assert gradients.samples == 11
    gradients.returned()
    assert gradients.samples == 11
    assert gradients.committed([contribution], 1) == 3, "what was given is in a step, and the rest is too old"


def no_memory(count: int) -> Tensor:
    raise MemoryError(count)


@pytest.mark.parametrize(("epoch", "samples"), [(2, 4), (0, MOST_SAMPLES)], ids=["of the future", "too many"])
def test_a_gradient_that_cannot_be_is_not_carried(gradients: Gradients, epoch: int, samples: int) -> None:
    add(gradients, 1.0, 6)
    assert not gradients.carry(Parcel(torch.ones(gradients.elements), samples, epoch, epoch + 1))
    assert gradients.carry(Parcel(torch.ones(gradients.elements), 4, 1, 2)), "this peer will hear of that step soon"


def test_who_makes_steps_of_its_own_is_far_ahead_with_its_share_of_the_next_round() -> None:
    weight = torch.zeros(2)
    statistics = Statistics([weight], carries=True)
    step = Summing(local_step=lambda: weight.add_(1.0))
    gradients = Gradients("me", [weight], statistics, max_staleness=1, summing=step)
    for _ in range(3):
        gradients.add(4, 0)
        assert not gradients.is_far_ahead(1), "no round is under way"
    gradients.give()
    ahead = []
    for _ in range(4):
        gradients.add(4, 0)
        ahead.append((gradients.is_far_ahead(7.5), gradients.is_far_ahead(16)))
    assert ahead == [(False, False), (True, False), (True, False), (True, True)], "whatever it gave"
    gradients.returned()
    assert not gradients.is_far_ahead(1)


def test_who_sums_gradients_is_never_too_far_ahead(gradients: Gradients) -> None:
    add(gradients, 1.0, 4)
    assert gradients.give() is not None
    add(gradients, 1.0, 400)
    assert not gradients.is_far_ahead(0)
