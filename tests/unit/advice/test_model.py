"""What a model needs, found out without memory for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hivemind.advice.model import find, look_at
from lightning_hivemind.errors import ArgumentError


class Net(nn.Module):
    def __init__(self, width: int = 64, optimizer: str = "adamw", frozen: bool = False, example: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 2)
        self.register_buffer("seen", torch.zeros(3))
        self.first.requires_grad_(not frozen)
        self.name = optimizer
        if example:
            self.example_input_array = torch.zeros(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out

    def configure_optimizers(self) -> Any:
        if self.name == "none":
            raise RuntimeError("needs a Trainer")
        trained = [p for p in self.parameters() if p.requires_grad]
        momentum = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return {"optimizer": torch.optim.AdamW(trained)} if self.name == "adamw" else [[momentum], []]


FIRST, SECOND = 64 * 8 + 64, 2 * 64 + 2


def test_it_counts_values_and_bytes() -> None:
    facts = look_at(Net)
    assert facts.parameters == facts.trained == FIRST + SECOND
    assert facts.bytes == 4 * (FIRST + SECOND + 3)
    assert facts.largest == FIRST
    assert facts.unknown == ()


def test_what_is_frozen_is_not_trained_but_computed_with() -> None:
    facts = look_at(Net, {"frozen": True})
    assert (facts.parameters, facts.trained, facts.largest) == (FIRST + SECOND, SECOND, FIRST)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 10))


class OfBlocks(nn.Module):
    """A word table, and a head that is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 10), nn.Linear(10, 30, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def test_a_model_of_blocks_is_gathered_block_by_block() -> None:
    facts = look_at(OfBlocks)
    assert facts.block == "Block"
    assert facts.parameters == 300 + 3 * 850
    assert facts.at_once == 300 + 850
    flat = look_at(Net)
    assert (flat.block, flat.at_once) == ("Linear", FIRST)
    small = look_at(lambda: nn.Sequential(nn.Linear(4, 4), nn.Embedding(30, 10), nn.Linear(4, 4)))
    assert (small.block, small.at_once) == ("", small.parameters)


@pytest.mark.parametrize(("optimizer", "state_bytes"), [("adamw", 8), ("momentum", 4)])
def test_the_optimizer_is_asked_what_it_keeps(optimizer: str, state_bytes: int) -> None:
    assert look_at(Net, {"optimizer": optimizer}).state_bytes == pytest.approx(state_bytes, rel=0.1)


def test_a_sample_is_what_torch_keeps_and_does_for_it() -> None:
    """Of 4 samples: the input; the first layer's output, once; and three times the forward pass's products."""
    facts = look_at(Net)
    assert facts.activation_bytes == 4 * (8 + 64)
    assert facts.flops == 3 * 2 * (8 * 64 + 64 * 2)


class Named(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = {"x": torch.zeros(4, 8)}  # type: ignore[assignment]


def test_an_example_may_have_names() -> None:
    assert look_at(Named).flops == look_at(Net).flops


def test_what_cannot_be_known_is_said() -> None:
    facts = look_at(Net, {"optimizer": "none", "example": False})
    assert facts.state_bytes == 8
    assert facts.flops is facts.activation_bytes is None
    assert "needs a Trainer" in facts.unknown[0]
    assert "example_input_array" in facts.unknown[1]


def test_a_large_model_takes_no_memory() -> None:
    facts = look_at(Net, {"width": 10**9, "example": False})
    assert facts.trained == 8 * 10**9 + 10**9 + 2 * 10**9 + 2


class Late(nn.Module):
    def configure_model(self) -> None:
        self.layer = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_is_made_in_configure_model_counts() -> None:
    facts = look_at(Late)
    assert facts.trained == 12
    assert facts.state_bytes == 0


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.zeros(2).sum().item()


@pytest.mark.parametrize(
    ("make", "says"), [(Reads, "cannot be made without memory"), (dict, "makes a dict, not a torch module")]
)
def test_what_is_no_model_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        look_at(make)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("torch", "MODULE:CLASS"),
        ("nowhere.at_all:Net", "cannot be had"),
        ("torch:nothing", "cannot be had"),
        ("torch:float32", "is no class"),
    ],
)
def test_where_nothing_is_is_said(where: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        find(where)
