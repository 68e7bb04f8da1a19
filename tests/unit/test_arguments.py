"""Every argument, its default, and every rule between arguments; each refusal must say how to do it right."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import inspect
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import hivemind.compression
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from lightning_hivemind import argument_rules
from lightning_hivemind.arguments import ENGINES, Arguments
from lightning_hivemind.codecs import (
    BFloat16Compression,
    Blockwise4BitQuantization,
    Float16Compression,
    PerTensorCompression,
    PowerSGDGradientAverager,
    SizeAdaptiveCompression,
    TopKCompression,
)
from lightning_hivemind.errors import ArgumentError, LightningHivemindError
from lightning_hivemind.outer import DiLoCo, StreamingDiLoCo

LOW_RANK = functools.partial(functools.partial, PowerSGDGradientAverager)

PEER = "/ip4/203.0.113.5/tcp/31330/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OTHER_PEER = "/ip4/203.0.113.6/tcp/31330/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

PUBLISHED_DEFAULTS = {
    "run_id": "lightning_run",
    "batch_size": None,
    "delay_state_averaging": False,
    "delay_optimizer_step": None,
    "delay_grad_averaging": False,
    "offload_optimizer": None,
    "reuse_grad_buffers": False,
    "scheduler_fn": None,
    "matchmaking_time": 5.0,
    "averaging_timeout": 30.0,
    "verbose": False,
    "averager_opts": None,
    "host_maddrs": None,
    "use_ipfs": False,
    "wait_timeout": 3.0,
    "bootstrap_timeout": None,
    "use_relay": True,
    "use_auto_relay": False,
    "identity_path": None,
    "client_mode": None,
    "startup_timeout": 120.0,
    "engine": "native",
    "grad_compression": None,
    "state_averaging_compression": None,
    "load_state_compression": None,
    "grad_averager_factory": None,
    "average_state_every": 1,
    "use_local_updates": False,
    "auxiliary": False,
    "tracker_opts": None,
    "average_opt_statistics": (),
    "extra_tensors": (),
    "allreduce_timeout": None,
    "next_chunk_timeout": None,
    "load_state_timeout": 600.0,
    "performance_ema_alpha": 0.1,
    "shutdown_timeout": 5.0,
}


def create(target_batch_size: Any = 64, environ: dict[str, str] | None = None, **arguments: Any) -> Arguments:
    return Arguments.create(target_batch_size, environ=environ or {}, **arguments)


def ready_scheduler() -> ExponentialLR:
    return ExponentialLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), gamma=0.9)


@pytest.mark.parametrize(("name", "default"), PUBLISHED_DEFAULTS.items())
def test_argument_exists_with_its_published_default(name: str, default: object) -> None:
    assert {one.name: one.default for one in dataclasses.fields(Arguments)}[name] == default


def test_everything_that_means_decide_for_me_is_decided() -> None:
    arguments = create()
    assert (arguments.delay_optimizer_step, arguments.offload_optimizer, arguments.client_mode) == (False, False, False)
    assert (arguments.allreduce_timeout, arguments.next_chunk_timeout) == (30.0, 5.0)
    assert (dict(arguments.averager_opts), dict(arguments.tracker_opts)) == ({}, {})
    assert arguments.initial_peers == ()


@pytest.mark.parametrize(
    ("given", "offload", "step", "recreates"),
    [
        ({}, False, False, False),
        ({"offload_optimizer": True}, True, False, True),
        ({"delay_state_averaging": True}, True, False, True),
        ({"delay_state_averaging": True, "offload_optimizer": False}, False, False, False),
        ({"delay_state_averaging": True, "delay_optimizer_step": True}, True, True, True),
        ({"delay_state_averaging": True, "delay_grad_averaging": True}, True, True, True),
        ({"delay_state_averaging": True, "use_local_updates": True}, False, False, False),
    ],
)
def test_delays_bring_what_they_need(given: dict[str, bool], offload: bool, step: bool, recreates: bool) -> None:
    arguments = create(**given)
    assert arguments.offload_optimizer is offload
    assert arguments.delay_optimizer_step is step
    assert arguments.recreates_optimizer is recreates


REFUSED: list[tuple[dict[str, Any], str]] = [
    # one value
    ({"target_batch_size": 0}, "target_batch_size=0: is below 1; give an int, 1 or more"),
    ({"engine": "hivemind", "averager_opts": {"target_group_size": 1}}, "target_group_size is no whole number above 1"),
    ({"averager_opts": {"min_group_size": 2.0}}, "min_group_size is no whole number above 1"),
    ({"engine": "hivemind", "averager_opts": {"min_group_size": 3, "target_group_size": 2}}, "lower min_group_size"),
    (
        {"engine": "hivemind", "averager_opts": {"request_timeout": 5.0}},
        "request_timeout=5.0 is not below matchmaking_time=5.0",
    ),
    ({"target_batch_size": True}, "target_batch_size=True: a bool is not a whole number"),
    ({"target_batch_size": 64.0}, "target_batch_size=64.0: a float is not a whole number"),
    ({"batch_size": 0}, "batch_size=0: is below 1"),
    ({"average_state_every": 0}, "average_state_every=0: is below 1"),
    ({"run_id": ""}, "run_id='': has 0 characters; give a name of 1 to 100"),
    ({"run_id": "a" * 101}, "has 101 characters"),
    ({"run_id": "v1.2"}, "run_id='v1.2': contains '.'"),
    ({"run_id": "my run"}, "run_id='my run': contains white space"),
    ({"run_id": 3}, "run_id=3: an int is not text"),
    ({"engine": "gloo"}, "engine='gloo': is unknown; choose one of 'native', 'hivemind'"),
    ({"engine": "hivemind", "max_staleness": 4}, 'leave it away, or use engine="native"'),
    (
        {"engine": "hivemind", "insecure_lan": True},
        'hivemind encrypts everything; leave it away, or use engine="native"',
    ),
    (
        {"engine": "native", "insecure_lan": True, "announce_maddrs": ["/ip4/8.8.8.8/tcp/4000"]},
        "/ip4/8.8.8.8/tcp/4000 is a public address, and everybody on the way could read and change what is sent",
    ),
    ({"engine": "native", "tracker_opts": {"min_refresh_period": 1.0}}, 'leave it away, or use engine="hivemind"'),
    (
        {"engine": "native", "averager_opts": {"min_group_size": 2, "target_group_size": 2}},
        "averager_opts={'target_group_size': 2}: but for min_group_size these are options of hivemind's averagers",
    ),
    (
        {"engine": "native", "tracker_opts": {"max_refresh_period": 1.0}},
        "{'max_refresh_period': 1.0}: the",
    ),
    ({"engine": "native", "performance_ema_alpha": 0.5}, "an option of hivemind's progress tracker"),
    ({"engine": "native", "load_state_compression": Float16Compression()}, "takes the state bit for bit"),
    (
        {"engine": "hivemind", "grad_compression": BFloat16Compression()},
        "hivemind has no wire format for BFloat16Compression; use engine=",
    ),
    (
        {
            "engine": "hivemind",
            "grad_compression": SizeAdaptiveCompression(9, Float16Compression(), Blockwise4BitQuantization()),
        },
        "hivemind has no wire format for Blockwise4BitQuantization",
    ),
    ({"engine": "hivemind", "grad_compression": TopKCompression()}, "hivemind has no wire format for TopKCompression"),
    (
        {"engine": "native", "use_local_updates": True, "state_averaging_compression": TopKCompression()},
        "is sent later, with gradients as they are; use another codec",
    ),
    (
        {
            "engine": "native",
            "auxiliary": True,
            "grad_compression": SizeAdaptiveCompression(9, None, TopKCompression()),
        },
        "which auxiliary=True does not have; use another codec",
    ),
    (
        {"engine": "native", "grad_averager_factory": LOW_RANK(averager_rank=4), "grad_compression": TopKCompression()},
        "which grad_averager_factory=",
    ),
    ({"engine": "native", "grad_averager_factory": dict}, "averages by itself, and takes PowerSGD only"),
    (
        {
            "engine": "native",
            "grad_averager_factory": LOW_RANK(averager_rank=4, warn=False),
        },
        "takes PowerSGD only",
    ),
    (
        {"engine": "native", "grad_averager_factory": LOW_RANK()},
        "needs averager_rank, a whole number from 1",
    ),
    (
        {"engine": "native", "grad_averager_factory": LOW_RANK(averager_rank=0)},
        "such as averager_rank=32",
    ),
    ({"engine": "native", "use_local_updates": True, "average_state_every": 2}, "what target_batch_size says"),
    ({"verbose": 1}, "verbose=1: an int is not a truth value; give True or False"),
    ({"matchmaking_time": 0}, "matchmaking_time=0: is not a finite number above 0"),
    ({"matchmaking_time": float("nan")}, "matchmaking_time=nan: is not a finite number above 0"),
    ({"matchmaking_time": "5"}, "matchmaking_time='5': a str is not a number"),
    ({"startup_timeout": False}, "startup_timeout=False: a bool is not a number"),
    ({"performance_ema_alpha": 1.5}, "performance_ema_alpha=1.5: is above 1"),
    ({"identity_path": os.sep}, "is not the path of a file"),
    ({"identity_path": 3}, "give the path of a file"),
    ({"average_opt_statistics": "exp_avg"}, "give a list, such as ['exp_avg']"),
    ({"average_opt_statistics": [1]}, "contains 1, an int; give a list of texts"),
    ({"extra_tensors": torch.zeros(1)}, "give a list, such as [tensor]"),
    ({"extra_tensors": [1.0]}, "contains a float; give tensors only"),
    ({"grad_compression": Float16Compression}, "is a class, not a codec; add (): Float16Compression()"),
    ({"grad_compression": "float16"}, "a str is not a codec; give one, such as"),
    ({"load_state_compression": 8}, "load_state_compression=8: an int is not a codec"),
    ({"state_averaging_compression": "x"}, "state_averaging_compression='x': a str is not a codec"),
    ({"grad_averager_factory": 32}, "an int cannot be called; give a callable, such as functools.partial(PowerSGD"),
    ({"scheduler_fn": 0.1}, "a float is no scheduler and cannot make one; give callable(optimizer)"),
    ({"scheduler_fn": ReduceLROnPlateau}, "give a scheduler that needs no metric"),
    ({"scheduler_fn": functools.partial(ReduceLROnPlateau, factor=0.5)}, "give a scheduler that needs no metric"),
    ({"averager_opts": [1]}, "averager_opts=[1]: a list is not a dict"),
    # names
    ({"grad_compresion": 1}, "grad_compresion=1: is not an argument; did you mean 'grad_compression'?"),
    ({"dht": None}, "dht=None: is set by the strategy; leave it away and read strategy.dht"),
    ({"optimizer": None}, "return the optimizer from configure_optimizers"),
    ({"params": None}, "return the optimizer from configure_optimizers"),
    ({"scheduler": None}, "use the argument scheduler_fn"),
    ({"batch_size_per_step": 4}, "use the argument batch_size"),
    ({"averager_opts": {"min_matchmaking_time": 1}}, "is set by the strategy; use the argument matchmaking_time"),
    ({"averager_opts": {"compression": 1}}, "use the arguments grad_compression and state_averaging_compression"),
    ({"averager_opts": {"start": True}}, "'start' is set by the strategy; leave it away"),
    ({"averager_opts": {"target_groupsize": 4}}, "did you mean 'target_group_size'?"),
    ({"tracker_opts": {"target_batch_size": 4}}, "use the argument target_batch_size"),
    ({"tracker_opts": {"max_refresh": 4}}, "did you mean 'max_refresh_period'?"),
    # delays
    ({"delay_grad_averaging": True, "delay_optimizer_step": False}, "leave delay_optimizer_step away"),
    ({"delay_grad_averaging": True}, "set delay_state_averaging=True"),
    ({"delay_optimizer_step": True}, "set delay_state_averaging=True"),
    (
        {"delay_state_averaging": True, "delay_optimizer_step": True, "offload_optimizer": False},
        "leave offload_optimizer away or set it to True",
    ),
    ({"offload_optimizer": True, "scheduler_fn": ready_scheduler()}, "functools.partial(ExponentialLR, ...)"),
    ({"delay_state_averaging": True, "scheduler_fn": ready_scheduler()}, "a delay re-creates the optimizer"),
    # local updates
    ({"use_local_updates": True, "reuse_grad_buffers": True}, "leave it away, or set use_local_updates=False"),
    ({"outer": DiLoCo(), "reuse_grad_buffers": True}, "leave it away, or leave outer away"),
    ({"use_local_updates": True, "delay_grad_averaging": True}, "leave it away, or set use_local_updates=False"),
    ({"use_local_updates": True, "delay_optimizer_step": True}, "leave it away, or set use_local_updates=False"),
    ({"use_local_updates": True, "offload_optimizer": True}, "leave it away, or set use_local_updates=False"),
    (
        {"use_local_updates": True, "grad_compression": Float16Compression()},
        "leave it away, or set use_local_updates=False",
    ),
    (
        {"use_local_updates": True, "grad_averager_factory": LOW_RANK(averager_rank=4)},
        "leave it away, or set use_local_updates=False",
    ),
    ({"use_local_updates": True, "max_staleness": 2}, "nothing is ever late; leave it away, or set use_local"),
    # auxiliary peers
    ({"auxiliary": True, "client_mode": True, "initial_peers": PEER}, "set client_mode=False or auxiliary=False"),
    ({"auxiliary": True, "batch_size": 4}, "batch_size=4: an auxiliary peer (auxiliary=True) has no batches; leave it"),
    ({"auxiliary": True, "reuse_grad_buffers": True}, "leave it away on this peer"),
    ({"auxiliary": True, "delay_state_averaging": True}, "leave it away on this peer"),
    ({"auxiliary": True, "offload_optimizer": True}, "makes no optimizer step; leave it away on this peer"),
    ({"auxiliary": True, "scheduler_fn": ExponentialLR}, "makes no optimizer step; leave it away on this peer"),
    ({"auxiliary": True, "max_staleness": 2}, "max_staleness=2: an auxiliary peer (auxiliary=True) has no gradients"),
    ({"auxiliary": True, "average_state_every": 2}, "has no state to compare; leave it away on this peer"),
    (
        {"auxiliary": True, "engine": "hivemind", "load_state_compression": Float16Compression()},
        "has no state that others could take; leave it away on this peer",
    ),
    # time
    ({"averaging_timeout": 5.0}, "raise averaging_timeout, to 30 say, or lower matchmaking_time"),
    ({"allreduce_timeout": 31.0}, "lower it, or raise averaging_timeout"),
    # network
    ({"client_mode": True}, "give initial_peers (or set INITIAL_PEERS)"),
    ({"client_mode": True, "initial_peers": PEER, "announce_maddrs": ["/ip4/203.0.113.9/tcp/1"]}, "leave it away"),
    ({"client_mode": True, "initial_peers": PEER, "host_maddrs": ["/ip4/127.0.0.1/tcp/1"]}, "leave it away on this"),
    ({"client_mode": True, "initial_peers": PEER, "use_auto_relay": True}, "use_auto_relay=True: a client"),
    (
        {
            "client_mode": True,
            "initial_peers": PEER,
            "engine": "hivemind",
            "load_state_compression": Float16Compression(),
        },
        "nobody takes a state from it; leave it away on this peer",
    ),
    (
        {"averager_opts": {"allow_state_sharing": True}},
        "every peer that trains and can be reached shares its state",
    ),
    ({"use_ipfs": True, "initial_peers": PEER}, "leave initial_peers away, or set use_ipfs=False"),
    ({"use_auto_relay": True, "use_relay": False}, "set use_relay=True"),
    ({"trusted_relays": [PEER]}, "set use_auto_relay=True"),
    ({"initial_peers": 5}, "give a list of multiaddresses, or one text with commas between them"),
    ({"initial_peers": "203.0.113.5:31330"}, "initial_peers='203.0.113.5:31330': is not a multiaddress"),
    ({"host_maddrs": [PEER]}, "host_maddrs="),
    ({"announce_maddrs": ["/ip4/203.0.113.9/tcp/0"]}, "announce_maddrs="),
]


@pytest.mark.parametrize(
    ("arguments", "fix"), REFUSED, ids=[f"{'+'.join(one)}-{i}" for i, (one, _) in enumerate(REFUSED)]
)
def test_impossible_arguments_are_refused_with_the_fix(arguments: dict[str, Any], fix: str) -> None:
    with pytest.raises(LightningHivemindError) as caught:
        create(**arguments)
    assert isinstance(caught.value, ValueError)
    assert fix in str(caught.value)


ALLOWED: list[dict[str, Any]] = [
    {"delay_state_averaging": True, "offload_optimizer": False, "scheduler_fn": ready_scheduler()},
    {"scheduler_fn": ready_scheduler()},
    {"offload_optimizer": True, "scheduler_fn": functools.partial(ExponentialLR, gamma=0.9)},
    {"use_local_updates": True, "delay_state_averaging": True, "state_averaging_compression": Float16Compression()},
    {"auxiliary": True, "use_local_updates": True},
    {"client_mode": True, "use_ipfs": True},
    {"client_mode": True, "initial_peers": [PEER]},
    {"reuse_grad_buffers": True, "offload_optimizer": True, "delay_state_averaging": True},
    {"use_auto_relay": True, "trusted_relays": [PEER]},
    {"engine": "native", "averager_opts": {"min_group_size": 3}},
    {"engine": "hivemind", "averager_opts": {"target_group_size": 4}, "tracker_opts": {"max_refresh_period": 1.0}},
    {"max_staleness": 4},
    {"insecure_lan": True},
    {"grad_compression": TopKCompression()},
    {"matchmaking_time": 1, "averaging_timeout": 2, "allreduce_timeout": 1.5},
]


#: what the published pages show (the first row with all the delays)
PUBLISHED: list[dict[str, Any]] = [
    {
        "delay_state_averaging": True,
        "delay_grad_averaging": True,
        "delay_optimizer_step": True,
        "offload_optimizer": True,
        "scheduler_fn": functools.partial(ExponentialLR, gamma=0.999),
    },
    {"offload_optimizer": True, "scheduler_fn": functools.partial(ExponentialLR, gamma=0.999)},
    {"reuse_grad_buffers": True},
    {"grad_compression": Float16Compression(), "state_averaging_compression": Float16Compression()},
    {"grad_averager_factory": LOW_RANK(averager_rank=32, min_compression_ratio=0.5)},
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("arguments", PUBLISHED, ids=["+".join(one) for one in PUBLISHED])
def test_what_was_published_is_taken_by_every_engine(arguments: dict[str, Any], engine: str) -> None:
    create(engine=engine, **arguments)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_is_needed_where_hivemind_s_wire_format_is(
    engine: str, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else real(name, *rest)
    )
    codec: Any = hivemind.compression.BlockwiseQuantization()
    if nested:
        codec = SizeAdaptiveCompression(9, Float16Compression(), codec)
    if engine == "native":
        create(engine=engine, grad_compression=codec)
        return
    with pytest.raises(ArgumentError, match="pip install bitsandbytes on every peer; or use engine="):
        create(engine=engine, grad_compression=codec)


@pytest.mark.parametrize("arguments", ALLOWED, ids=["+".join(one) for one in ALLOWED])
def test_neighbours_of_the_refused_are_allowed(arguments: dict[str, Any]) -> None:
    create(**arguments)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, []),
        ({"delay_state_averaging": True}, ["delay_state_averaging"]),
        ({"delay_state_averaging": True, "delay_optimizer_step": True}, []),
        ({"state_averaging_compression": Float16Compression()}, ["state_averaging_compression"]),
        ({"average_opt_statistics": ["exp_avg"]}, ["average_opt_statistics"]),
        ({"average_opt_statistics": ["exp_avg"], "use_local_updates": True}, []),
        ({"average_opt_statistics": ["exp_avg"], "engine": "hivemind"}, []),
    ],
)
def test_what_the_native_engine_has_no_use_for_is_named(arguments: dict[str, Any], names: list[str]) -> None:
    assert argument_rules.needless(Arguments(target_batch_size=8, **{"engine": "native", **arguments})) == names


def test_outer_sets_use_local_updates() -> None:
    """And what local updates exclude, it does."""
    assert create(outer=DiLoCo()).use_local_updates
    assert not create(outer=None).use_local_updates
    with pytest.raises(ArgumentError, match="offload_optimizer=True"):
        create(outer=DiLoCo(), offload_optimizer=True)
    with pytest.raises(ArgumentError, match=r"outer=0\.7: a float is no DiLoCo; give DiLoCo"):
        create(outer=0.7)
    with pytest.raises(ArgumentError, match="average_state_every=50"):
        create(outer=DiLoCo(), average_state_every=50)
    assert repr(DiLoCo(lr=1)) == repr(DiLoCo(lr=1.0))
    assert create(outer=StreamingDiLoCo()).delay_state_averaging
    assert not create(outer=StreamingDiLoCo(), auxiliary=True).delay_state_averaging
    with pytest.raises(ArgumentError, match=r"average_opt_statistics.*moments would go whole"):
        create(outer=StreamingDiLoCo(), average_opt_statistics=("exp_avg",))
    with pytest.raises(ArgumentError, match="one tensor; give one codec"):
        create(outer=StreamingDiLoCo(), state_averaging_compression=PerTensorCompression([Float16Compression()]))
    with pytest.raises(ArgumentError, match=r"outer=.*use engine=\"native\""):
        create(outer=DiLoCo(), engine="hivemind")


def test_a_ready_plateau_scheduler_is_refused_even_without_offload() -> None:
    plateau = ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    with pytest.raises(ArgumentError, match="no metric"):
        create(scheduler_fn=plateau)


def test_arguments_cannot_be_changed_afterwards() -> None:
    options = {"target_group_size": 4}
    tensors = [torch.zeros(1)]
    arguments = create(engine="hivemind", averager_opts=options, extra_tensors=tensors)
    options["target_group_size"] = 5
    tensors.clear()
    assert arguments.averager_opts["target_group_size"] == 4
    assert len(arguments.extra_tensors) == 1
    with pytest.raises(TypeError):
        arguments.averager_opts["target_group_size"] = 6  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        arguments.run_id = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_a_copy_is_equal_and_as_read_only(duplicate: Any) -> None:
    twin = duplicate(create(engine="hivemind", averager_opts={"target_group_size": 4}))
    assert twin == create(engine="hivemind", averager_opts={"target_group_size": 4})
    with pytest.raises(TypeError):
        twin.averager_opts["target_group_size"] = 6


def test_codecs_of_hivemind_become_ours_at_any_depth() -> None:
    stock = pytest.importorskip("hivemind.compression")
    given = stock.SizeAdaptiveCompression(
        threshold=9, less=stock.NoCompression(), greater_equal=stock.Float16Compression()
    )
    assert type(create(grad_compression=given).grad_compression.greater_equal) is Float16Compression


def test_a_changed_copy_is_checked_again() -> None:
    with pytest.raises(ArgumentError, match="is below 1"):
        dataclasses.replace(create(), target_batch_size=0)


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [
        (None, {}, ()),
        (None, {"INITIAL_PEERS": f"{PEER},{OTHER_PEER}"}, (PEER, OTHER_PEER)),
        (None, {"PL_INITIAL_PEERS": PEER}, (PEER,)),
        (None, {"INITIAL_PEERS": "", "PL_INITIAL_PEERS": PEER}, (PEER,)),
        (None, {"INITIAL_PEERS": PEER, "PL_INITIAL_PEERS": PEER}, (PEER,)),
        (OTHER_PEER, {"INITIAL_PEERS": PEER}, (OTHER_PEER,)),
        ([OTHER_PEER], {"PL_INITIAL_PEERS": PEER}, (OTHER_PEER,)),
        ([], {"INITIAL_PEERS": PEER}, ()),
        (f" {PEER} , {OTHER_PEER},", {}, (PEER, OTHER_PEER)),
    ],
)
def test_initial_peers_argument_before_environment(
    argument: Any, environ: dict[str, str], expected: tuple[str, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert create(initial_peers=argument, environ=environ).initial_peers == expected


def test_newer_variable_wins_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"both set and differ.*unset PL_INITIAL_PEERS"):
        arguments = create(environ={"INITIAL_PEERS": PEER, "PL_INITIAL_PEERS": OTHER_PEER})
    assert arguments.initial_peers == (PEER,)


@pytest.mark.parametrize("variable", ["INITIAL_PEERS", "PL_INITIAL_PEERS"])
def test_messages_name_the_variable_that_a_value_came_from(variable: str) -> None:
    with pytest.raises(ArgumentError, match=f"leave {variable} away"):
        create(use_ipfs=True, environ={variable: PEER})
    with pytest.raises(LightningHivemindError, match=f"^{variable}="):
        create(environ={variable: "nonsense"})


def test_the_real_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITIAL_PEERS", PEER)
    assert Arguments.create(64).initial_peers == (PEER,)


def test_events_path_has_the_process_id() -> None:
    assert create().events_path is None
    path = create(environ={"LIGHTNING_HIVEMIND_EVENTS": "events-{pid}.jsonl"}).events_path
    assert path == Path(f"events-{os.getpid()}.jsonl")


def test_network_settings_carry_every_network_argument(tmp_path: Path) -> None:
    arguments = create(
        run_id="r",
        initial_peers=PEER,
        host_maddrs=["/ip4/0.0.0.0/tcp/31330"],
        announce_maddrs=["/ip4/203.0.113.9/tcp/31330"],
        identity_path=tmp_path / "id",
        use_auto_relay=True,
        trusted_relays=[OTHER_PEER],
        wait_timeout=4,
        bootstrap_timeout=9,
        startup_timeout=60,
    )
    settings = arguments.network_settings()
    for one in dataclasses.fields(settings):
        assert getattr(settings, one.name) == getattr(arguments, one.name), one.name
    assert settings.identity_path == str(tmp_path / "id")


def test_network_arguments_reach_the_daemon() -> None:
    pytest.importorskip("hivemind")
    from lightning_hivemind.network.daemon import _dht_options

    for name, value in (("use_ipfs", True), ("use_relay", False), ("client_mode", True)):
        peers = None if name == "use_ipfs" else PEER
        settings = create(initial_peers=peers, **{name: value}).network_settings()
        assert getattr(settings, name) is value
        assert _dht_options(settings, settings.initial_peers)[name] is value


def test_keyword_lists_are_those_of_the_installed_hivemind() -> None:
    averaging = pytest.importorskip("hivemind.averaging")
    from hivemind.optim.grad_averager import GradientAverager
    from hivemind.optim.optimizer import Optimizer
    from hivemind.optim.progress_tracker import ProgressTracker
    from hivemind.optim.state_averager import TrainingStateAverager

    def keywords(*owners: type) -> set[str]:
        names = {name for owner in owners for name in inspect.signature(owner.__init__).parameters}
        return names - {"self", "args", "kwargs"}

    averagers = keywords(averaging.DecentralizedAverager, GradientAverager, TrainingStateAverager)
    assert averagers == argument_rules.AVERAGER_KEYWORDS | set(argument_rules.AVERAGER_OWNED)
    assert keywords(averaging.DecentralizedAverager) >= argument_rules.AVERAGER_KEYWORDS
    assert keywords(ProgressTracker) == argument_rules.TRACKER_KEYWORDS | set(argument_rules.TRACKER_OWNED)
    ours = {one.name for one in dataclasses.fields(Arguments)}
    assert keywords(Optimizer) - ours == set(argument_rules.OPTIMIZER_OWNED)
