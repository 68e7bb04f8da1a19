"""What the strategy does before a fit and when it is over."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

pytest.importorskip("hivemind")

from lightning_hivemind import HivemindStrategy
from lightning_hivemind.arguments import Arguments


def test_published_arguments_have_the_defaults_of_arguments_and_come_in_the_published_order() -> None:
    published = list(inspect.signature(HivemindStrategy.__init__).parameters.values())[1:-1]
    assert [one.name for one in published] == [
        *("target_batch_size", "run_id", "batch_size", "delay_state_averaging", "delay_optimizer_step"),
        *("delay_grad_averaging", "offload_optimizer", "reuse_grad_buffers", "scheduler_fn", "matchmaking_time"),
        *("averaging_timeout", "verbose", "averager_opts", "host_maddrs", "initial_peers"),
    ]
    defaults = {one.name: one.default for one in dataclasses.fields(Arguments)}
    given = {one.name: one.default for one in published[1:]}
    assert given.pop("initial_peers") is None  # then the environment's
    assert given == {name: defaults[name] for name in given}


class Part:
    """A session or a network that remembers how it was closed, and may fail at it."""

    epoch = 7

    def __init__(self, error: Exception | None = None) -> None:
        self.limits: list[float] = []
        self._error = error

    def close(self, timeout_s: float) -> None:
        self.limits.append(timeout_s)
        if self._error is not None:
            raise self._error

    shutdown = close


class Accelerator(CPUAccelerator):
    torn_down = False

    def teardown(self) -> None:
        self.torn_down = True


def running(session: Part, network: Part, **arguments: Any) -> Any:
    strategy: Any = HivemindStrategy(target_batch_size=8, initial_peers=[], **arguments)
    strategy.accelerator = Accelerator()
    strategy._session, strategy._network = session, network
    return strategy


@pytest.mark.parametrize("failing", ["session", "network"])
def test_whatever_fails_in_leaving_the_rest_is_stopped(failing: str) -> None:
    error = RuntimeError("cannot leave")
    parts = {name: Part(error if name == failing else None) for name in ("session", "network")}
    strategy = running(**parts)
    with pytest.raises(RuntimeError, match="cannot leave"):
        strategy.teardown()
    assert [len(part.limits) for part in parts.values()] == [1, 1]
    assert strategy.accelerator.torn_down
    assert strategy.global_epoch == 7
    strategy.teardown()
    assert [len(part.limits) for part in parts.values()] == [1, 1]


@pytest.mark.parametrize("shutdown_timeout", [2.0, 60.0])
def test_shutdown_timeout_is_what_the_engine_gets(shutdown_timeout: float) -> None:
    session = Part()
    running(session, Part(), shutdown_timeout=shutdown_timeout).teardown()
    assert session.limits == [shutdown_timeout]


def test_after_the_fit_asking_for_the_dht_starts_none_that_nobody_would_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = running(Part(), Part())
    strategy.teardown()
    monkeypatch.setattr(strategy, "_started_network", lambda: pytest.fail("started a DHT"))
    with pytest.raises(RuntimeError, match="before or during"):
        _ = strategy.dht


def test_before_any_fit_asking_for_the_dht_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = HivemindStrategy(target_batch_size=8, initial_peers=[])
    started: Any = type("Network", (), {"dht": object()})
    monkeypatch.setattr(strategy, "_started_network", lambda: started)
    assert strategy.dht is started.dht


class Normed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)

    def validation_step(self, batch: Any, index: int) -> None:
        self.norm(batch)


def test_extra_tensors_that_are_buffers_stay_the_modules_own_when_it_is_moved_or_converted() -> None:
    """Twice, since a fit may follow: ``Module.to`` replaces the buffers, and what was given would be an orphan."""
    model, other = Normed(), torch.zeros(1)
    assert model.norm.running_mean is not None
    given = [model.norm.running_mean, other]
    strategy: Any = HivemindStrategy(target_batch_size=8, initial_peers=[], extra_tensors=given)
    trainer = pl.Trainer(
        strategy=strategy,
        precision="bf16-true",
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
    )
    for _ in range(2):
        trainer.validate(model, torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2), verbose=False)
        assert strategy.extra_tensors[0] is model.norm.running_mean
        assert strategy.extra_tensors[1] is other
    assert strategy.extra_tensors[0] is not given[0]


class Full:
    """A stdout on a full disk, or at a closed pipe."""

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stdout", [None, Full()], ids=["none", "full"])
def test_where_nothing_can_be_printed_the_invitation_is_in_the_log(
    stdout: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy: Any = HivemindStrategy(target_batch_size=8, initial_peers=[])
    address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        strategy._announce(SimpleNamespace(visible_addresses=lambda: [address]))
    assert f"INITIAL_PEERS={address}" in caplog.text
