"""What rank 0 hands out the other ranks have as it has it: two processes, gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hivemind.engine.base import Changed
from lightning_hivemind.peer.ranks import Ranks
from lightning_hivemind.peer.replicas import Replicas
from unit.two_ranks import Act, of_both


class Trained:
    """A module in memory of unlike shapes, with an optimizer; rank 0 has made two steps, the other one none."""

    def __init__(self, rank: int, group: Any, *, each_steps: bool = True, fused: bool = False) -> None:
        torch.manual_seed(rank)
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.unreached = torch.nn.Linear(2, 2)
        self.mean, self.mask = torch.full((2,), float(rank)), torch.tensor([rank, rank])
        self.parameters = [*self.conv.parameters(), *self.frozen.parameters(), *self.unreached.parameters()]
        self.counter = torch.tensor(rank, dtype=torch.int16)  # which gloo does not send
        lr = 0.1 * (1 + rank)
        self.optimizer = torch.optim.Adam(self.parameters, lr=torch.tensor(lr) if fused else lr, fused=fused)
        self.lr = self.optimizer.param_groups[0]["lr"]
        for _ in range(0 if rank else 2):
            self.step()
        tensors = [self.mean, self.mask, self.counter]
        self.replicas = Replicas(Ranks(rank, 2), group, self.optimizer, tensors, each_steps=each_steps)

    def step(self) -> None:
        torch.manual_seed(7)
        self.optimizer.zero_grad()
        self.conv(torch.randn(2, 3, 5, 5)).square().sum().backward()
        self.optimizer.step()

    def told(self) -> dict[str, Any]:
        return {
            "parameters": [p.detach().clone() for p in self.parameters],
            "state": self.optimizer.state_dict()["state"],
            "lr": self.optimizer.param_groups[0]["lr"],
            "mean": self.mean,
            "mask": self.mask,
            "counter": self.counter,
        }


def take_a_state(rank: int, group: Any) -> Any:
    one = Trained(rank, group, fused=True)
    one.replicas.values(Changed.STATE)
    before = one.told()
    assert type(before["lr"]) is type(one.lr)
    for _ in range(3):
        one.step()
    return before, one.told()


def test_a_state_that_was_taken_is_whole_and_lies_as_it_should() -> None:
    """Of parameters that are not contiguous, too, by which a fused optimizer steps on without looking."""
    for mine, theirs in zip(*of_both(take_a_state), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def take(changed: Changed, *, each_steps: bool) -> Act:
    return _Take(changed, each_steps)


class _Take:
    def __init__(self, changed: Changed, each_steps: bool) -> None:
        self._changed, self._each_steps = changed, each_steps

    def __call__(self, rank: int, group: Any) -> Any:
        one = Trained(rank, group, each_steps=self._each_steps)
        one.replicas.values(self._changed)
        return one.told()


def test_what_has_no_mean_is_each_ranks_own_but_for_a_state() -> None:
    mine, theirs = of_both(take(Changed.STATISTICS, each_steps=True))
    assert mine["mean"].tolist() == theirs["mean"].tolist() == [0.0, 0.0]
    assert theirs["mask"].tolist() == [1, 1]
    mine, theirs = of_both(take(Changed.STATE, each_steps=True))
    assert theirs["mask"].tolist() == [0, 0]


def test_where_rank_0_alone_steps_the_others_get_no_optimizers_state() -> None:
    mine, theirs = of_both(take(Changed.STATE, each_steps=False))
    torch.testing.assert_close(mine["parameters"], theirs["parameters"], rtol=0, atol=0)
    assert mine["state"]
    assert not theirs["state"]


def take_gradients(rank: int, group: Any) -> Any:
    one = Trained(rank, group)
    for place, parameter in enumerate(one.parameters):
        parameter.grad = None if rank == 0 and place > 1 else torch.full_like(parameter, rank + 1.0)
    if rank:  # what an embedding may have left
        one.parameters[0].grad = torch.ones(4, 3, 3, 3).to_sparse()
    one.replicas.gradients([place < 2 for place in range(len(one.parameters))])
    return [p.grad for p in one.parameters]


def take_host_gradients(rank: int, group: Any) -> Any:
    one = Trained(rank, group)
    host = [p.detach().clone() for p in one.parameters]
    for parameter in host[:2]:
        parameter.grad = torch.ones_like(parameter)
    one.replicas.host_gradients([place < 2 for place in range(len(host))], None if rank else host)
    return [p.grad for p in (one.parameters if rank else host)]


def change_in_a_hook(rank: int, group: Any) -> Any:
    """Of a model in bfloat16: the first gradient, and the second one away."""
    one = Trained(rank, group)
    for parameter in one.parameters:
        parameter.data = parameter.data.bfloat16()
    host = [p.detach().clone() for p in one.parameters]
    for parameter in host[:3]:
        parameter.grad = torch.full_like(parameter, 1 / 3)
    given = None if rank else host
    one.replicas.host_gradients([place < 3 for place in range(len(host))], given)
    seen = [None if p.grad is None else p.grad.clone() for p in one.parameters]
    one.parameters[0].grad.mul_(2.0)
    one.parameters[1].grad = None
    one.parameters[3].grad = torch.ones_like(one.parameters[3])
    one.replicas.take_back([place < 3 for place in range(len(host))], given)
    return seen, [p.grad for p in host[:4]]


def test_at_rank_0_hooks_see_gradients_where_the_others_do_and_what_they_change_is_stepped_on() -> None:
    (mine, (changed, gone, same, added)), (theirs, _) = of_both(change_in_a_hook)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    third = torch.tensor(1 / 3).bfloat16().item()
    assert torch.equal(changed, torch.full_like(changed, 2 * third))
    assert gone is None
    assert torch.equal(same, torch.full_like(same, third))
    assert torch.equal(added, torch.ones_like(added))


@pytest.mark.parametrize("act", [take_gradients, take_host_gradients])
def test_gradients_are_rank_0s_and_where_it_has_none_nobody_has(act: Act) -> None:
    mine, theirs = of_both(act)
    assert [one is None for one in mine] == [one is None for one in theirs] == [False, False, True, True, True, True]
    for one, other in zip(mine[:2], theirs[:2], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, torch.ones_like(one))
