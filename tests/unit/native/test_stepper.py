"""A global step: the optimizer gets the average, the model has what the optimizer has, wherever that steps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from lightning_hivemind.engine.native.agreement import digest_of_tensors
from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.handover import Handover
from lightning_hivemind.engine.native.low_rank import LowRank
from lightning_hivemind.engine.native.pace import Pace
from lightning_hivemind.engine.native.protocol.lineage import Commit, Head
from lightning_hivemind.engine.native.state.snapshot import Snapshot, State
from lightning_hivemind.engine.native.stepper import Stepper
from lightning_hivemind.engine.native.sums import Summing
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.training.optimizers import rebuilder
from lightning_hivemind.training.schedulers import SwarmSchedulers
from swarm.town import wait_for
from swarm.training import training_of

ROOT = Head.root("run", "founder")
WAYS = ["in place", "offload", "delayed"]


def head(epoch: int) -> Head:
    return Head(epoch=epoch, lineage=b"x" * 16, samples=64 * epoch)


@dataclass
class Trainee:
    """A small model, its optimizer with two groups, and what the stepper calls."""

    way: str = "in place"
    seed: int = 0
    buffers: list[Tensor] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    hooked: list[list[float]] = field(default_factory=list)
    scheduler: SwarmSchedulers | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.weight, self.bias = torch.nn.Parameter(torch.randn(2, 2)), torch.nn.Parameter(torch.randn(3))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        groups = [{"params": [self.weight, self.frozen], "weight_decay": 0.1}, {"params": [self.bias], "lr": 0.5}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        training = training_of(
            self.optimizer,
            rebuild_optimizer=rebuilder(self.optimizer) if self.way != "in place" else None,
            make_scheduler=self._make_scheduler,
            advance_schedulers=self.scheduler.advance if self.scheduler else self.epochs.append,
            take_schedulers_back=self.scheduler.take_back if self.scheduler else lambda epoch: None,
            before_optimizer_step=self._hook,
            buffers=self.buffers,
        )
        self.stepper = Stepper(training, ROOT, delayed=self.way == "delayed")

    def _make_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scheduler is not None:
            self.scheduler.take_over([LRSchedulerConfig(ExponentialLR(optimizer, 0.9), interval="step")])

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        assert torch.is_grad_enabled()
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.hooked.append([value for grad in grads for value in grad.flatten().tolist()])

    @property
    def parameters(self) -> list[Tensor]:
        return [self.weight, self.frozen, self.bias]

    def step(self, average: Tensor, epoch: int, reached: tuple[float, float] = (1.0, 1.0)) -> None:
        """And wait until the model has it. ``reached``: whether anybody has a gradient of the weight, of the bias."""
        self.begin(average, epoch, reached)
        self.stepper.settle(wait=True)

    def begin(self, average: Tensor, epoch: int, reached: tuple[float, float] = (1.0, 1.0)) -> None:
        self.stepper.step(torch.cat((average, torch.tensor(reached))), head(epoch))


def averages(count: int, elements: int = 7) -> list[Tensor]:
    torch.manual_seed(99)
    return [torch.randn(elements) for _ in range(count)]


def plainly(average: list[Tensor]) -> list[Tensor]:
    """What plain torch makes of these gradients."""
    plain = Trainee()
    for values in average:
        plain.weight.grad, plain.bias.grad = values[:4].view(2, 2).clone(), values[4:7].clone()
        plain.optimizer.step()
    return plain.parameters


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_for(lambda: set(threading.enumerate()) <= before, "the threads have ended")


@pytest.fixture(params=WAYS)
def trainee(request: pytest.FixtureRequest) -> Iterator[Trainee]:
    one = Trainee(request.param, buffers=[torch.zeros(2)])
    yield one
    one.stepper.close()


def hosted(trainee: Trainee) -> list[Tensor]:
    return [parameter for group in trainee.stepper.optimizer.param_groups for parameter in group["params"]]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


# ---------------------------------------------------------------------- steps


def test_a_step_is_what_plain_torch_makes_of_the_average(trainee: Trainee) -> None:
    given = averages(3)
    for epoch, average in enumerate(given, 1):
        trainee.step(torch.cat((average, torch.zeros(2))), epoch)
        assert same(trainee.parameters, hosted(trainee))
        assert same(trainee.parameters, plainly(given[:epoch]))
    assert trainee.hooked == [pytest.approx(average.tolist()) for average in given]
    assert trainee.epochs == [1, 2, 3]
    assert trainee.stepper.head == head(3)


@pytest.mark.parametrize("before", [True, False], ids=["a gradient of before", "none"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def test_a_fused_optimizer_gets_gradients_that_lie_as_its_parameters_do(make: Any, *, before: bool) -> None:
    """It goes through memory without looking at strides."""
    torch.manual_seed(0)
    start, average = torch.randn(4, 3, 2, 2), torch.randn(48)
    found = []
    for fused in (True, False):
        parameter = torch.nn.Parameter(start.clone().to(memory_format=torch.channels_last))
        parameter.grad = torch.ones_like(parameter) if before else None
        training = training_of(make([parameter], lr=0.1, fused=fused))
        Stepper(training, ROOT, delayed=False).step(torch.cat((average, torch.ones(1))), head(1))
        found.append(parameter.detach().clone())
    assert torch.allclose(*found, atol=1e-6)


def test_on_the_host_the_average_is_not_copied() -> None:
    """It is the stepper's own: see ``Exchange.end``."""
    trainee = Trainee()
    flat = torch.cat((*averages(1), torch.ones(2)))
    trainee.stepper.step(flat, head(1))
    assert trainee.weight.grad is not None
    assert trainee.weight.grad.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("reached", [(0.0, 0.2), (1e-12, 0.0), (0.0, 0.0)], ids=["bias", "weight", "none"])
def test_a_parameter_of_which_nobody_has_a_gradient_is_left_alone_as_by_plain_torch(
    trainee: Trainee, reached: tuple[float, float]
) -> None:
    """Weight decay and momentum would move it."""
    (first, second), plain = averages(2), Trainee()
    for values, (weight, bias) in ((first, (1.0, 1.0)), (second, reached)):
        plain.weight.grad = values[:4].view(2, 2).clone() if weight else None
        plain.bias.grad = values[4:7].clone() if bias else None
        plain.optimizer.step()
    trainee.weight.grad = torch.ones(2, 2)  # of a batch of before
    trainee.step(torch.cat((first, torch.zeros(2))), 1)
    trainee.step(torch.cat((second, torch.ones(2))), 2, reached)
    assert same(trainee.parameters, plain.parameters)
    assert trainee.buffers[0].tolist() == [1.0, 1.0]


def test_frozen_parameters_stay_and_have_no_gradient(trainee: Trainee) -> None:
    before = trainee.frozen.clone()
    trainee.frozen.grad = torch.ones(5)
    trainee.step(averages(1, 9)[0], 1)
    assert torch.equal(trainee.frozen, before)
    assert hosted(trainee)[1].grad is None


def test_statistics_are_behind_the_gradients(trainee: Trainee) -> None:
    trainee.step(torch.cat((averages(1)[0], torch.tensor([2.0, 3.0]))), 1)
    assert trainee.buffers[0].tolist() == [2.0, 3.0]


def test_a_gradient_has_its_parameters_precision() -> None:
    trainee = Trainee()
    trainee.bias.data = trainee.bias.data.bfloat16()
    trainee.step(averages(1)[0], 1)
    assert trainee.bias.grad is not None
    assert trainee.bias.grad.dtype == torch.bfloat16


def test_what_stays_in_the_gradients_does_not_count(trainee: Trainee) -> None:
    """The optimizer's gradients are the average, whatever a batch has left there."""
    given = averages(2)
    for parameter in (trainee.weight, trainee.bias):
        parameter.grad = torch.full_like(parameter, 7.0)
    for epoch, average in enumerate(given, 1):
        trainee.step(torch.cat((average, torch.zeros(2))), epoch)
    assert same(trainee.parameters, plainly(given))


def test_what_is_frozen_later_does_not_shift_the_gradients_of_the_rest(trainee: Trainee) -> None:
    trainee.weight.requires_grad_(False)
    trainee.step(torch.cat((averages(1)[0], torch.zeros(2))), 1)
    assert trainee.hooked[0][-3:] == pytest.approx(averages(1)[0][4:].tolist())


def test_what_only_this_peer_has_frozen_steps_as_the_others_do(trainee: Trainee) -> None:
    """A hook that freezes by the pass is at another global step on each peer."""
    trainee.weight.requires_grad_(False)
    trainee.step(torch.cat((averages(1)[0], torch.zeros(2))), 1)
    assert same(trainee.parameters, plainly(averages(1)))


def test_what_is_added_later_is_refused_before_anything_changes() -> None:
    trainee = Trainee()
    trainee.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    before = [one.clone() for one in trainee.parameters]
    with pytest.raises(ArgumentError, match="added to the optimizer during the fit"):
        trainee.step(averages(1)[0], 1)
    assert same(trainee.parameters, before)


def test_what_is_unfrozen_later_is_refused_before_anything_changes(trainee: Trainee) -> None:
    before = [one.clone() for one in trainee.parameters]
    trainee.frozen.requires_grad_(True)
    with pytest.raises(ArgumentError, match="requires_grad"):
        trainee.step(averages(1, 9)[0], 1)
    assert same(trainee.parameters, before)


@pytest.mark.parametrize("how", ["refused", "lost with an error", "decided without its average"])
@pytest.mark.parametrize("sums", ["beside", "in place", "low rank"])
def test_a_round_that_comes_to_nothing_changes_neither_parameters_nor_optimizer(
    trainee: Trainee, sums: str, how: str
) -> None:
    """Nor buffers: whatever the round took, gave back, or had received, a step needs a decision and its average."""
    trainee.step(torch.cat((averages(1)[0], torch.ones(2))), 1)
    rank = LowRank([(2, 2), (3,)], [2, 2], rank=1, min_compression_ratio=-9.0) if sums == "low rank" else None
    if rank is not None:
        rank.begin(1)
    stepper, statistics = trainee.stepper, trainee.stepper.statistics
    gradients = Gradients(
        "me",
        stepper.model_parameters,
        statistics,
        max_staleness=9,
        summing=Summing(in_place=sums == "in place"),
        low_rank=rank,
    )
    handover = Handover("me", gradients, Pace(64, longest_s=1.0), reduces=True, gives=True)
    handover.adopted(head(1))
    before, state = contents(trainee), copy.deepcopy(stepper.optimizer.state_dict()["state"])
    trainee.weight.grad, trainee.bias.grad = torch.ones(2, 2), torch.ones(3)
    gradients.add(8, 1)
    offer = handover.give().offer
    assert offer.contribution is not None
    if how == "refused":
        handover.returned("a peer has left", begun=True)
    elif how == "lost with an error":
        handover.failed("RuntimeError: out of memory")
    else:
        commit = Commit(round=bytes(16), parent=head(1), contributions=(offer.contribution,), digest=b"d")
        handover.committed(commit, None, None)
    assert handover.next_step(head(1)) is None
    assert handover.owes == (how != "refused")
    stepper.settle(wait=True)
    assert contents(trainee) == before
    assert str(stepper.optimizer.state_dict()["state"]) == str(state)


def contents(trainee: Trainee) -> list[list[float]]:
    return [one.flatten().tolist() for one in (*trainee.parameters, *hosted(trainee), *trainee.buffers)]


# ---------------------------------------------------------------------- on the host


def test_in_place_the_users_optimizer_steps() -> None:
    trainee = Trainee()
    assert trainee.stepper.optimizer is trainee.optimizer


def test_an_optimizer_on_the_host_is_of_the_same_kind_over_other_memory() -> None:
    trainee = Trainee("offload")
    mine, theirs = trainee.optimizer, trainee.stepper.optimizer
    assert type(mine) is type(theirs)
    assert [{**g, "params": 0} for g in mine.param_groups] == [{**g, "params": 0} for g in theirs.param_groups]
    assert all(
        one.data_ptr() != other.data_ptr() for one, other in zip(trainee.parameters, hosted(trainee), strict=True)
    )
    assert [one.requires_grad for one in hosted(trainee)] == [True, False, True]


def test_a_delayed_step_reaches_the_model_when_it_is_settled() -> None:
    trainee = Trainee("delayed")
    before, given = [one.clone() for one in trainee.parameters], averages(2)
    trainee.begin(given[0], 1)
    wait_for(lambda: trainee.stepper.head == head(1), "the step in the background")
    assert same(trainee.parameters, before)
    trainee.begin(given[1], 2)
    assert same(trainee.parameters, plainly(given[:1])), "the next step settles the one before"
    trainee.stepper.settle(wait=True)
    assert same(trainee.parameters, plainly(given))
    trainee.stepper.close()


@pytest.mark.parametrize("where", ["waits", "publishes"])
def test_a_step_in_the_background_survives_ctrl_c(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The checkpoint that is written on an exception has it, and its number."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    trainee, given = Trainee("delayed"), averages(1)
    trainee.begin(given[0], 1)
    assert trainee.stepper._under_way is not None
    with monkeypatch.context() as patched:
        if where == "waits":
            patched.setattr(trainee.stepper._under_way, "exception", interrupted)
        else:
            patched.setattr(trainee.stepper, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainee.stepper.settle(wait=True)
    trainee.stepper.settle(wait=True)
    assert same(trainee.parameters, plainly(given))
    trainee.stepper.close()


def test_what_fails_in_the_background_is_raised_when_it_is_settled() -> None:
    def fails(closure: object = None) -> None:
        raise RuntimeError("out of memory")

    trainee = Trainee("delayed", buffers=[torch.zeros(2)])
    trainee.stepper.optimizer.step = fails  # type: ignore[method-assign]
    trainee.begin(averages(1, 9)[0], 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainee.stepper.settle(wait=True)
    trainee.stepper.settle(wait=True)
    trainee.stepper.close()


def test_a_delayed_step_leaves_alone_what_the_batch_under_way_needs() -> None:
    """Rotary embeddings, say, whose buffers autograd has kept: backward would raise."""
    trainee = Trainee("delayed", buffers=[torch.ones(3)])
    loss = (trainee.bias * trainee.buffers[0]).sum()
    trainee.begin(averages(1, 10)[0], 1)
    wait_for(lambda: trainee.stepper.head == head(1), "the step in the background")
    trainee.stepper.close()
    loss.backward()


# ---------------------------------------------------------------------- a state from elsewhere


def test_what_hooks_have_put_into_the_model_before_the_first_batch_is_where_it_begins(trainee: Trainee) -> None:
    with torch.no_grad():
        trainee.weight.fill_(3.0)
        trainee.buffers[0].fill_(5.0)
    trainee.stepper.begin()
    assert torch.equal(hosted(trainee)[0], trainee.weight)
    assert trainee.stepper.statistics.base[0].tolist() == [5.0, 5.0]
    with trainee.stepper.statistics.taking(0) as changes:
        assert changes.tolist() == [0.0, 0.0]
    trainee.step(torch.zeros(9), 1, (0.0, 0.0))
    assert trainee.weight.detach().flatten().tolist() == [3.0] * 4
    assert trainee.buffers[0].tolist() == [5.0, 5.0]


def test_a_checkpoint_goes_on_as_if_nothing_had_been(trainee: Trainee) -> None:
    given = [torch.cat((average, torch.ones(2))) for average in averages(4)]
    for epoch, average in enumerate(given[:2], 1):
        trainee.step(average, epoch)
    saved: dict[str, Any] = copy.deepcopy(trainee.stepper.optimizer.state_dict())
    again = Trainee(trainee.way, seed=5, buffers=[trainee.buffers[0].clone()])
    for mine, theirs in zip(again.parameters, trainee.parameters, strict=True):
        mine.data.copy_(theirs)
    again.stepper.load(saved, head(2), {})
    assert again.stepper.head == head(2)
    assert again.stepper.statistics.changes(2).tolist() == [0.0, 0.0]
    for epoch, average in enumerate(given[2:], 3):
        trainee.step(average, epoch)
        again.step(average, epoch)
    assert same(again.parameters, trainee.parameters)
    assert same(again.parameters, hosted(again))
    assert same(again.buffers, trainee.buffers)
    again.stepper.close()


def hand_over(donor: Trainee, joiner: Trainee) -> bytes:
    """The donor's state for the joiner; returns the digest."""
    snapshot = donor.stepper.snapshot(None)
    assert snapshot is not None
    joiner.stepper.adopt(joiner.stepper.read(memoryview(snapshot.description)), snapshot.content.copy())
    return snapshot.digest


@pytest.mark.parametrize("way", WAYS)
def test_a_scheduler_goes_back_with_the_state_of_a_lineage_of_fewer_steps(way: str) -> None:
    """The one with more samples wins, and after a healed partition that may be the one with fewer steps."""
    schedulers = [SwarmSchedulers(lambda scheduler, epoch: scheduler.step(), goes_back=True) for _ in range(2)]
    winner, loser = (Trainee(way, scheduler=one) for one in schedulers)
    for one in schedulers:
        one.resume(0)
    given = averages(6, 9)
    for epoch, average in enumerate(given[:5], 1):
        loser.step(average, epoch)
        if epoch <= 2:
            winner.step(average, epoch)
    hand_over(winner, loser)
    assert rates(loser) == rates(winner)
    winner.step(given[5], 3)
    loser.step(given[5], 3)
    assert rates(loser) == rates(winner)
    assert same(loser.parameters, winner.parameters)
    winner.stepper.close()
    loser.stepper.close()


def rates(trainee: Trainee) -> list[float]:
    return [group["lr"] for group in trainee.stepper.optimizer.param_groups]


def test_a_copy_is_made_anew_only_after_a_step(trainee: Trainee) -> None:
    first = trainee.stepper.snapshot(None)
    assert trainee.stepper.snapshot(first) is first
    trainee.step(averages(1, 9)[0], 1)
    second = trainee.stepper.snapshot(first)
    assert second is not None
    assert second.head == head(1)


def swap(trainee: Trainee, by: float) -> None:
    with torch.no_grad():
        for parameter in trainee.parameters:
            parameter.add_(by)


def test_no_state_is_given_while_something_else_lies_in_the_model(trainee: Trainee) -> None:
    """A callback may have put averaged weights there to validate them (EMA); what lies in host memory is as ever."""
    trainee.stepper.leave()
    assert trainee.stepper.snapshot(None) is not None, "nobody has"
    swap(trainee, 1.0)
    assert (trainee.stepper.snapshot(None) is None) is (trainee.way == "in place")
    swap(trainee, -1.0)
    trainee.stepper.back()
    assert trainee.stepper.snapshot(None) is not None


@pytest.mark.parametrize("taken_out", [False, True])
def test_no_state_is_given_if_something_else_is_put_there_while_it_is_copied_and_described(
    monkeypatch: pytest.MonkeyPatch, taken_out: bool
) -> None:
    """Also if nothing of it is there any more afterwards."""
    trainee = Trainee()
    described = State.described

    def slowly(state: State) -> Snapshot:
        swap(trainee, 1.0)
        found = described(state)
        if taken_out:
            swap(trainee, -1.0)
            trainee.stepper.back()
        return found

    trainee.stepper.leave()
    with monkeypatch.context() as patch:
        patch.setattr(State, "described", slowly)
        assert trainee.stepper.snapshot(None) is None
    assert (trainee.stepper.snapshot(None) is not None) is taken_out


@pytest.mark.parametrize("wanted", [True, False])
def test_a_state_that_is_given_stays_as_it_is_while_something_else_lies_in_the_model(
    trainee: Trainee, wanted: bool
) -> None:
    given = trainee.stepper.snapshot(None)
    assert given is not None
    given.content.wanted = wanted
    before = bytes(given.content.read(slice(0, given.content.size)) or b"")
    trainee.stepper.leave()
    kept = trainee.weight.detach().clone()
    with torch.no_grad():
        trainee.weight.fill_(100.0)
    after = given.content.read(slice(0, given.content.size))
    assert bytes(after or b"") == (b"" if trainee.way == "in place" and not wanted else before)
    with torch.no_grad():
        trainee.weight.copy_(kept)
    trainee.stepper.back()
    again = trainee.stepper.snapshot(given)
    assert again is not None
    assert again.key == given.key


@pytest.mark.parametrize("wanted", [True, False])
def test_a_state_that_is_given_stays_as_it_is_over_a_step_or_is_gone(trainee: Trainee, wanted: bool) -> None:
    for epoch in (1, 2):  # before its first step an optimizer keeps nothing
        first = trainee.stepper.snapshot(None)
        assert first is not None
        first.content.wanted = wanted
        before = bytes(first.content.read(slice(0, first.content.size)) or b"")
        trainee.step(averages(epoch, 9)[-1], epoch)
        trainee.stepper.settle(wait=True)
        after = first.content.read(slice(0, first.content.size))
        assert (after is None) is not wanted
        assert not wanted or bytes(after or b"") == before
        second = trainee.stepper.snapshot(first)
        assert second is not None
        assert second.key != first.key


def test_what_others_fetch_already_is_no_more_to_send() -> None:
    trainee = Trainee(buffers=[torch.zeros(2)])
    first = trainee.stepper.snapshot(None)
    assert first is not None
    assert trainee.stepper.bytes_to_send(None) == trainee.stepper.state_bytes > 0
    assert trainee.stepper.bytes_to_send(first) == 0
    trainee.step(averages(1, 9)[0], 1)
    assert trainee.stepper.bytes_to_send(first) == trainee.stepper.state_bytes


def test_where_somebody_else_changes_parameters_a_state_is_copied_at_once() -> None:
    """A hook that clamps weights, or an embedding with max_norm: between two steps."""
    trainee = Trainee(buffers=[torch.zeros(2)])
    first = trainee.stepper.snapshot(None)
    assert first is not None
    assert trainee.stepper.room_for_copy(first) is None
    trainee.parameters[0].data.add_(1.0)
    assert first.content.read(first.spans[0]) is None
    room = trainee.stepper.room_for_copy(first)
    assert room is not None
    second = trainee.stepper.snapshot(first, room)
    assert second is not None
    trainee.parameters[0].data.add_(1.0)
    assert second.content.read(second.spans[0]) is not None
    trainee.step(averages(1, 9)[0], 1)
    assert trainee.stepper.room_for_copy(second) is not None, "from then on"


def test_two_that_are_given_at_one_head_both_outlive_a_step() -> None:
    """What is this peer's own may have changed between them."""
    mask = torch.zeros(2, dtype=torch.bool)
    trainee = Trainee(buffers=[torch.zeros(2), mask])
    first = trainee.stepper.snapshot(None)
    mask[0] = True
    second = trainee.stepper.snapshot(None)
    assert first is not None
    assert second is not None
    assert first.key != second.key
    trainee.step(averages(1, 9)[0], 1)
    for one in (first, second):
        assert all(one.content.read(place) is not None for place in one.spans)


def test_no_copy_of_wrong_parameters_is_given_once_they_were_replaced() -> None:
    """At one head: they were found to differ from the others'."""
    right, wrong = Trainee(buffers=[torch.zeros(2)]), Trainee(seed=5, buffers=[torch.zeros(2)])
    known = wrong.stepper.snapshot(None)
    digest = hand_over(right, wrong)
    found = wrong.stepper.snapshot(known)
    assert known is not None
    assert found is not None
    assert found.digest == digest != known.digest


@pytest.mark.parametrize("way", WAYS)
def test_a_state_may_come_from_a_peer_that_steps_elsewhere(trainee: Trainee, way: str) -> None:
    joiner = Trainee(way, seed=5, buffers=[torch.full((2,), 9.0)])
    given = [torch.cat((average, torch.ones(2))) for average in averages(3)]
    trainee.step(given[0], 1)
    hand_over(trainee, joiner)
    assert joiner.stepper.head == head(1)
    assert same(joiner.parameters, trainee.parameters)
    for epoch, average in enumerate(given[1:], 2):
        trainee.step(average, epoch)
        joiner.step(average, epoch)
    assert same(joiner.parameters, trainee.parameters)
    assert same(joiner.buffers, trainee.buffers)
    joiner.stepper.close()


def test_a_donor_in_the_midst_of_a_batch_gives_the_common_statistics() -> None:
    """Else who joins is apart from the others by what the donor alone had seen, for ever."""
    donor, joiner = Trainee(buffers=[torch.zeros(2)]), Trainee(seed=5, buffers=[torch.zeros(2)])
    donor.buffers[0] += 1.0  # BatchNorm, in a forward pass
    hand_over(donor, joiner)
    for one in (donor, joiner):
        one.step(torch.cat((averages(1)[0], torch.ones(2))), 1)
    assert same(donor.buffers, joiner.buffers)


def test_peers_that_have_seen_other_batches_are_donors_of_the_same_bytes() -> None:
    """Else a model with BatchNorm is never downloaded from more than one donor."""
    donors = [Trainee(buffers=[torch.zeros(2), torch.tensor(0), torch.tensor([mask])]) for mask in (True, False)]
    donors[0].buffers[0] += 1.0
    donors[0].buffers[1] += 1
    joiner = Trainee(seed=5, buffers=[torch.zeros(2), torch.tensor(0), torch.tensor([True])])
    assert hand_over(donors[0], joiner) == hand_over(donors[1], joiner)


def test_what_all_have_in_common_is_compared_to_the_last_bit_and_nothing_else() -> None:
    """A forward pass of BatchNorm is each peer's own until the next step."""
    one = Trainee(buffers=[torch.ones(2), torch.tensor(0), torch.tensor([True])])
    before = digest_of_tensors(one.stepper.common)
    one.buffers[0] += 1.0
    one.buffers[1] += 1
    one.buffers[2].fill_(False)
    assert digest_of_tensors(one.stepper.common) == before
    for tensor in (one.weight, one.frozen, one.stepper.statistics.base[0], one.stepper.statistics.base[1]):
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1
        assert digest_of_tensors(one.stepper.common) != before
        with torch.no_grad():
            tensor.copy_(kept)
    assert digest_of_tensors(one.stepper.common) == before
