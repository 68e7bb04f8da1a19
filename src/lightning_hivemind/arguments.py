# ruff: noqa: RUF009 - _argument() is dataclasses.field()
"""Every argument of the strategy once: default, meaning, and when to turn it.

This is the only file that reads the environment; an argument goes before the environment, which goes before the
default. :meth:`Arguments.create` is the way in. Checks of one value are in ``argument_checks``, the rules between
values in ``argument_rules``; both run whenever an :class:`Arguments` is made, so there is no unchecked one.

Environment:
    INITIAL_PEERS: comma-separated multiaddresses of peers to join through (``PL_INITIAL_PEERS``: its older name).
    LIGHTNING_HIVEMIND_EVENTS: file to which every event is appended as one line of JSON; ``{pid}`` in it becomes the
        process id.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lightning_hivemind import argument_checks as check
from lightning_hivemind import argument_rules as rules
from lightning_hivemind.network.settings import NetworkSettings
from lightning_hivemind.outer import DiLoCo

ENGINES = ("native", "hivemind")
PEERS_VARIABLE = "INITIAL_PEERS"
OLDER_PEERS_VARIABLE = "PL_INITIAL_PEERS"
EVENTS_VARIABLE = "LIGHTNING_HIVEMIND_EVENTS"


def _argument(default: Any, checked_by: check.Check) -> Any:
    return field(default=default, metadata={"check": checked_by})


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """All settings of one peer, checked and resolved: no ``None`` is left where it only meant "decide for me"."""

    # -- what is trained together -------------------------------------------------------------------------------------
    target_batch_size: int = field(metadata={"check": check.whole_number})
    """Samples that the whole swarm accumulates before one global step; equal on all peers. Raise it if most of the time
    goes into averaging, lower it if the loss falls too slowly per sample."""

    run_id: str = _argument("lightning_run", check.run_name)
    """Name of the run and prefix of all its keys in the DHT. Peers with the same name must train the same model."""

    batch_size: int | None = _argument(None, check.optional(check.whole_number))
    """Samples per batch and process. Give it only if the batch is of a type whose size cannot be seen: one that visibly
    holds fewer counts what it holds, a larger one only this number."""

    local_strategy: Any = _argument("auto", check.local_strategy)
    """How this peer trains on its own devices: what ``Trainer(strategy=...)`` would take, a name or a strategy object
    with its options. ``"auto"``: DDP if the Trainer has several devices. Peers of one run may have unlike ones."""

    nccl: Mapping[str, int | str] | None = _argument(None, check.optional(check.nccl))
    """Variables of NCCL for a peer of several machines, by name, as ``{"NSOCKS_PERTHREAD": 4, "SOCKET_NTHREADS": 2}``:
    set (with ``NCCL_`` before them) in each rank before it connects to the others, unless they are set already. Set it
    where the network between the machines of one peer is quicker than one of NCCL's connections."""

    portable_checkpoints: bool = _argument(True, check.flag)
    """Of a model in parts (FSDP, FSDP2, DeepSpeed): write one file with whole tensors, as a plain Trainer does, which
    any kind of peer resumes; rank 0 has it in host memory. Set it to False for the directory that Lightning's own
    strategy writes, where that does not fit."""

    engine: str = _argument("native", check.one_of(*ENGINES))
    """What averages; equal on all peers. ``"native"``: rounds of this package's own, after which all peers have the
    same parameters. Set ``"hivemind"``, its averagers, if scripts that use ``hivemind.Optimizer`` take part."""

    # -- what runs in the background ----------------------------------------------------------------------------------
    delay_state_averaging: bool = _argument(False, check.flag)
    """Needed by the two delays below. By itself it averages parameters while training goes on, with
    ``use_local_updates`` or ``engine="hivemind"``; unset it there if the peers' parameters drift apart. Without
    ``use_local_updates`` it offloads."""

    delay_optimizer_step: bool = _argument(None, check.optional(check.flag))
    """Step in the background; the result is applied at a later batch. Needs ``delay_state_averaging``; offloads. Set it
    if the optimizer's own step takes long. ``None``: as ``delay_grad_averaging``."""

    delay_grad_averaging: bool = _argument(False, check.flag)
    """Average gradients in the background, too: no waiting at all, one global step of staleness. Needs
    ``delay_state_averaging``; sets ``delay_optimizer_step``. Unset it if the loss falls clearly slower per step."""

    offload_optimizer: bool = _argument(None, check.optional(check.flag))
    """Keep the optimizer's state, and step, in host memory. Set it if the accelerator runs out of memory. ``None``:
    only with a delay."""

    reuse_grad_buffers: bool = _argument(False, check.flag)
    """Accumulate in ``param.grad`` itself, without a second buffer; ``zero_grad`` of the module does nothing while
    training. Set it if memory is short and nothing else in your code clears gradients."""

    scheduler_fn: LRScheduler | Callable[..., Any] | None = _argument(None, check.optional(check.scheduler))
    """``callable(optimizer) -> LRScheduler``, or a ready scheduler where the optimizer is not re-created (see
    :attr:`recreates_optimizer`). It advances once per global step."""

    outer: DiLoCo | None = _argument(None, check.optional(check.instance_of(DiLoCo)))
    """``DiLoCo(...)``: peers make steps of their own, with their own optimizer, and each round makes an outer step by
    how far these led on average. Sets ``use_local_updates``. For lines that do not carry a gradient per step.
    ``StreamingDiLoCo(...)``: a fragment of the parameters at a time, while training goes on."""

    use_local_updates: bool = _argument(False, check.flag)
    """Step at every batch with this peer's own gradients and average parameters only. Set it if the network is too slow
    for averaging gradients; unset it if the peers' losses drift apart."""

    auxiliary: bool = _argument(False, check.flag)
    """This peer only helps the others to average (it has a good network and no accelerator) and trains nothing."""

    # -- rounds -------------------------------------------------------------------------------------------------------
    matchmaking_time: float = _argument(5.0, check.positive)
    """Seconds that a round waits for peers that are called; it begins as soon as all are there. Batches are waited for
    0.8 times as long, so keep it well above the length of one. Raise it if more than a quarter of the rounds miss peers
    that are alive; lower it, down to 1 in a fast network, if steps wait for who does not come."""

    averaging_timeout: float = _argument(30.0, check.positive)
    """Default of ``allreduce_timeout``; with ``matchmaking_time`` the seconds that training waits for rounds at most,
    also if they fail one after another. (``engine="hivemind"``: seconds of a round.) Raise it if more than a quarter of
    the rounds time out though no peer left; lower it if one slow peer holds up the others for too long."""

    allreduce_timeout: float = _argument(None, check.optional(check.positive))
    """Seconds of a round: if any peer has the whole average then, who has not is left out; else it comes to nothing.
    (With ``engine="hivemind"`` of one attempt at exchanging data.) Lower it to leave time for a second attempt.
    ``None``: ``averaging_timeout``."""

    next_chunk_timeout: float = _argument(None, check.optional(check.positive))
    """Seconds that a peer may be silent within a round, or while it gives its state, before it is left out. Raise it if
    the reason of incomplete rounds is "silent for". ``None``: ``matchmaking_time``."""

    load_state_timeout: float = _argument(600.0, check.positive)
    """Seconds for downloading the swarm's state, then ``StateError``. Raise it for a large model on a slow line."""

    max_staleness: int = _argument(1, check.whole_number)
    """Gradients that were computed with parameters of more global steps ago are dropped (``delay_optimizer_step`` and
    ``delay_grad_averaging`` add one each). Not with ``engine="hivemind"`` or ``use_local_updates``. Raise it if a
    slow peer's samples are reported as lost."""

    average_state_every: int = _argument(1, check.whole_number)
    """Compare parameters at every n-th global step (1: every 64th); who differs from most takes a state. Raise it above
    64, on all peers, if that happens each time because unlike hardware or torch rounds otherwise. With
    ``engine="hivemind"``: average the state; raise it to save traffic, lower it if parameters drift apart."""

    averager_opts: Mapping[str, Any] = _argument(None, check.options(rules.AVERAGER_KEYWORDS, rules.AVERAGER_OWNED))
    """``{"min_group_size": 3}``, and nothing else: no round has fewer than three members, helpers and joiners
    included. With ``engine="hivemind"``: more keywords for both averagers, such as ``{"target_group_size": 4}``."""

    tracker_opts: Mapping[str, Any] = _argument(None, check.options(rules.TRACKER_KEYWORDS, rules.TRACKER_OWNED))
    """Only with ``engine="hivemind"``: more keywords for what reports progress; lower ``max_refresh_period`` if peers
    notice the target late."""

    performance_ema_alpha: float = _argument(0.1, check.fraction)
    """Only with ``engine="hivemind"``: weight of the newest sample in the moving averages of speed. Raise it if the
    speed of peers changes quickly."""

    shutdown_timeout: float = _argument(5.0, check.positive)
    """Seconds that leaving the rounds may take; the daemon and the DHT process have four more, and are killed then."""

    verbose: bool = _argument(False, check.flag)
    """Log internal events, too."""

    # -- what is sent, and how --------------------------------------------------------------------------------------
    grad_compression: Any = _argument(None, check.optional(check.codec))
    """Codec of gradients, from ``lightning_hivemind.codecs``; equal on all peers. ``None`` sends them as they are. Give
    a coarser one if rounds are limited by bandwidth."""

    state_averaging_compression: Any = _argument(None, check.optional(check.codec))
    """Codec of parameters when they are averaged: with ``use_local_updates``, or with ``engine="hivemind"``. Equal on
    all peers. Losses here stay in the parameters."""

    load_state_compression: Any = _argument(None, check.optional(check.codec))
    """Only with ``engine="hivemind"``: codec of the state that a late joiner downloads from this peer."""

    grad_averager_factory: Callable[..., Any] | None = _argument(None, check.optional(check.factory))
    """PowerSGD, as ``partial(PowerSGDGradientAverager, averager_rank=32)``; equal on all peers. With
    ``engine="hivemind"`` whatever makes an averager of gradients."""

    average_opt_statistics: tuple[str, ...] = _argument((), check.texts)
    """Names of entries of the optimizer's state that are averaged, too, such as ``("exp_avg_sq",)``; for
    ``use_local_updates`` or ``engine="hivemind"``, since otherwise all peers have the same."""

    extra_tensors: tuple[torch.Tensor, ...] = _argument((), check.tensors)
    """More tensors to average, and to hand to late joiners. The module's buffers (BatchNorm's statistics, say) need not
    be given; with ``engine="hivemind"`` they are averaged only if they are."""

    # -- network ------------------------------------------------------------------------------------------------------
    initial_peers: tuple[str, ...] = _argument((), check.addresses)
    """Multiaddresses of peers to join through: a list, or one text with commas. Not given: from the environment. Empty:
    this peer starts a new swarm."""

    host_maddrs: tuple[str, ...] | None = _argument(None, check.optional(check.addresses))
    """Multiaddresses to listen on. Give it to fix the port, for a firewall say; ``None`` lets the network choose. With
    ``engine="native"`` the next port is listened on, too (31331 beside ``/tcp/31330``)."""

    announce_maddrs: tuple[str, ...] = _argument((), check.addresses)
    """Multiaddresses under which others reach this peer, if they differ from where it listens (NAT, containers). With
    ``engine="native"`` forward the port after that of ``host_maddrs``, too, to the same number."""

    identity_path: str | None = _argument(None, check.optional(check.file_path))
    """File with this peer's key, made if it is not there: the peer id, and so its address, survive a restart."""

    client_mode: bool = _argument(None, check.optional(check.flag))
    """Accept no incoming connections. Set it behind a firewall that cannot be opened. ``None``: no."""

    insecure_lan: bool = _argument(False, check.flag)
    """Gradients and states are sent in the clear, between private addresses only; equal on all peers. Not with
    ``engine="hivemind"``. Set it where nobody else can read or write the network, if rounds wait for processors that
    encrypt."""

    use_relay: bool = _argument(True, check.flag)
    """Reach peers behind NAT through relays. (Gradients go through them with ``engine="hivemind"`` only.)"""

    use_auto_relay: bool = _argument(False, check.flag)
    """Look for a relay to be reached through. Set it if this peer is behind NAT and others cannot reach it."""

    trusted_relays: tuple[str, ...] = _argument((), check.addresses)
    """Use these relays only. Needs ``use_auto_relay``."""

    use_ipfs: bool = _argument(False, check.flag)
    """Find the first peers through the public IPFS network instead of ``initial_peers``."""

    wait_timeout: float = _argument(3.0, check.positive)
    """Seconds that one DHT request may take. Raise it if peers in a slow network do not see one another."""

    bootstrap_timeout: float | None = _argument(None, check.optional(check.positive))
    """Seconds that the other initial peers are waited for once one has answered. ``None``: as ``wait_timeout``."""

    startup_timeout: float = _argument(120.0, check.positive)
    """Seconds that the libp2p daemon has to start. Raise it on a very slow or crowded machine."""

    # -- how it came about --------------------------------------------------------------------------------------------
    events_file: str | None = None
    """Where the environment wants events to be written; see :attr:`events_path`."""

    peers_from: str = "initial_peers"
    """Where ``initial_peers`` came from: the argument, or the name of the variable."""

    def __post_init__(self) -> None:
        values = {
            one.name: one.metadata["check"](one.name, getattr(self, one.name))
            for one in fields(self)
            if "check" in one.metadata
        }
        for name, value in rules.resolve(values, self.peers_from).items():
            object.__setattr__(self, name, value)

    @classmethod
    def create(cls, target_batch_size: int, *, environ: Mapping[str, str] | None = None, **arguments: Any) -> Arguments:
        """Check everything that a user gave and fill in the rest.

        Args:
            target_batch_size: see the field.
            environ: read instead of ``os.environ``.
            arguments: the other fields by name.

        Raises:
            ArgumentError: an unknown name, an impossible value, or two that exclude one another.
            AddressError: an address that is no multiaddress, or that cannot work where it stands.
        """
        environ = os.environ if environ is None else environ
        defaults = {one.name: one.default for one in fields(cls) if "check" in one.metadata}
        _refuse_unknown(arguments, defaults)
        peers_from = "initial_peers"
        if arguments.get("initial_peers") is None:
            arguments["initial_peers"], peers_from = _peers_from_environment(environ)
        return cls(
            target_batch_size=target_batch_size,
            events_file=environ.get(EVENTS_VARIABLE) or None,
            peers_from=peers_from,
            **arguments,
        )

    @property
    def recreates_optimizer(self) -> bool:
        """Whether the engine makes an optimizer of its own, so that a scheduler must come from ``scheduler_fn``."""
        return self.offload_optimizer or self.delay_optimizer_step

    @property
    def events_path(self) -> Path | None:
        """File for events as JSON lines, for the process that asks; ``None`` if the environment names none."""
        return None if self.events_file is None else Path(self.events_file.replace("{pid}", str(os.getpid())))

    def network_settings(self) -> NetworkSettings:
        """The part of these arguments that the network needs."""
        return NetworkSettings(
            run_id=self.run_id,
            initial_peers=self.initial_peers,
            host_maddrs=self.host_maddrs,
            announce_maddrs=self.announce_maddrs,
            identity_path=self.identity_path,
            client_mode=self.client_mode,
            use_relay=self.use_relay,
            use_auto_relay=self.use_auto_relay,
            use_ipfs=self.use_ipfs,
            trusted_relays=self.trusted_relays,
            wait_timeout=self.wait_timeout,
            bootstrap_timeout=self.bootstrap_timeout,
            startup_timeout=self.startup_timeout,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry plain dicts: a read-only view cannot be pickled."""
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, MappingProxyType(value) if isinstance(value, dict) else value)


def _refuse_unknown(names: Mapping[str, Any], legal: Mapping[str, Any]) -> None:
    for name, value in names.items():
        if name in rules.OPTIMIZER_OWNED:
            raise check.refusal(name, value, "is set by the strategy", rules.OPTIMIZER_OWNED[name])
        if name not in legal:
            fix = f"{check.closest(name, legal)}legal are {', '.join(sorted(legal))}"
            raise check.refusal(name, value, "is not an argument", fix)


def _peers_from_environment(environ: Mapping[str, str]) -> tuple[str, str]:
    """The text, and the name of what it came from."""
    newer, older = environ.get(PEERS_VARIABLE, ""), environ.get(OLDER_PEERS_VARIABLE, "")
    if newer and older and newer != older:
        warnings.warn(
            f"{PEERS_VARIABLE} and {OLDER_PEERS_VARIABLE} are both set and differ: using {PEERS_VARIABLE}={newer}; "
            f"unset {OLDER_PEERS_VARIABLE}",
            stacklevel=4,
        )
    if newer:
        return newer, PEERS_VARIABLE
    return (older, OLDER_PEERS_VARIABLE) if older else ("", "initial_peers")
