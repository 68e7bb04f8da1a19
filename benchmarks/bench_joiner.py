"""How long a joiner takes: of a large model beside a plain copy of as many bytes over TLS."""

from __future__ import annotations

import math
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

from bench_bars import Bar, at_most
from bench_plan import NATIVE
from bench_spec import TurnSpec, json_lines
from bench_stats import FLOAT32_BYTES, markdown_table, summary
from bench_turn import STARTER, start_all, start_peer, stop_all

BEFORE = 8  # steps of those that are there, before the joiner starts
AFTER = 8  # and with it
SMALL = 5  # millions of parameters, of a model of which a join is no more than questions
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Joiner:
    """One repeat. Seconds.

    Attributes:
        copy_s: of a plain copy over TLS, between two processes, while the peers train.
        quiet_s: the same with nobody else there.
        states: states that the joiner has taken until it was ready.
        join_s: from its first question for a state to being ready to train.
        step_s: of the two, median before the joiner started.
        longest_s: their longest step from the joiner's first question on.
        starting_s: the same from the start of the joiner's process on, which computes on the same cores as the others.
        failure: why there is nothing to read; the numbers are NaN then.
    """

    copy_s: float = math.nan
    quiet_s: float = math.nan
    states: int = 0
    join_s: float = math.nan
    step_s: float = math.nan
    longest_s: float = math.nan
    starting_s: float = math.nan
    failure: str = ""


def joiner_spec(millions: int) -> TurnSpec:
    """Two peers; the third comes later."""
    return TurnSpec(
        contender=NATIVE,
        kind="ours",
        peers=2,
        layers=millions,
        batches=2,
        batch_s=0.1,
        options={"engine": "native"},
        steps=10**9,
        window_s=1e9,
    )


def run_joiner(millions: int, keep: Path | None = None) -> Joiner:
    """One repeat. Never raises for what peers do: a repeat that fails is a result.

    Args:
        keep: folder in which the processes' files are kept; they are deleted otherwise.
    """
    spec, folder = joiner_spec(millions), Path(tempfile.mkdtemp(prefix="bench-", dir=keep))
    spec.save(folder / "spec.json")
    quiet_s, copy_s = plain_copy_s(spec.parameters * FLOAT32_BYTES), math.nan
    peers = start_all(spec, folder, [None] * spec.peers)
    try:
        _until(folder, peers, 0, BEFORE)
        copied = time.time()
        copy_s = plain_copy_s(spec.parameters * FLOAT32_BYTES)
        _until(folder, peers, 0, 3, since=time.time())
        started = time.time()
        peers.append(start_peer(folder, spec.peers, {}))
        _until(folder, peers, spec.peers, 1)
        _until(folder, peers, 0, AFTER, since=time.time())
    except (TimeoutError, EOFError) as error:  # the end of another process
        return Joiner(copy_s=copy_s, quiet_s=quiet_s, failure=str(error) or repr(error))
    finally:
        stop_all(peers)
    steps = [json_lines(folder / f"marks-{index}.jsonl") for index in range(spec.peers)]
    events = json_lines(folder / f"events-{spec.peers}.jsonl")
    if keep is None:
        shutil.rmtree(folder)
    ready = next(one["time"] for one in events if one["event"] == "SwarmReady")
    loaded = [one for one in events if one["event"] == "StateLoaded" and one["time"] <= ready]
    if not loaded:
        return Joiner(copy_s=copy_s, quiet_s=quiet_s, failure="the joiner was ready without a state")
    pairs = [pair for own in steps for pair in pairwise(own)]
    spans = [(after["time"] - before["time"], after["time"]) for before, after in pairs]
    asked = loaded[0]["time"] - loaded[0]["duration_s"]
    return Joiner(
        copy_s=copy_s,
        quiet_s=quiet_s,
        states=len(loaded),
        join_s=ready - asked,
        step_s=median(span for span, end in spans if end < copied),
        longest_s=max(span for span, end in spans if end >= asked),
        starting_s=max(span for span, end in spans if end >= started),
    )


def _until(folder: Path, peers: Sequence[BaseProcess], index: int, steps: int, since: float = 0.0) -> None:
    def made() -> int:
        return sum(mark["time"] > since for mark in json_lines(folder / f"marks-{index}.jsonl"))

    deadline = time.monotonic() + PATIENCE_S
    while made() < steps:
        if not all(peer.is_alive() for peer in peers) or time.monotonic() > deadline:
            raise TimeoutError(f"no {steps} steps of peer {index} in {PATIENCE_S:.0f} s, or a peer ended: see {folder}")
        time.sleep(0.1)


def plain_copy_s(size_bytes: int) -> float:
    """Seconds until another process has that many bytes, over one TLS 1.3 connection on loopback."""
    from lightning_hivemind.engine.native.wire.tls import Certificate

    values, certificate = memoryview(bytearray(b"x") * size_bytes), Certificate.create()
    ours, theirs = STARTER.Pipe()
    receiver = STARTER.Process(target=_receive, args=(theirs, size_bytes), daemon=True)
    receiver.start()
    theirs.close()  # else the end of that process would not be noticed
    plain = socket.create_connection(("127.0.0.1", ours.recv()), timeout=PATIENCE_S)
    with certificate.server.wrap_socket(plain, server_side=True) as sock:
        sock.sendall(values)
        took_s: float = ours.recv()
    receiver.join()
    return took_s


def _receive(pipe: Connection, size_bytes: int) -> None:
    from lightning_hivemind.engine.native.wire.tls import client_context

    memory = memoryview(bytearray(size_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        pipe.send(listener.getsockname()[1])
        plain, _ = listener.accept()
    with client_context().wrap_socket(plain) as sock:
        began = time.monotonic()
        position = 0
        while position < size_bytes:
            position += sock.recv_into(memory[position:])
        pipe.send(time.monotonic() - began)


def joiner_bars(found: Sequence[tuple[int, Joiner]]) -> list[Bar]:
    """Of each size."""
    bars = []
    for millions, own in _grouped(found):
        what = f"joiner, {millions}M"
        longest = [one.longest_s / one.step_s for one in own]
        if millions <= SMALL:
            bars.append(at_most(f"{what}: join", 2.0, [one.join_s for one in own], " s"))
        else:
            over = [(one.join_s - one.step_s) / one.copy_s for one in own]
            bars.append(at_most(f"{what}: (join - step) / copy over TLS", 2.0, over))
        bars.append(at_most(f"{what}: longest step of another / step", 2.0, longest))
    return bars


def _grouped(found: Sequence[tuple[int, Joiner]]) -> list[tuple[int, list[Joiner]]]:
    return [(size, [one for other, one in found if other == size]) for size in sorted({size for size, _ in found})]


def joiner_table(found: Sequence[tuple[int, Joiner]]) -> str:
    """As Markdown, with its caption, of ``(millions of values, repeat)``."""
    caption = (
        "## A peer that joins\n\n"
        "Two peers train a model of so many million float32 values (SGD: the state is the parameters); a third one"
        " starts. *copy*: as many bytes once over TLS between two other processes, in the same repeat: while the two"
        " train, as the joiner has it, and before they do (*quiet*)."
        " *join*: from its first question for a state until it is ready to train, however many states it takes; a step"
        " of the others is allowed for, and taken off in the ratio. *step*: of those two, before, median."
        " *longest step*: theirs, from that question on; *starting*: from the start of the third's process on, which"
        " makes its model on the same cores. Seconds, median (range) over repeats."
    )
    rows = []
    for millions, own in _grouped(found):
        rows.append(
            [
                f"{millions}M",
                summary(one.copy_s for one in own).show(),
                summary(one.quiet_s for one in own).show(),
                summary(one.join_s for one in own).show(),
                summary((one.join_s - one.step_s) / one.copy_s for one in own).show(),
                summary(one.states for one in own if not one.failure).show(),
                summary(one.step_s for one in own).show(),
                summary(one.longest_s for one in own).show(),
                summary(one.starting_s for one in own).show(),
                "; ".join(one.failure for one in own if one.failure),
            ]
        )
    header = [
        "parameters",
        "copy",
        "quiet",
        "join",
        "(join - step) / copy",
        "states taken",
        "step",
        "longest step",
        "starting",
        "",
    ]
    return f"{caption}\n\n{markdown_table(header, rows)}"
