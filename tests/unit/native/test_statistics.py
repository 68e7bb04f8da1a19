"""What a model carries besides parameters: how it has changed is averaged, and what never changes stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.sums import Summing

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.clone().flatten().view(torch.uint8).tolist()
    return found


def apply(peer: Statistics, changes: Tensor) -> None:
    peer.step(changes, peer.epoch + 1)
    peer.publish()


def taken(peer: Statistics) -> Tensor:
    with peer.taking(peer.epoch) as changes:
        return changes


def step(*peers: Statistics) -> None:
    """All get the average of all."""
    changes = torch.stack([taken(peer) for peer in peers])
    for peer in peers:
        apply(peer, changes.mean(dim=0))


def test_peers_get_the_mean_of_what_they_have_seen() -> None:
    tensors = [[torch.ones(2, 3), torch.tensor(5.0)] for _ in range(2)]
    peers = [Statistics(own) for own in tensors]
    tensors[0][0] += 1
    tensors[1][0] -= 3
    tensors[1][1] += 1
    step(*peers)
    for mean, single in tensors:
        assert mean.tolist() == [[0.0] * 3] * 2
        assert single.item() == 5.5
    assert taken(peers[0]).tolist() == [0.0] * 7


def test_a_peer_that_has_seen_nothing_follows_the_others() -> None:
    own = torch.zeros(3)
    peer = Statistics([own])
    assert taken(peer).tolist() == [0.0] * 3
    apply(peer, torch.tensor([1.0, 2.0, 0.0]))
    assert own.tolist() == [1.0, 2.0, 0.0]


def test_what_a_peer_sees_during_a_step_is_replaced_by_the_common_value_and_given_later() -> None:
    """So it is with a peer whose batch takes longer than the others' step, and with delayed steps."""
    own = torch.zeros(2)
    peer = Statistics([own])
    for _ in range(2):
        own += 7
        apply(peer, torch.tensor([1.0, 0.0]))
    assert own.tolist() == [2.0, 0.0]
    own += torch.tensor([0.0, 1.0])
    assert taken(peer).tolist() == [14.0, 15.0]
    assert taken(peer).tolist() == [0.0, 0.0]


def test_what_cannot_be_given_is_not_taken() -> None:
    own = torch.zeros(2)
    peer = Statistics([own])
    own += 7
    with pytest.raises(MemoryError), peer.taking(0):
        raise MemoryError
    assert taken(peer).tolist() == [7.0, 7.0]


def test_what_lies_in_the_tensors_while_they_are_lent_is_no_change() -> None:
    """A callback may have put averages there to validate them (EMA)."""
    own = torch.zeros(2)
    peer = Statistics([own])
    own += 7
    peer.lend()
    own += 100
    assert taken(peer).tolist() == [7.0, 7.0]
    peer.forget()
    own -= 100
    peer.back()
    assert taken(peer).tolist() == [0.0, 0.0]
    own += 1
    assert taken(peer).tolist() == [1.0, 1.0]


def test_local_updates_are_given_as_they_were_before_the_model_was_lent() -> None:
    weight = torch.zeros(2)
    statistics = Statistics([weight], carries=True)
    gradients = Gradients(
        "me", [weight], statistics, max_staleness=1, summing=Summing(local_step=lambda: weight.add_(1.0))
    )
    gradients.add(8, 0)
    statistics.lend()
    weight.add_(100.0)
    given = gradients.give()
    assert given is not None
    assert (given[0].samples, given[1].tolist()) == (8, [1.0, 1.0])


def test_counters_move_by_the_rounded_mean_of_what_peers_have_counted() -> None:
    """BatchNorm's num_batches_tracked; a large one keeps every digit."""
    huge = 2**53 + 1
    tensors = [[torch.tensor(3), torch.tensor(huge), torch.tensor(7)] for _ in range(2)]
    peers = [Statistics(own) for own in tensors]
    tensors[0][0] += 5
    tensors[1][0] += 2
    for own in tensors:
        own[2] -= 1
    step(*peers)
    for counter, large, falling in tensors:
        assert counter.item() == 3 + 4, "3.5, to the even neighbour"
        assert (large.item(), falling.item()) == (huge, 6)
    assert taken(peers[0]).tolist() == [0.0] * 3


def test_masks_and_indices_are_each_peers_own() -> None:
    """The mean of two pointers into a ring, or of two orders, is none."""
    flags, weights, pointer = torch.tensor(True), torch.tensor(3, dtype=torch.int8), torch.tensor([5])
    peer = Statistics([flags, torch.zeros(2), weights, pointer])
    assert peer.elements == 2
    weights += 1
    pointer += 1
    apply(peer, torch.ones(2))
    assert (flags.item(), weights.item(), pointer.item()) == (True, 4, 6)


def test_a_model_that_has_none() -> None:
    peer = Statistics([])
    assert peer.elements == 0
    assert taken(peer).shape == (0,)
    apply(peer, torch.empty(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_never_changes_stays_to_the_last_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    constant = torch.cat(
        (torch.randn(50, dtype=torch.float64) * 1e3, torch.tensor([0.1, -0.0, INF, -INF]).double())
    ).to(dtype)
    before, moving = bits(constant), torch.zeros(2)
    peer = Statistics([constant, moving])
    for _ in range(3):
        moving += 1
        step(peer)
    assert bits(constant) == before
    assert moving.tolist() == [3.0, 3.0]


def test_a_constant_that_is_no_number_is_no_change() -> None:
    peer = Statistics([torch.tensor([NAN, 1.0])])
    assert taken(peer).tolist() == [0.0, 0.0]


def test_a_least_value_that_was_infinite_before_the_first_batch_spoils_nothing() -> None:
    """As quantization's observers have it: min_val = inf, max_val = -inf."""
    least = torch.tensor([INF])
    peer = Statistics([least])
    least.fill_(3.0)
    assert taken(peer).isfinite().all()


def test_whoever_takes_a_state_over_has_seen_nothing_since() -> None:
    own = torch.zeros(2)
    peer = Statistics([own])
    own += 5
    peer.rebase(3)
    assert taken(peer).tolist() == [0.0, 0.0]
    apply(peer, torch.tensor([1.0, 0.0]))
    assert own.tolist() == [6.0, 5.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_who_joins_has_the_same_statistics_from_then_on(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    old = torch.randn(100).to(dtype)
    first = Statistics([old])
    for _ in range(3):
        apply(first, torch.randn(100) / 3)
    new = old.clone()
    second = Statistics([new])
    for _ in range(20):
        change = torch.randn(100) / 100
        apply(first, change)
        apply(second, change)
    assert bits(old) == bits(new)


# ---------------------------------------------------------------------- with the gradients


def gathering(statistic: Tensor) -> tuple[Gradients, torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return Gradients("me", [weight], Statistics([statistic]), max_staleness=1), weight


def given(gradients: Gradients) -> tuple[object, list[float]]:
    found = gradients.give()
    assert found is not None
    *values, mark = found[1].tolist()
    assert mark == 1.0, "the weight has a gradient"
    return found[0], values


def test_changes_travel_behind_the_gradients() -> None:
    statistic = torch.zeros(2)
    gradients, _ = gathering(statistic)
    gradients.add(4, 0)
    statistic += 2
    assert gradients.elements == 4
    assert given(gradients)[1] == [1.0, 2.0, 2.0]


def test_after_a_failed_round_a_lone_peer_gives_all_that_it_has_seen() -> None:
    """Else the BatchNorm of a peer whose round failed once lags behind that of a plain Trainer."""
    statistic = torch.zeros(1)
    gradients, _ = gathering(statistic)
    gradients.add(4, 0)
    statistic.fill_(1.0)
    given(gradients)
    gradients.returned()
    gradients.add(4, 0)
    statistic.fill_(2.0)
    assert given(gradients)[1] == [1.0, 2.0]


def test_what_two_failed_rounds_had_adds_up_though_a_step_of_others_came_between() -> None:
    statistic, base = torch.zeros(1), torch.tensor([10.0])
    gradients, _ = gathering(statistic)
    for _ in range(2):
        gradients.add(4, 0)
        statistic += 1.0
        given(gradients)
        gradients.returned()
        gradients._statistics.step(base, 1)
        gradients._statistics.publish()
    assert statistic.item() == 20.0
    assert given(gradients)[1] == [1.0, 2.0]


def test_what_has_changed_with_samples_that_are_too_old_is_dropped_with_them() -> None:
    """Else a peer that no step has would give all that it has ever seen with its next batch."""
    statistic = torch.zeros(1)
    gradients, _ = gathering(statistic)
    gradients.add(4, 0)
    statistic += 100.0
    assert gradients.committed([], 2) == 4
    gradients.add(4, 2)
    statistic += 1.0
    assert given(gradients)[1] == [1.0, 1.0]


@pytest.mark.parametrize("forget", [lambda one: one.discard(), lambda one: one.moved(0)], ids=["discarded", "moved"])
def test_what_has_changed_with_samples_that_are_forgotten_is_forgotten(forget: Callable[[Gradients], int]) -> None:
    statistic = torch.zeros(1)
    gradients, _ = gathering(statistic)
    gradients.add(4, 0)
    statistic += 100.0
    assert forget(gradients) == 4
    gradients.add(4, 0)
    statistic += 1.0
    assert given(gradients)[1] == [1.0, 1.0]


def test_what_is_committed_is_not_given_again_before_it_is_applied() -> None:
    """So it is with a peer whose batch takes longer than the others' step."""
    statistic = torch.zeros(1)
    gradients, _ = gathering(statistic)
    gradients.add(4, 0)
    statistic.fill_(1.0)
    contribution, _ = given(gradients)
    gradients.committed([contribution], 1)  # type: ignore[list-item]
    gradients.add(4, 0)
    assert given(gradients)[1] == [1.0, 0.0]


def test_what_is_carried_is_only_what_was_not_given() -> None:
    own = [torch.tensor([1.0, 2.0, 3.0]), torch.zeros(1, dtype=torch.bfloat16)]
    peer = Statistics(own, carries=True)
    own[0] += torch.tensor([0.5, 0.0, 0.1])
    given = peer.changes(0)
    own[0][1] += 4.0
    peer.step(torch.tensor([0.25, 0.0, 0.3, 1.0]), 1, given)
    peer.publish()
    assert peer.base[0].tolist() == pytest.approx([1.25, 2.0, 3.3])
    assert own[0].tolist() == pytest.approx([1.25, 6.0, 3.3])
    assert bits(own[0][[0, 2]]) == bits(peer.base[0][[0, 2]]), "what was given whole is what all have, to the last bit"
    assert own[1].item() == 1.0
    assert peer.changes(1).tolist() == [0.0, 4.0, 0.0, 0.0]


def test_a_step_that_went_without_this_peer_moves_it_and_takes_nothing_away() -> None:
    own = torch.zeros(2)
    peer = Statistics([own], carries=True)
    own += torch.tensor([0.0, 5.0])
    peer.step(torch.tensor([1.0, 1.0]), 1)
    peer.publish()
    assert own.tolist() == [1.0, 6.0]
    assert peer.changes(1).tolist() == [0.0, 5.0]


@pytest.fixture
def local() -> tuple[Gradients, Statistics, Tensor]:
    """Each batch moves the weight by one."""
    weight = torch.zeros(2)
    statistics = Statistics([weight], carries=True)
    return (
        Gradients("me", [weight], statistics, max_staleness=1, summing=Summing(local_step=lambda: weight.add_(1.0))),
        statistics,
        weight,
    )


def test_local_updates_give_how_far_they_have_come(local: tuple[Gradients, Statistics, Tensor]) -> None:
    gradients, statistics, weight = local
    assert gradients.sizes == [2]
    gradients.add(8, 0)
    gradients.add(8, 0)
    given = gradients.give()
    assert given is not None
    assert (given[0].samples, given[1].tolist()) == (16, [2.0, 2.0])
    gradients.add(8, 0)  # while the round is under way
    counted = gradients.counted([given[0]])
    assert counted is not None
    assert gradients.committed([given[0]], 1) == 0
    assert gradients.samples == 8
    assert gradients.give() is None, "the step is still to be made here"
    statistics.step(torch.tensor([4.0, 4.0]), 1, counted)
    statistics.publish()
    assert weight.tolist() == [5.0, 5.0]
    again = gradients.give()
    assert again is not None
    assert (again[0].samples, again[1].tolist()) == (8, [1.0, 1.0])


def test_local_updates_that_a_round_went_without_are_given_again_and_never_too_old(
    local: tuple[Gradients, Statistics, Tensor],
) -> None:
    gradients, statistics, weight = local
    gradients.add(8, 0)
    assert gradients.give() is not None
    for epoch in range(1, 5):
        assert gradients.counted([]) is None
        assert gradients.committed([], epoch) == 0
        statistics.step(torch.tensor([10.0, 10.0]), epoch)
        statistics.publish()
    assert weight.tolist() == [41.0, 41.0]
    again = gradients.give()
    assert again is not None
    assert (again[0].samples, again[1].tolist()) == (8, [1.0, 1.0])


@pytest.mark.parametrize("in_round", ["not", "returned", "committed", "missed"])
def test_local_updates_that_another_peers_state_has_replaced_are_not_given(
    local: tuple[Gradients, Statistics, Tensor], in_round: str
) -> None:
    """Their samples would count, and their changes are gone."""
    gradients, statistics, _ = local
    gradients.add(8, 0)
    found = gradients.give() if in_round != "not" else None
    statistics.adopted(0)
    statistics.publish()
    assert gradients.replaced() == (8 if found is None else 0)
    if in_round == "returned":
        assert gradients.returned() == 8
    if in_round == "committed":
        assert found is not None
        assert gradients.committed([found[0]], 1) == 0
    if in_round == "missed":
        assert gradients.committed([], 1) == 8
    assert gradients.samples == 0
    assert gradients.give() is None


def test_local_updates_wait_for_the_step_that_is_still_to_be_made(local: tuple[Gradients, Statistics, Tensor]) -> None:
    gradients, statistics, weight = local
    gradients.add(8, 0)
    assert gradients.give() is not None
    assert gradients.committed([], 1) == 0
    for _ in range(2):
        assert gradients.give() is None, "called again before it is made"
        assert gradients.samples == 8
    statistics.step(torch.tensor([10.0, 10.0]), 1)
    statistics.publish()
    again = gradients.give()
    assert again is not None
    assert (again[0].samples, again[1].tolist()) == (8, [1.0, 1.0])
    assert weight.tolist() == [11.0, 11.0]
