"""What the strategy does when a fit is over."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.accelerators import CPUAccelerator

pytest.importorskip("hivemind")

from lightning_hivemind import HivemindStrategy


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
