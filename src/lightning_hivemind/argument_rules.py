"""What holds between arguments: what excludes what, what follows from what.

:func:`resolve` gets all arguments after their own checks and returns them with every ``None`` that has a meaning
replaced by it. The names of hivemind's keywords are written out here so that arguments can be checked where hivemind
cannot be imported; a test compares them with the installed hivemind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lightning_hivemind.argument_checks import refusal
from lightning_hivemind.network.addresses import check_announced, check_listened, check_peers, reach
from lightning_hivemind.outer import StreamingDiLoCo

_KNOWN = "leave it away: the strategy knows it"
#: keywords of hivemind's averagers that a user may set through ``averager_opts``
AVERAGER_KEYWORDS = frozenset(
    {
        "averaging_alpha",
        "bandwidth",
        "declare_state_period",
        "initial_group_bits",
        "min_group_size",
        "min_vector_size",
        "part_size_bytes",
        "reducer_timeout",
        "request_timeout",
        "sender_timeout",
        "target_group_size",
    }
)
#: keywords of hivemind's averagers that the strategy sets -> what to use instead
AVERAGER_OWNED: Mapping[str, str] = {
    "accumulate_grads_on": _KNOWN,
    "allow_state_sharing": "leave it away: every peer that trains and can be reached shares its state",
    "allreduce_timeout": "use the argument allreduce_timeout",
    "auxiliary": "use the argument auxiliary",
    "average_opt_statistics": "use the argument average_opt_statistics",
    "averaged_grads": _KNOWN,
    "averaged_tensors": _KNOWN,
    "client_mode": "use the argument client_mode",
    "compression": "use the arguments grad_compression and state_averaging_compression",
    "custom_gradients": _KNOWN,
    "daemon": _KNOWN,
    "delta_rule_averaging": "use the arguments use_local_updates and delay_state_averaging",
    "dht": _KNOWN,
    "extra_tensors": "use the argument extra_tensors",
    "initialize_optimizer": _KNOWN,
    "min_matchmaking_time": "use the argument matchmaking_time",
    "next_chunk_timeout": "use the argument next_chunk_timeout",
    "offload_optimizer": "use the argument offload_optimizer",
    "optimizer": _KNOWN,
    "parameter_names": _KNOWN,
    "parameters": _KNOWN,
    "params": _KNOWN,
    "performance_ema_alpha": "use the argument performance_ema_alpha",
    "prefix": "use the argument run_id",
    "reuse_grad_buffers": "use the argument reuse_grad_buffers",
    "reuse_tensors": _KNOWN,
    "scheduler": "use the argument scheduler_fn",
    "shutdown_timeout": "use the argument shutdown_timeout",
    "start": _KNOWN,
    "state_compression": "use the argument load_state_compression",
    "status_loglevel": "use the argument verbose",
    "sync_epoch_when_averaging": _KNOWN,
    "tensor_infos": _KNOWN,
    "warn": _KNOWN,
}
#: keywords of hivemind's progress tracker that a user may set through ``tracker_opts``
TRACKER_KEYWORDS = frozenset(
    {
        "default_refresh_period",
        "expected_drift_peers",
        "expected_drift_rate",
        "max_refresh_period",
        "metadata_expiration",
        "min_refresh_period",
        "private_key",
    }
)
#: keywords of hivemind's progress tracker that the strategy sets -> what to use instead
TRACKER_OWNED: Mapping[str, str] = {
    "client_mode": "use the argument client_mode",
    "daemon": _KNOWN,
    "dht": _KNOWN,
    "performance_ema_alpha": "use the argument performance_ema_alpha",
    "prefix": "use the argument run_id",
    "start": _KNOWN,
    "status_loglevel": "use the argument verbose",
    "target_batch_size": "use the argument target_batch_size",
}
#: arguments of hivemind.Optimizer that the strategy sets itself -> what to use instead
OPTIMIZER_OWNED: Mapping[str, str] = {
    "dht": "leave it away and read strategy.dht; initial_peers, host_maddrs and the like configure it",
    "optimizer": "return the optimizer from configure_optimizers",
    "params": "return the optimizer from configure_optimizers",
    "scheduler": "use the argument scheduler_fn, or return the scheduler from configure_optimizers",
    "batch_size_per_step": "use the argument batch_size",
}

Values = dict[str, Any]


def resolve(values: Mapping[str, Any], peers_from: str) -> Values:
    """All rules, in order. ``peers_from`` names where ``initial_peers`` came from (argument or environment)."""
    resolved = dict(values)
    for rule in _RULES:
        rule(resolved)
    _network(resolved, peers_from)
    _addresses(resolved, peers_from)
    return resolved


def _delays(values: Values) -> None:
    """delay_grad_averaging -> delay_optimizer_step -> delay_state_averaging and offload_optimizer."""
    if values["delay_grad_averaging"]:
        if values["delay_optimizer_step"] is False:
            wrong = "delay_grad_averaging=True needs the optimizer step in the background"
            raise refusal("delay_optimizer_step", False, wrong, "leave delay_optimizer_step away or set it to True")
        values["delay_optimizer_step"] = True
    step = values["delay_optimizer_step"] = bool(values["delay_optimizer_step"])
    if step and not values["delay_state_averaging"]:
        wrong = "delay_optimizer_step and delay_grad_averaging need the state averaging in the background, too"
        raise refusal("delay_state_averaging", False, wrong, "set delay_state_averaging=True")
    if step and values["offload_optimizer"] is False:
        wrong = "a delayed optimizer step works on a copy of the parameters in host memory"
        raise refusal("offload_optimizer", False, wrong, "leave offload_optimizer away or set it to True")


def _outer(values: Values) -> None:
    outer = values["outer"]
    values["use_local_updates"] |= outer is not None
    if not isinstance(outer, StreamingDiLoCo):
        return
    values["delay_state_averaging"] |= not values["auxiliary"]
    fix = "leave it away, or give outer=DiLoCo(...)"
    if values["average_opt_statistics"]:
        wrong = (
            "StreamingDiLoCo averages one fragment of the parameters at a time, and moments would go whole each time"
        )
        raise refusal("average_opt_statistics", values["average_opt_statistics"], wrong, fix)
    if type(codec := values["state_averaging_compression"]).__name__ == "PerTensorCompression":
        wrong = "in a round of StreamingDiLoCo all parameters of a fragment are one tensor"
        raise refusal("state_averaging_compression", codec, wrong, "give one codec for all")


def _local_updates(values: Values) -> None:
    """Every peer steps with its own gradients: nothing about averaged gradients can have a meaning."""
    if not values["use_local_updates"]:
        return
    fix = "leave it away, or " + ("set use_local_updates=False" if values["outer"] is None else "leave outer away")
    for name in ("reuse_grad_buffers", "delay_grad_averaging", "delay_optimizer_step", "offload_optimizer"):
        if values[name]:
            raise refusal(name, True, _LOCAL_UPDATES_EXCLUDE[name], fix)
    for name in ("grad_averager_factory", "grad_compression"):
        if values[name] is not None:
            raise refusal(name, values[name], "with use_local_updates=True gradients are not averaged", fix)
    if values["max_staleness"] != 1:
        raise refusal("max_staleness", values["max_staleness"], "with use_local_updates=True nothing is ever late", fix)


# The last two: hivemind 1.1.12 fills the gradients of an offloaded optimizer from its gradient averager only
# (custom_gradients=offload_optimizer), which local updates do not have: it would step without gradients.
_LOCAL_UPDATES_EXCLUDE = {
    "reuse_grad_buffers": "with use_local_updates=True gradients are not accumulated",
    "delay_grad_averaging": "with use_local_updates=True gradients are not averaged",
    "delay_optimizer_step": "with use_local_updates=True every batch steps at once, where the parameters are",
    "offload_optimizer": "with use_local_updates=True every batch steps at once, where the parameters are",
}


def _offload(values: Values) -> None:
    delayed = values["delay_state_averaging"] or values["delay_optimizer_step"]
    if values["offload_optimizer"] is None:
        values["offload_optimizer"] = delayed and not values["use_local_updates"]


def _scheduler(values: Values) -> None:
    given = values["scheduler_fn"]
    recreated = values["offload_optimizer"] or values["delay_optimizer_step"]
    if recreated and isinstance(given, LRScheduler):
        cause = "a delay" if values["delay_state_averaging"] else "offload_optimizer=True"
        wrong = f"{cause} re-creates the optimizer, and a ready scheduler belongs to another one"
        fix = f"give what makes it: functools.partial({type(given).__name__}, ...)"
        raise refusal("scheduler_fn", given, wrong, fix)


def _auxiliary(values: Values) -> None:
    """An auxiliary peer helps to average and trains nothing."""
    if not values["auxiliary"]:
        return
    fix = "leave it away on this peer"
    if values["client_mode"]:
        wrong = "an auxiliary peer (auxiliary=True) must be reachable, a client is not"
        raise refusal("client_mode", True, wrong, "set client_mode=False or auxiliary=False")
    if values["batch_size"] is not None:
        raise refusal("batch_size", values["batch_size"], "an auxiliary peer (auxiliary=True) has no batches", fix)
    if values["reuse_grad_buffers"]:
        raise refusal("reuse_grad_buffers", True, "an auxiliary peer (auxiliary=True) has no gradients", fix)
    for name in ("delay_grad_averaging", "delay_optimizer_step", "delay_state_averaging"):
        if values[name]:
            raise refusal(name, True, "an auxiliary peer (auxiliary=True) has no training to overlap", fix)
    for name in ("offload_optimizer", "scheduler_fn"):
        if values[name]:
            raise refusal(name, values[name], "an auxiliary peer (auxiliary=True) makes no optimizer step", fix)
    if (codec := values["load_state_compression"]) is not None:
        wrong = "an auxiliary peer (auxiliary=True) has no state that others could take"
        raise refusal("load_state_compression", codec, wrong, fix)
    if values["max_staleness"] != 1:
        wrong = "an auxiliary peer (auxiliary=True) has no gradients that could be late"
        raise refusal("max_staleness", values["max_staleness"], wrong, fix)
    if values["engine"] == "native" and values["average_state_every"] != 1:
        wrong = "an auxiliary peer (auxiliary=True) has no state to compare"
        raise refusal("average_state_every", values["average_state_every"], wrong, fix)


def _timeouts(values: Values) -> None:
    matchmaking, averaging = values["matchmaking_time"], values["averaging_timeout"]
    if averaging <= matchmaking:
        wrong = f"is not above matchmaking_time={matchmaking}: every round would end before its group is complete"
        fix = f"raise averaging_timeout, to {6 * matchmaking:g} say, or lower matchmaking_time"
        raise refusal("averaging_timeout", averaging, wrong, fix)
    if values["allreduce_timeout"] is None:
        values["allreduce_timeout"] = averaging
    elif values["allreduce_timeout"] > averaging:
        wrong = f"is above averaging_timeout={averaging}, which ends the round before"
        raise refusal("allreduce_timeout", values["allreduce_timeout"], wrong, "lower it, or raise averaging_timeout")
    if values["next_chunk_timeout"] is None:
        values["next_chunk_timeout"] = matchmaking


def _averagers(values: Values) -> None:
    """What hivemind's averagers accept, and then find no group with, or wait for one another for ever."""
    options = dict(values["averager_opts"] or {})
    for name in ("min_group_size", "target_group_size"):
        size = options.get(name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 2):
            raise refusal(
                "averager_opts", options, f"{name} is no whole number above 1", "a group has two peers or more"
            )
    least, most = options.get("min_group_size", 2), options.get("target_group_size")
    if most is not None and least > most:
        wrong = f"min_group_size={least} is above target_group_size={most}: no group is ever complete"
        raise refusal("averager_opts", options, wrong, "lower min_group_size")
    request = options.get("request_timeout")
    if request is not None and not 0 < request < values["matchmaking_time"]:
        wrong = f"request_timeout={request} is not below matchmaking_time={values['matchmaking_time']}"
        raise refusal("averager_opts", options, wrong, "lower it, or peers wait for each other's answer in a circle")


def _native(values: Values) -> None:
    """What one engine has and the other has not: refused, never ignored."""
    if values["engine"] != "native":
        for name, (default, wrong) in _ONLY_NATIVE.items():
            if values[name] != default:
                raise refusal(name, values[name], wrong, 'leave it away, or use engine="native"')
        for name in ("grad_compression", "state_averaging_compression", "load_state_compression"):
            if values[name] is not None:
                _sent_by_hivemind(name, values[name])
        return
    for name in ("grad_compression", "state_averaging_compression"):
        if values[name] is not None:
            _left_out_can_be_sent_later(name, values)
    local = _NOT_WITH_LOCAL_UPDATES if values["use_local_updates"] else {}
    if values["grad_averager_factory"] is not None:
        from lightning_hivemind.codecs.powersgd import read_factory  # imports hivemind

        read_factory(values["grad_averager_factory"])
    for name, (default, wrong) in {**_NOT_NATIVE, **local}.items():
        value = values[name]
        if isinstance(value, Mapping):
            value = {key: one for key, one in value.items() if (name, key) not in _NATIVE_OPTIONS}
        if value and value != default:
            raise refusal(name, value, wrong, 'leave it away, or use engine="hivemind"')


def needless(arguments: Any) -> list[str]:
    """Names of arguments (:class:`.Arguments`, resolved) that were given and average nothing with this engine."""
    if arguments.engine != "native" or arguments.use_local_updates:
        return []
    names = [name for name in _NEEDLESS if getattr(arguments, name)]
    if arguments.delay_optimizer_step and "delay_state_averaging" in names:
        names.remove("delay_state_averaging")  # which asks for it
    return names


def _sent_by_hivemind(name: str, codec: Any) -> None:
    from lightning_hivemind.codecs import BlockwiseQuantization  # imports hivemind
    from lightning_hivemind.codecs.native import NativeCompression, parts_of

    fix = 'use engine="native", or Float16Compression() or Uniform8BitQuantization()'
    for part in parts_of(codec):
        if isinstance(part, NativeCompression):
            raise refusal(name, codec, f"hivemind has no wire format for {type(part).__name__}", fix)
        if isinstance(part, BlockwiseQuantization) and importlib.util.find_spec("bitsandbytes") is None:
            wrong = "BlockwiseQuantization needs the package bitsandbytes, which is not installed"
            raise refusal(name, codec, wrong, f"pip install bitsandbytes on every peer; or {fix}")


def _left_out_can_be_sent_later(name: str, values: Values) -> None:
    from lightning_hivemind.codecs.native import TopKCompression, parts_of  # imports hivemind

    if not any(isinstance(part, TopKCompression) for part in parts_of(values[name])):
        return
    wrong = "what TopKCompression leaves out is sent later, with gradients as they are"
    fix = "use another codec, such as Blockwise4BitQuantization()"
    if name != "grad_compression":
        raise refusal(name, values[name], wrong, fix)
    for other in ("grad_averager_factory", "auxiliary"):
        if values[other]:
            raise refusal(
                name, values[name], f"{wrong}, which {other}={values[other]!r} does not have", f"{fix}, on all peers"
            )


#: arguments that only engine="native" has: the values that change nothing, and why.
_ONLY_NATIVE: Mapping[str, tuple[Any, str]] = {
    "max_staleness": (1, 'only engine="native" keeps late gradients'),
    "insecure_lan": (False, "hivemind encrypts everything"),
    "outer": (None, "hivemind's averagers average parameters and nothing else"),
    "local_strategy": ("auto", "hivemind's averagers know peers of one process only"),
    "nccl": (None, "hivemind's averagers know peers of one process only"),
    "portable_checkpoints": (True, "only models in parts have another format, and hivemind's averagers know none"),
}
#: arguments that engine="native" refuses: the values that change nothing, and why others cannot be had.
#: ``average_state_every`` says how often peers make sure that they are equal (engine/native/agreement.py).
_NOT_NATIVE: Mapping[str, tuple[Any, str]] = {
    "averager_opts": ({}, "but for min_group_size these are options of hivemind's averagers"),
    "load_state_compression": (
        None,
        'with engine="native" a joiner takes the state bit for bit, as all others have it',
    ),
    "performance_ema_alpha": (0.1, "it is an option of hivemind's progress tracker"),
    "tracker_opts": ({}, "these are options of hivemind's progress tracker"),
}

#: and what it has of them nevertheless
_NATIVE_OPTIONS = {("averager_opts", "min_group_size")}

#: arguments that engine="native" accepts and has no use for, without local updates: nobody averages a state there
_NEEDLESS = ("state_averaging_compression", "average_opt_statistics", "delay_state_averaging")
_NOT_WITH_LOCAL_UPDATES: Mapping[str, tuple[Any, str]] = {
    "average_state_every": (1, "with use_local_updates=True this is what target_batch_size says"),
}


def _addresses(values: Values, peers_from: str) -> None:
    """Each address can work where it stands; raises AddressError otherwise."""
    check_peers(peers_from, values["initial_peers"])
    check_peers("trusted_relays", values["trusted_relays"])
    check_listened("host_maddrs", values["host_maddrs"] or ())
    check_announced("announce_maddrs", values["announce_maddrs"])
    given = (*values["initial_peers"], *values["announce_maddrs"], *(values["host_maddrs"] or ()))
    for address in given if values["insecure_lan"] else ():
        if address.startswith("/ip") and reach(address) == "public":
            wrong = f"{address} is a public address, and everybody on the way could read and change what is sent"
            raise refusal("insecure_lan", True, wrong, "leave it away, or give private addresses only")


def _network(values: Values, peers_from: str) -> None:
    values["client_mode"] = bool(values["client_mode"])
    peers = values["initial_peers"]
    if values["use_ipfs"] and peers:
        wrong = "use_ipfs=True finds the other peers through IPFS instead"
        raise refusal(peers_from, list(peers), wrong, f"leave {peers_from} away, or set use_ipfs=False")
    if values["client_mode"]:
        if not peers and not values["use_ipfs"]:
            wrong = "a client can only join, and there are no initial peers"
            raise refusal("client_mode", True, wrong, "give initial_peers (or set INITIAL_PEERS)")
        accepts_none, fix = "a client (client_mode=True) accepts no connections", "leave it away on this peer"
        for name in ("host_maddrs", "announce_maddrs", "use_auto_relay"):
            if given := values[name]:
                wrong = f"{accepts_none}, so it has no address to listen at or announce"
                raise refusal(name, given if given is True else list(given), wrong, fix)
        if (codec := values["load_state_compression"]) is not None:
            raise refusal("load_state_compression", codec, f"{accepts_none}, so nobody takes a state from it", fix)
    if values["use_auto_relay"] and not values["use_relay"]:
        raise refusal("use_auto_relay", True, "needs relays, and use_relay=False forbids them", "set use_relay=True")
    if values["trusted_relays"] and not values["use_auto_relay"]:
        wrong = "relays are only looked for with use_auto_relay=True"
        raise refusal("trusted_relays", list(values["trusted_relays"]), wrong, "set use_auto_relay=True")


# In this order: offload is resolved before the scheduler, whose rule depends on it.
_RULES: tuple[Callable[[Values], None], ...] = (
    _outer,
    _native,
    _local_updates,
    _delays,
    _offload,
    _scheduler,
    _auxiliary,
    _timeouts,
    _averagers,
)
