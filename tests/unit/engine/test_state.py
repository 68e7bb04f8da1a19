"""Taking over a state: all of it or nothing, with learning rates that are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hivemind.optim.state_averager import dump_optimizer_state

from lightning_hivemind.engine.priming import prime_optimizer_state
from lightning_hivemind.engine.stock.state import has_state, install_state
from lightning_hivemind.errors import StateError


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def state_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: Any
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    flat, tensors = dump_optimizer_state(optimizer)
    sent = [p.detach().clone() for p in model.parameters()] + [tensor.clone() for tensor in tensors]
    return {"epoch": epoch, "optimizer_metadata": flat}, sent


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD])
def test_priming_changes_neither_parameters_nor_the_first_step(kind: Any) -> None:
    primed, fresh = net(0), net(0)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizers = [kind(model.parameters(), lr=0.1, weight_decay=0.5, **settings) for model in (primed, fresh)]
    before = [p.detach().clone() for p in primed.parameters()]
    prime_optimizer_state(optimizers[0])
    assert has_state(optimizers[0])
    assert all(torch.equal(a, b) for a, b in zip(before, primed.parameters(), strict=True))
    for model, optimizer in zip((primed, fresh), optimizers, strict=True):
        step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(primed.parameters(), fresh.parameters(), strict=True))


def test_a_joiner_steps_on_exactly_as_its_donor() -> None:
    donor, joiner = net(0), net(1)
    theirs, mine = adamw(donor), adamw(joiner)
    for _ in range(3):
        step(donor, theirs)
    installed = install_state(mine, [], *state_of(donor, theirs, 3))
    assert installed.epoch == 3
    installed.settle_rates(mine)
    for model, optimizer in ((donor, theirs), (joiner, mine)):
        step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(donor.parameters(), joiner.parameters(), strict=True))


def test_a_chainable_scheduler_advanced_by_a_joiner_does_not_apply_its_factor_twice() -> None:
    donor, joiner = net(0), net(1)
    theirs, mine = adamw(donor), adamw(joiner)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5) for optimizer in (theirs, mine)]
    for _ in range(3):
        step(donor, theirs)
        schedulers[0].step()
    installed = install_state(mine, [], *state_of(donor, theirs, 3))
    for _ in range(3):
        mine.step()
        schedulers[1].step()
    installed.settle_rates(mine)
    assert mine.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert theirs.param_groups[0]["lr"] == mine.param_groups[0]["lr"]


def test_a_donor_that_has_made_no_step_gives_parameters_only() -> None:
    donor, joiner = net(0), net(1)
    mine = adamw(joiner)
    install_state(mine, [], *state_of(donor, adamw(donor), 0))
    assert all(torch.equal(a, b) for a, b in zip(donor.parameters(), joiner.parameters(), strict=True))
    assert not has_state(mine)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda meta, tensors: (dict(meta, epoch=True), tensors), "epoch=True"),
        (lambda meta, tensors: (dict(meta, epoch=-1), tensors), "epoch=-1"),
        (lambda meta, tensors: (meta, tensors[:2]), "another model"),
        (lambda meta, tensors: (meta, [torch.zeros(7), *tensors[1:]]), r"shape \(7,\)"),
        (lambda meta, tensors: (dict(meta, optimizer_metadata=None), tensors), "optimizer state"),
        (lambda meta, tensors: (dict(meta, optimizer_metadata=meta["optimizer_metadata"][:-1]), tensors), "entries"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(damage: Any, said: str) -> None:
    donor, joiner = net(0), net(1)
    theirs, mine = adamw(donor), adamw(joiner)
    step(donor, theirs)
    before = [p.detach().clone() for p in joiner.parameters()]
    with pytest.raises(StateError, match=said):
        install_state(mine, [], *damage(*state_of(donor, theirs, 1)))
    assert all(torch.equal(a, b) for a, b in zip(before, joiner.parameters(), strict=True))
    assert not has_state(mine)


@pytest.mark.parametrize("stock_donor", [False, True], ids=["ours", "stock"])
def test_frozen_parameters_are_no_obstacle(stock_donor: bool) -> None:
    """They have no state where they were never stepped on; hivemind's own optimizer gives them one."""
    models = donor, joiner = net(0), net(1)
    for model in models:
        next(model.parameters()).requires_grad_(False)
    theirs, mine = (torch.optim.Adam(model.parameters(), lr=0.1) for model in models)
    if stock_donor:
        prime_optimizer_state(theirs)
    step(donor, theirs)
    install_state(mine, [], *state_of(donor, theirs, 1))
    for model, optimizer in ((donor, theirs), (joiner, mine)):
        step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(donor.parameters(), joiner.parameters(), strict=True))
