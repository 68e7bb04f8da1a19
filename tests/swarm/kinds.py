"""Peers whose ranks have the model in parts, of each kind; and what tests of them ask."""

from __future__ import annotations

import signal
from typing import Any

from swarm.harness import Peer


def mesh(data: int, tensor: int) -> str:
    return f"pl.strategies.ModelParallelStrategy(data_parallel_size={data}, tensor_parallel_size={tensor})"


def kind(local_strategy: str, plain: str = "", ranks: int = 2, parts: str = "", data: int = 2) -> dict[str, Any]:
    """``plain``: what Lightning's own Trainer gets; ``data``: ranks with batches of their own."""
    return {"code": local_strategy, "plain": plain or local_strategy, "ranks": ranks, "parts": parts, "data": data}


def zero(stage: int, **offload: Any) -> tuple[str, str]:
    """With torch's AdamW, for which DeepSpeed compiles nothing; as a peer and by itself."""
    settings = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    config = {**settings, "zero_optimization": {"stage": stage, **offload}}
    return f"pl.strategies.DeepSpeedStrategy(config={config})", f"ZeroOnCpus(config={config})"


WRAP = "auto_wrap_policy={torch.nn.Linear}"
KINDS = {
    "fsdp2": kind(mesh(2, 1), parts="fsdp2"),
    "tensor": kind(mesh(1, 2), parts="tensor", data=1),
    "fsdp2 tensor": kind(mesh(2, 2), parts="fsdp2 tensor", ranks=4),
    "fsdp": kind("'fsdp'", "FsdpOnCpus()"),
    "fsdp wrapped": kind(f"pl.strategies.FSDPStrategy({WRAP})", f"FsdpOnCpus({WRAP})"),
    "fsdp grad op": kind(
        f"pl.strategies.FSDPStrategy({WRAP}, sharding_strategy='SHARD_GRAD_OP')",
        f"FsdpOnCpus({WRAP}, sharding_strategy='SHARD_GRAD_OP')",
    ),
    "fsdp sharded": kind(
        f"pl.strategies.FSDPStrategy({WRAP}, state_dict_type='sharded')",
        f"FsdpOnCpus({WRAP}, state_dict_type='sharded')",
    ),
    "zero 1": kind("'deepspeed_stage_1'", "ZeroOnCpus(stage=1)"),
    "zero 2": kind("'deepspeed_stage_2'", "ZeroOnCpus(stage=2)"),
    "zero 3": kind("'deepspeed_stage_3'", "ZeroOnCpus(stage=3)"),
    "zero 2 offload": kind(*zero(2, offload_optimizer={"device": "cpu"})),
    "zero 3 offload": kind(*zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})),
}
#: options of theirs, alone only
MORE = {
    "fsdp wrapped by hand": kind("'fsdp'", "FsdpOnCpus()", parts="wrap"),
    "fsdp with checkpoints of activations": kind(
        f"pl.strategies.FSDPStrategy({WRAP}, activation_checkpointing_policy={{torch.nn.Linear}})",
        f"FsdpOnCpus({WRAP}, activation_checkpointing_policy={{torch.nn.Linear}})",
    ),
    "fsdp that shards nothing": kind(
        "pl.strategies.FSDPStrategy(sharding_strategy='NO_SHARD')", "FsdpOnCpus(sharding_strategy='NO_SHARD')"
    ),
    "zero 2 with buckets": kind(
        "pl.strategies.DeepSpeedStrategy(stage=2, allgather_bucket_size=100, reduce_bucket_size=100)",
        "ZeroOnCpus(stage=2, allgather_bucket_size=100, reduce_bucket_size=100)",
    ),
    "zero 3 with checkpoints of activations": kind(
        "pl.strategies.DeepSpeedStrategy(stage=3, partition_activations=True, cpu_checkpointing=True)",
        "ZeroOnCpus(stage=3, partition_activations=True, cpu_checkpointing=True)",
    ),
    "zero 3 that recomputes": kind(
        "pl.strategies.DeepSpeedStrategy(stage=3, partition_activations=True, cpu_checkpointing=True)",
        "ZeroOnCpus(stage=3, partition_activations=True, cpu_checkpointing=True)",
        parts="recompute",
    ),
    "deepspeed by a file": kind("'deepspeed'", "ZeroOnCpus()"),
}


def peer_of(name: str, **fields: Any) -> dict[str, Any]:
    """What makes a peer of that kind, for ``Swarm.start``."""
    one = {**KINDS, **MORE}[name]
    model = {**({"parts": one["parts"]} if one["parts"] else {}), **fields.pop("model", {})}
    code = {"local_strategy": one["code"], **fields.pop("strategy_code", {})}
    return {"ranks": one["ranks"], "model": model, "strategy_code": code, **fields}


def end_after(peers: list[Peer], commits: int) -> None:
    """The last one's, of steps in which all are."""
    last, count = peers[-1], len(peers)
    last.wait_until(
        lambda: len(last.said("EpochCommitted", contributors=count)) >= commits, timeout_s=90, what="steps of all"
    )
    for peer in peers:
        peer.signal(signal.SIGINT, group=True)
    for peer in peers:
        peer.wait_exit(code=None)


def recorded(peers: list[Peer]) -> list[int]:
    """Steps after which both recorded their parameters, between two batches."""
    both = [step for step in peers[0].commits if step in peers[1].commits]
    return [step for step in both if all(peer.commits[step].digest for peer in peers)]


def same_digests(peers: list[Peer]) -> list[int]:
    """Those, after all of which they are equal to the last bit."""
    told = recorded(peers)
    for step in told:
        assert peers[0].commits[step].digest == peers[1].commits[step].digest, step
    return told
