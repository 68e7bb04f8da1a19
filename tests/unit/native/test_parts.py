"""What the user's arguments mean for the rounds of ``engine="native"``, and for its connections."""

from __future__ import annotations

import socket
import ssl
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.native import parts as parts_module
from lightning_hivemind.engine.native.codecs.mapping import map_codec
from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.layout import Layout, layout_of
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.parts import Parts, build, limits, longest_wait_s
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.statistics import Statistics
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.simulation.scenario import Scenario
from swarm.engines import Introduced
from swarm.town import wait_for

ALL_DELAYS = {"delay_state_averaging": True, "delay_grad_averaging": True, "delay_optimizer_step": True}
LAYOUT = Layout(1000, chunk_elements=300)


@pytest.mark.parametrize(
    ("given", "limit", "value"),
    [
        ({"target_batch_size": 4321}, "target_samples", 4321),
        ({"matchmaking_time": 3.25}, "matchmaking_s", 3.25),
        ({"next_chunk_timeout": 4.25}, "stall_s", 4.25),
        ({"allreduce_timeout": 17.5}, "round_s", 17.5),
        ({"averaging_timeout": 23.5, "matchmaking_time": 1.0}, "round_s", 23.5),
        ({"averager_opts": {"min_group_size": 3}}, "min_group_size", 3),
        ({}, "min_group_size", 1),
        ({}, "chunks", 4),
        ({}, "run", "a run"),
    ],
    ids=str,
)
def test_an_argument_is_a_limit_of_rounds(given: dict[str, Any], limit: str, value: object) -> None:
    arguments = Arguments(**{"target_batch_size": 64, **given})
    assert getattr(limits(arguments, "a run", LAYOUT), limit) == value


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"matchmaking_time": 3.0, "averaging_timeout": 45.0},
        {"matchmaking_time": 2.5, "averaging_timeout": 20.0, "next_chunk_timeout": 1.5},
    ],
    ids=str,
)
def test_a_forecast_has_the_limits_that_a_run_with_the_same_arguments_has(given: dict[str, Any]) -> None:
    scenario = Scenario(peers=3, parameters=300_000, target_batch_size=640, **given)
    arguments = Arguments(target_batch_size=640, **given)
    assert scenario.settings() == limits(arguments, "forecast", layout_of(300_000))


@pytest.mark.parametrize(
    ("given", "waits_s"),
    [
        ({}, 4.0),
        ({"reuse_grad_buffers": True}, 4.0),
        (ALL_DELAYS, 0.0),
        ({**ALL_DELAYS, "delay_grad_averaging": False}, 4.0),
        ({"use_local_updates": True}, 4.0),
        ({"use_local_updates": True, "delay_state_averaging": True}, 0.0),
    ],
    ids=str,
)
def test_who_trains_on_in_rounds_is_not_waited_for(given: dict[str, Any], waits_s: float) -> None:
    arguments = Arguments(**{"target_batch_size": 64, "matchmaking_time": 5.0, **given})
    assert longest_wait_s(arguments) == pytest.approx(waits_s)


def built(me: str, arguments: Arguments) -> Parts:
    gradients = Gradients(me, [torch.nn.Parameter(torch.zeros(3))], Statistics([]), max_staleness=1)
    network: Any = SimpleNamespace(peer_id=me, dht=me)
    coding = map_codec(None, "grad_compression")
    return build(arguments, "run", network, gradients, Memory(), coding, lambda known: None, StateMemory(), lambda: -1)


def sockets_of(links: Links) -> list[socket.socket]:
    """What it reads and what it writes."""
    return [
        *(one.sock for one in links._inlets if one.peer),
        *(out for found in links._in_use.values() for out in found),
    ]


@pytest.mark.parametrize("insecure_lan", [None, False, True])
def test_connections_are_encrypted_unless_the_user_wants_them_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, insecure_lan: bool | None
) -> None:
    monkeypatch.setattr(parts_module, "Introductions", Introduced)
    given: dict[str, Any] = {} if insecure_lan is None else {"insecure_lan": insecure_lan}
    arguments = Arguments(target_batch_size=64, host_maddrs=["/ip4/127.0.0.1/tcp/0"], **given)
    peers = [built(me, arguments) for me in "ab"]
    try:
        first, second = (Introduced.everybody[me].links for me in "ab")
        first.send("b", Header(kind=Kind.PING))
        wait_for(lambda: len(sockets_of(first)) == len(sockets_of(second)) == 2, "connections both ways")
        kinds = {type(one) for one in (*sockets_of(first), *sockets_of(second))}
    finally:
        for peer in peers:
            peer.stop(time.monotonic() + 5.0)
    assert kinds == {socket.socket if insecure_lan else ssl.SSLSocket}
    assert ("in the clear" in caplog.text) == bool(insecure_lan)


@pytest.mark.parametrize("given", [{"next_chunk_timeout": 4.25}, {"matchmaking_time": 4.25}], ids=str)
def test_a_donor_may_be_silent_for_next_chunk_timeout(monkeypatch: pytest.MonkeyPatch, given: dict[str, float]) -> None:
    monkeypatch.setattr(parts_module, "Introductions", Introduced)
    one = built("a", Arguments(target_batch_size=64, **given))  # type: ignore[arg-type]
    one.stop(time.monotonic() + 5.0)
    assert one.downloads._silence_s == 4.25


ONLY_OFFLOADS = "delay_state_averaging: by itself it does what offload_optimizer=True does"
NOT_NEEDED = 'not needed with engine="native"'


@pytest.mark.parametrize(
    ("given", "said", "unsaid"),
    [
        ({"delay_state_averaging": True}, [ONLY_OFFLOADS], [NOT_NEEDED]),
        ({"delay_state_averaging": True, "offload_optimizer": False}, [f"delay_state_averaging: {NOT_NEEDED}"], []),
        (
            {"delay_state_averaging": True, "average_opt_statistics": ["exp_avg"]},
            [ONLY_OFFLOADS, f"average_opt_statistics: {NOT_NEEDED}"],
            [],
        ),
        ({"delay_state_averaging": True, "use_local_updates": True}, [], [NOT_NEEDED, ONLY_OFFLOADS]),
        (ALL_DELAYS, [], [NOT_NEEDED, ONLY_OFFLOADS]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_of_an_argument_that_averages_nothing_is_said_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    said: list[str],
    unsaid: list[str],
) -> None:
    monkeypatch.setattr(parts_module, "Introductions", Introduced)
    with caplog.at_level("INFO", logger="lightning_hivemind"):
        built("a", Arguments(target_batch_size=64, **given)).stop(time.monotonic() + 5.0)
    assert [one for one in said if one not in caplog.text] == []
    assert [one for one in unsaid if one in caplog.text] == []
