"""Downloads until the state is new enough, then one installation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.optim.state_averager import dump_optimizer_state

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.stock import adoption
from lightning_hivemind.errors import StateError

START = 1.0


class Peer:
    """What ``adopt_state`` touches of one: a parameter, its optimizer, and donors that answer in turn."""

    def __init__(self, *answers: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.tensor([START]))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.main_parameters = [self.parameter]
        self.local_epoch = 2
        self.lock_commit = threading.RLock()
        self.answers = list(answers)

    def download(self, timeout_s: float, should_abort: Callable[[], bool]) -> Any:
        assert not self.lock_commit._is_owned(), "donors of this peer's own state wait for it"  # type: ignore[attr-defined]
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_tensors(self) -> Any:
        return contextlib.nullcontext([self.parameter])

    def _local_tensors(self) -> list[torch.Tensor]:
        return [self.parameter]

    def adopt(self, swarm_epoch: int) -> bool:
        parts: Any = SimpleNamespace(state=self, grads=None, tracker=SimpleNamespace(global_epoch=swarm_epoch))
        training: Any = SimpleNamespace(extra_tensors=[], advance_schedulers=lambda epoch: None)
        arguments = Arguments.create(target_batch_size=8, environ={})
        return adoption.adopt_state(arguments, parts, training, lambda: False)


def state(epoch: int, value: float) -> tuple[dict[str, Any], list[torch.Tensor]]:
    flat, tensors = dump_optimizer_state(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    return {"epoch": epoch, "optimizer_metadata": flat}, [torch.tensor([value]), *tensors]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "PAUSE_S", 0.0)


def test_a_donor_that_lags_is_asked_again() -> None:
    peer = Peer(state(4, 4.0), state(5, 5.0))
    assert peer.adopt(swarm_epoch=5)
    assert (peer.local_epoch, peer.parameter.item()) == (5, 5.0)


def test_a_failure_after_a_lagging_donor_changes_nothing() -> None:
    peer = Peer(state(4, 4.0), StateError("silence"))
    with pytest.raises(StateError, match="silence"):
        peer.adopt(swarm_epoch=5)
    assert (peer.local_epoch, peer.parameter.item()) == (2, START)


def test_what_lags_for_good_is_better_than_nothing() -> None:
    peer = Peer(*(state(4, 4.0) for _ in range(adoption.RETRIES)))
    assert peer.adopt(swarm_epoch=5)
    assert peer.local_epoch == 4


def test_an_older_state_is_not_taken() -> None:
    assert not Peer(state(1, 9.0)).adopt(swarm_epoch=5)
