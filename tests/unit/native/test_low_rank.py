"""PowerSGD by rounds of our own: what is averaged, what is left for later, and that all peers have the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.low_rank import LowRank, _rounded
from lightning_hivemind.engine.native.protocol.lineage import Contribution
from lightning_hivemind.engine.native.statistics import Statistics
from unit.default_dtype import default_dtype

SHAPES = [(60, 40), (7,), (30, 8, 5), (3, 3), (40, 200)]
REST = [5]
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES) + sum(REST)


def make(rank: int = 2, ratio: float = 0.5) -> LowRank:
    return LowRank(SHAPES, REST, rank=rank, min_compression_ratio=ratio)


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Swarm:
    """Peers whose rounds always succeed."""

    def __init__(self, count: int, **options: float) -> None:
        self.peers = [make(**options) for _ in range(count)]  # type: ignore[arg-type]
        self.epoch = self.number = 0

    def step(self, means: list[Tensor], samples: list[int]) -> Tensor:
        """One step of all; returns what it is made with."""
        packed = []
        for peer, mean, count in zip(self.peers, means, samples, strict=True):
            self.number += 1
            given = peer.pack(mean, self.number, count, self.epoch)
            assert given is not None
            packed.append(given * (count / sum(samples)))
            peer.counted([self.number])
        average = torch.stack(packed).sum(0)
        wholes, carried = zip(*(peer.unpack(average, self.epoch) for peer in self.peers), strict=True)
        for peer, one in zip(self.peers, carried, strict=True):
            peer.carried.copy_(one)
        assert all(torch.equal(one, wholes[0]) for one in wholes)
        assert all(torch.equal(one, carried[0]) for one in carried)
        self.epoch += 1
        return wholes[0]


def gradient(seed: int, rank: int | None = None) -> Tensor:
    """A flat vector whose matrices have this rank, the same directions for every seed below 1000."""
    parts = []
    for index, shape in enumerate(SHAPES):
        if rank is None or len(shape) == 1:
            parts.append(torch.randn(torch.Size(shape).numel(), generator=chance(seed)))
            continue
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        left = torch.randn(rows, rank, generator=chance(index))
        right = torch.randn(rank, columns, generator=chance(index + 50))
        mixing = torch.randn(rank, rank, generator=chance(seed)) + 2 * torch.eye(rank)
        parts.append((left @ mixing @ right).flatten())
    return torch.cat([*parts, torch.randn(sum(REST), generator=chance(seed))])


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_a_gradient_of_low_rank_is_averaged_whole_once_its_directions_are_known() -> None:
    """In every second step nothing at all is left out: what the other steps leave out has the same column space."""
    swarm = Swarm(2)
    for step in range(6):
        swarm.step([gradient(step, rank=3), gradient(step + 100, rank=3)], [8, 8])
        for peer in swarm.peers:
            peer._settle()
        left = max(float(peer._left.norm()) for peer in swarm.peers) / float(8 * gradient(step, rank=3).norm())
        assert left < 0.05 or step % 2 == 0


def test_what_a_script_makes_the_default_dtype_changes_nothing() -> None:
    """As Lightning does while a batch is computed in half precision, for the rounds' thread, too."""
    given = [gradient(step) for step in range(3)]
    plain = Swarm(1)
    expected = [plain.step([one], [8]) for one in given]
    with default_dtype(torch.bfloat16):
        swarm = Swarm(1)
        assert all(torch.equal(swarm.step([one], [8]), wanted) for one, wanted in zip(given, expected, strict=True))


def test_what_is_cut_off_is_not_lost() -> None:
    """All that was ever given is in the steps, or waits: to the rounding of the steps' gradients."""
    swarm, given, made = Swarm(3, rank=1), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step in range(7):
        means, samples = [gradient(10 * step + peer) for peer in range(3)], [3, 8, 5 + step]
        given += sum(mean * count for mean, count in zip(means, samples, strict=True))  # type: ignore[arg-type]
        made += swarm.step(means, samples) * sum(samples)
    waiting = torch.zeros(ELEMENTS)
    for peer in swarm.peers:
        peer._settle()
        start = 0
        for one in peer._matrices:
            waiting[one.start : one.start + one.elements] += peer._left[start : start + one.elements]
            start += one.elements
    assert far(made, given) > 0.3, "nothing was cut off"
    assert far(made + waiting, given) < 1e-3


def test_a_constant_gradient_comes_through_in_the_long_run() -> None:
    swarm, mean, made = Swarm(1, rank=1), gradient(7), torch.zeros(ELEMENTS)
    for _ in range(200):
        made += swarm.step([mean], [4])
    assert far(made / 200, mean) < 0.35


def test_what_is_small_or_no_matrix_is_averaged_as_it_is() -> None:
    swarm, means = Swarm(2), [gradient(1), gradient(2)]
    found = swarm.step(means, [1, 3])
    low_rank, start = torch.zeros(ELEMENTS, dtype=torch.bool), 0
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        low_rank[start : start + size] = len(shape) > 1 and size > 9
        start += size
    mean = (means[0] + 3 * means[1]) / 4
    torch.testing.assert_close(found[~low_rank], mean[~low_rank])
    assert far(found[low_rank], mean[low_rank]) > 0.1


def test_a_round_that_fails_changes_nothing() -> None:
    swarm, other = Swarm(1), Swarm(1)
    for one in (swarm, other):
        for step in range(3):
            one.step([gradient(step)], [8])
    (peer,) = swarm.peers
    assert peer.pack(gradient(50), 1000, 99, 3) is not None  # and is never heard of again
    found, expected = peer.pack(gradient(60), 1001, 7, 3), other.peers[0].pack(gradient(60), 1001, 7, 3)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_the_next_round_may_come_before_the_step_was_made() -> None:
    swarm = Swarm(2)
    first, second = swarm.peers
    packed = [peer.pack(gradient(1), 1, 8, 0) for peer in (first, second)]
    assert packed[0] is not None
    assert second.pack(gradient(2), 2, 8, 1) is None, "nobody has said what the step was"
    for peer in (first, second):
        peer.counted([1])
    second.learn(packed[0], 0)
    early = second.pack(gradient(2), 2, 8, 1)
    first.unpack(packed[0], 0)
    late = first.pack(gradient(2), 2, 8, 1)
    assert early is not None
    assert late is not None
    assert torch.equal(early, late)
    second.unpack(packed[0], 0)
    assert torch.equal(first.unpack(late, 1)[0], second.unpack(late, 1)[0])


@pytest.mark.parametrize("early", [False, True])
def test_a_round_that_begins_before_the_step_is_unpacked_keeps_its_feedback(early: bool) -> None:
    peer, given, made = make(), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    packed = peer.pack(gradient(0), 1, 8, 0)
    for step in range(1, 6):
        assert packed is not None
        peer.counted([step])
        peer.learn(packed, step - 1)
        given += 8 * gradient(step - 1)
        average = packed
        if early:
            packed = peer.pack(gradient(step), step + 1, 8, step)
        made += 8 * peer.unpack(average, step - 1)[0]
        if not early:
            packed = peer.pack(gradient(step), step + 1, 8, step)
    waiting = torch.zeros(ELEMENTS)
    start = 0
    for one in peer._matrices:
        waiting[one.start : one.start + one.elements] = peer._left[start : start + one.elements]
        start += one.elements
    assert far(made + waiting, given) < 1e-3
    assert far(made, given) > 0.3


def test_who_joins_with_the_others_bases_has_the_same_steps() -> None:
    swarm = Swarm(2)
    for step in range(5):
        swarm.step([gradient(step), gradient(step + 100)], [8, 8])
    joiner = make()
    joiner.carried.copy_(swarm.peers[0].carried)
    joiner.adopted(5)
    swarm.peers.append(joiner)
    for step in range(3):
        swarm.step([gradient(step), gradient(step + 100), gradient(step + 200)], [8, 8, 2])


@pytest.mark.parametrize("epoch", [0, 1, 1000])
def test_it_begins_alike_everywhere_at_any_epoch(epoch: int) -> None:
    one, other = make(), make()
    for peer in (one, other):
        peer.begin(epoch)
        assert peer.pack(gradient(1), 1, 8, epoch) is not None
    assert torch.equal(one.carried, other.carried)


def test_who_goes_back_to_its_own_state_forgets_later_steps() -> None:
    one, other = make(), make()
    packed = one.pack(gradient(1), 1, 8, 0)
    assert packed is not None
    one.learn(packed, 0)
    assert one.pack(gradient(2), 2, 8, 1) is not None
    one.stands_at(0)
    assert one.pack(gradient(2), 3, 8, 1) is None
    back, expected = one.pack(gradient(3), 4, 8, 0), other.pack(gradient(3), 1, 8, 0)
    assert back is not None
    assert expected is not None
    assert torch.equal(back, expected)


def test_without_a_gradient_directions_are_still_looked_for() -> None:
    swarm = Swarm(1)
    for _ in range(3):
        assert not swarm.step([torch.zeros(ELEMENTS)], [8]).any()
    mean, made = gradient(0, rank=2), torch.zeros(ELEMENTS)
    for _ in range(6):
        made += swarm.step([mean], [8])
    assert far(made / 6, mean) < 0.02


def test_every_step_sends_about_as_much() -> None:
    wide = LowRank([(10, 1000), (10, 1000)], [], rank=1, min_compression_ratio=0.5)
    assert wide.sizes == [2 * (10 + 1000)]
    assert make(ratio=0.99).sizes == [0, *(torch.Size(shape).numel() for shape in SHAPES), *REST]


def test_a_model_without_matrices_is_averaged_as_it_is() -> None:
    plain = LowRank([(5,)], [2], rank=4, min_compression_ratio=0.5)
    packed = plain.pack(torch.arange(7.0), 1, 8, 0)
    assert packed is not None
    assert plain.unpack(packed, 0)[0].tolist() == list(range(7))


def test_rounding_is_to_the_nearest_and_hides_the_last_bits() -> None:
    values = torch.randn(1000, generator=chance(1), dtype=torch.float64)
    rounded = _rounded(values, 8)
    assert float(((rounded - values) / values).abs().max()) <= 2**-9 * 1.001
    assert torch.equal(_rounded(rounded, 8), rounded)
    assert torch.equal(_rounded(values * (1 + 1e-13), 8), rounded)
    assert torch.equal(_rounded(torch.tensor([0.0, -0.0, 1.0, -2.0]), 8), torch.tensor([0.0, -0.0, 1.0, -2.0]))


def test_gradients_are_given_as_factors_and_taken_back_whole() -> None:
    weight = torch.zeros(20, 20, requires_grad=True)
    low_rank = LowRank([weight.shape], [1], rank=1, min_compression_ratio=0.5)
    gradients = Gradients("me", [weight], Statistics([]), max_staleness=5, low_rank=low_rank)
    assert gradients.elements == 41, "two factors, and whether there is a gradient"
    weight.grad = torch.ones(20, 20)
    gradients.add(8, 0)
    given = gradients.give()
    assert given is not None
    gradients.returned()
    assert gradients.samples == 8
    weight.grad = 3 * torch.ones(20, 20)
    gradients.add(8, 0)
    again = gradients.give()
    assert again is not None
    torch.testing.assert_close(again[1][:40], 2 * given[1][:40])
    contribution = Contribution(peer="me", number=again[0].number, samples=16)
    gradients.decided(again[1], 0)
    assert gradients.committed([contribution], 1) == 0
    whole, carried = low_rank.unpack(again[1], 0)
    assert carried is not None
    assert whole.shape == (401,)
    weight.grad = torch.ones(20, 20)
    gradients.add(8, 1)
    given = gradients.give()
    assert given is not None
    weight.grad = None
    gradients.returned()
    contribution = Contribution(peer="me", number=given[0].number, samples=8)
    gradients.committed([contribution], 2)
    gradients.decided(given[1], 1)
    gradients.add(8, 2)
    again = gradients.give()
    assert again is not None
    assert again[1][-1] == 1.0, "there may be something left of earlier ones"


def test_samples_stay_here_while_the_step_before_is_not_known() -> None:
    weight = torch.zeros(20, 20, requires_grad=True)
    low_rank = LowRank([weight.shape], [1], rank=1, min_compression_ratio=0.5)
    gradients = Gradients("me", [weight], Statistics([]), max_staleness=5, low_rank=low_rank)
    weight.grad = torch.ones(20, 20)
    gradients.add(8, 0)
    gradients.committed([], 1)
    assert gradients.give() is None
    assert gradients.samples == 8
    low_rank.unpack(torch.zeros(41), 0)
    assert gradients.give() is not None
