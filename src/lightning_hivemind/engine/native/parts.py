"""What a peer of the native engine is made of, brought up and taken down in the right order."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_hivemind.argument_rules import needless
from lightning_hivemind.arguments import Arguments
from lightning_hivemind.codecs.powersgd import read_factory
from lightning_hivemind.engine.native.codecs.base import ChunkCodec, Exact
from lightning_hivemind.engine.native.codecs.mapping import Coding
from lightning_hivemind.engine.native.codecs.mixed import per_chunk
from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.gradients import Gradients
from lightning_hivemind.engine.native.handover import Handover
from lightning_hivemind.engine.native.introductions import Introductions
from lightning_hivemind.engine.native.layout import Layout, layout_of
from lightning_hivemind.engine.native.low_rank import LowRank
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.pace import Pace
from lightning_hivemind.engine.native.protocol.peer import Peer
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.state.donor import Donor
from lightning_hivemind.engine.native.state.download import Downloads
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.state.snapshot import Snapshot
from lightning_hivemind.engine.native.stepper import Stepper
from lightning_hivemind.engine.native.telling import Telling
from lightning_hivemind.engine.native.wire.frames import Kind
from lightning_hivemind.engine.native.wire.links import Links
from lightning_hivemind.engine.native.wire.tls import Certificate
from lightning_hivemind.errors import AddressError
from lightning_hivemind.network.addresses import parse_address
from lightning_hivemind.network.daemon import PeerNetwork

log = logging.getLogger("lightning_hivemind")

INTRODUCTION_S = 5.0
#: of the time for which a round waits for peers that it calls: for those that finish a batch first
WAITED = 0.8
#: memory that is used again: what a peer gives, what comes of it, and what others give for its chunks, or (with codecs)
#: what all give, encoded; and what was left out of both, and is given with what comes next
KEPT_VECTORS, KEPT_LEFT_OUT = 3.5, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """See the module."""

    handover: Handover
    driver: Driver
    telling: Telling
    donor: Donor
    downloads: Downloads
    introductions: Introductions
    connected: Callable[[], frozenset[str]]

    def stop(self, deadline: float) -> None:
        """Leave at once, also if Ctrl+C comes meanwhile: connections close, and the others notice."""
        with contextlib.ExitStack() as last:
            last.callback(lambda: self.driver.stop(max(0.1, deadline - time.monotonic())))
            self.donor.stop()
            self.introductions.close()


def way_of(arguments: Arguments, low_rank: LowRank | None, coding: Coding) -> str:
    """How this peer averages, as others must, too."""
    local = arguments.use_local_updates
    what = ", ".join(["parameters", *arguments.average_opt_statistics]) if local else "gradients"
    outer = f" with {arguments.outer}," if arguments.outer is not None else ""
    ranks = f" by {low_rank.name}," if low_rank is not None else ""
    return f"engine native, {what}{outer}{ranks} {coding.name}{', in the clear' if arguments.insecure_lan else ''}"


def overlaps(arguments: Arguments) -> bool:
    """Whether batches go on while a round is under way."""
    averaged = arguments.delay_state_averaging if arguments.use_local_updates else arguments.delay_grad_averaging
    return bool(averaged)


def limits(arguments: Arguments, run: str, layout: Layout) -> Settings:
    """What the user's arguments mean for rounds."""
    return Settings(
        run=run,
        target_samples=arguments.target_batch_size,
        chunks=layout.chunks,
        min_group_size=(arguments.averager_opts or {}).get("min_group_size", 1),
        matchmaking_s=arguments.matchmaking_time,
        stall_s=arguments.next_chunk_timeout,
        round_s=arguments.allreduce_timeout,
    )


def longest_wait_s(arguments: Arguments) -> float:
    """How long a peer that is called may finish its batch first: it has then what the round is to have."""
    # (what is summed in place can be given between two batches only)
    waits = arguments.reuse_grad_buffers or not overlaps(arguments)
    return WAITED * float(arguments.matchmaking_time) if waits else 0.0


def make_low_rank(arguments: Arguments, stepper: Stepper, memory: Memory) -> LowRank | None:
    """PowerSGD, if it was asked for."""
    wanted = read_factory(arguments.grad_averager_factory)
    if wanted is None:
        return None
    shapes = [p.shape for p in stepper.model_parameters if p.requires_grad]
    rest = [*stepper.statistics.sizes, len(shapes)]
    ratio = wanted.min_compression_ratio
    return LowRank(shapes, rest, rank=wanted.rank, min_compression_ratio=ratio, memory=memory)


def build(
    arguments: Arguments,
    run: str,
    network: PeerNetwork,
    gradients: Gradients,
    memory: Memory,
    coding: Coding,
    copy_state: Callable[[Snapshot | None], Snapshot | None],
    state_memory: StateMemory,
    last_step: Callable[[], int],
) -> Parts:
    """Everything runs, and answers; this peer stands nowhere yet.

    Args:
        run: equal on peers that can average.
        copy_state: see :class:`.Donor`.
        state_memory: for a state that this peer takes.
        last_step: see :class:`.Handover`.
    """
    _say_what_averages_nothing(arguments)
    layout = layout_of(gradients.elements)
    codecs = _codecs(gradients, coding, layout)
    kept = KEPT_VECTORS + KEPT_LEFT_OUT * any(codec.leaves_out for codec in codecs)
    memory.kept_bytes = int(kept * 4 * max(gradients.elements, gradients.whole))
    me, reduces = network.peer_id, not arguments.client_mode
    settings = limits(arguments, run, layout)
    pace = Pace(
        arguments.target_batch_size,
        longest_s=longest_wait_s(arguments),
        gathers_s=WAITED * float(arguments.matchmaking_time),
        is_stale=gradients.is_stale,
    )
    gives = not arguments.auxiliary
    handover = Handover(me, gradients, pace, reduces=reduces, gives=gives, last_step=last_step)
    driver = Driver(Peer(settings, me, secrets.token_bytes(8), reduces=reduces), handover, layout, codecs, memory)
    certificate = _certificate(arguments)
    introductions: list[Introductions] = []
    links = Links(
        driver,
        certificate=certificate,
        introduce=lambda *asked: introductions[0].introduce(*asked),
        stream=lambda *asked: introductions[0].stream(*asked),
        detect_s=settings.detect_s,
    )
    port, ipv6 = _listen(links, arguments) if reduces else (None, False)
    fingerprint = b"" if certificate is None else certificate.fingerprint
    asks = Introductions(
        network.dht, run, links, fingerprint=fingerprint, port=port, timeout_s=INTRODUCTION_S, ipv6=ipv6
    )
    introductions.append(asks)
    forget = partial(links.forget, kind=Kind.STATE)  # (the number of a download is what its taker says: a round's, too)
    donor = Donor(links.send, copy_state, forget, lambda: handover.under_way)
    downloads = Downloads(links.send, arguments.next_chunk_timeout, state_memory)
    driver.start(links, donor, downloads)
    with contextlib.ExitStack() as unless_started:
        unless_started.callback(driver.stop, 1.0)
        unless_started.callback(donor.stop)
        unless_started.callback(asks.close)
        asks.start()
        unless_started.pop_all()
    return Parts(
        handover=handover,
        driver=driver,
        telling=Telling(driver, handover, arguments.target_batch_size),
        donor=donor,
        downloads=downloads,
        introductions=asks,
        connected=links.connected,
    )


def _say_what_averages_nothing(arguments: Arguments) -> None:
    names = needless(arguments)
    if "delay_state_averaging" in names and arguments.offload_optimizer:
        names.remove("delay_state_averaging")
        log.info(
            "delay_state_averaging: by itself it does what offload_optimizer=True does, and no state is averaged"
            ' (engine="native", the default)'
        )
    if names:
        log.info(
            '%s: not needed with engine="native" (the default): peers are equal after every step, no state is averaged',
            ", ".join(names),
        )


def _codecs(gradients: Gradients, coding: Coding, layout: Layout) -> list[ChunkCodec]:
    """Of each chunk."""
    coded = [*coding.of_all(gradients.sizes, gradients.of_gradients, gradients.moments), (gradients.marks, Exact())]
    return per_chunk(coded, layout.spans)


def _certificate(arguments: Arguments) -> Certificate | None:
    """None, and a warning, if everything is to be sent in the clear."""
    if not arguments.insecure_lan:
        return Certificate.create()
    log.warning(
        "insecure_lan=True: gradients and states are sent in the clear; who can reach the network between the peers"
        " can read and change them"
    )
    return None


def _listen(links: Links, arguments: Arguments) -> tuple[int, bool]:
    """Beside libp2p: at its host, if it has one only, and at the port next to its own, if that was given.

    Returns the port, and whether that is IPv6's.
    """
    given = [parse_address("host_maddrs", one) for one in arguments.host_maddrs or ()]
    hosts = {one.host for one in given}
    ports = [one.port for one in given if one.transport == "tcp" and one.port]
    host, port = hosts.pop() if len(hosts) == 1 else "0.0.0.0", min(ports) + 1 if ports else 0
    try:
        return links.listen(host, port), ":" in host
    except (OSError, OverflowError) as error:
        raise AddressError(
            f'host_maddrs={list(arguments.host_maddrs or ())}: engine="native" listens at {host}, port {port}, beside'
            f" libp2p, and cannot: {error}. Give another port."
        ) from None
