"""How much of a long, bad line the native engine's connections use.

    PYTHONPATH=tests python benchmarks/lines.py    # half an hour; writes benchmarks/results/lines.md

Two network namespaces, and a process that carries their packets, with a delay, a width and losses (``swarm.line``): the
TCP in between is the kernel's own. 25 frames of 1 MiB (100 on a wide line) go one way, three times; the last time
counts. Contenders: one connection with cubic, as many as :mod:`lightning_hivemind.engine.native.wire.lanes` opens with
cubic, and BBR, with which it opens more where the kernel's buffers are full. (With reno, where the system allows cubic
to no namespace but its own.)
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_results import Run, report, write
from bench_stats import markdown_table, number, summary

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from lightning_hivemind.engine.native.wire import lanes
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from swarm.line import line
from swarm.namespaces import Namespace
from swarm.town import Town

FRAME_BYTES, FRAMES, BURSTS = 1 << 20, 25, 3
#: on a wide line one frame for each of these megabits per second
WIDE = 4.0
LIMIT_S = 120.0
#: round trip in seconds, megabits per second, share of packets that are lost
LINES = [(0.1, 100.0, 0.001), (0.05, 50.0, 0.001), (0.04, 20.0, 0.0005), (0.1, 100.0, 0.0), (0.1, 400.0, 0.0)]
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text(encoding="ascii").split()
BY_LOSS = "cubic" if "cubic" in ALLOWED else "reno"
ONE, LANES, BBR = f"{BY_LOSS}, one connection", f"{BY_LOSS}, several", "BBR"


class Counter:
    """A sink that counts frames."""

    def __init__(self) -> None:
        self.frames = 0

    def room(self, peer: str, header: Header) -> memoryview:
        return memoryview(bytearray(header.length))

    def moved(self, peer: str, header: Header) -> None:
        pass

    def arrived(self, peer: str, header: Header, payload: memoryview | None) -> None:
        self.frames += header.kind is Kind.INPUT

    def lost(self, peer: str, reason: str) -> None:
        raise RuntimeError(f"{peer} was lost: {reason}")


def send(spaces: tuple[Namespace, Namespace], contender: str, frames: int, result: Connection) -> None:
    """In a process of its own: megabits per second of the last burst, and how many connections there are then."""
    if contender != BBR:
        del socket.TCP_CONGESTION  # so that `tune` asks for nothing
    if contender == ONE:
        lanes.MOST = 1
    town, counter = Town(secure=True, detect_s=5.0), Counter()
    _enter(spaces[0], contender)
    links = town.add("here", Counter(), address=spaces[0].address)
    there = threading.Thread(target=_settle, args=(town, spaces[1], counter, contender))
    there.start()
    there.join()
    data, rate = os.urandom(FRAME_BYTES), 0.0
    for burst in range(1, BURSTS + 1):
        began = time.monotonic()
        for number_of in range(frames):
            header = Header(kind=Kind.INPUT, chunk=frames * burst + number_of, length=FRAME_BYTES)
            links.send("there", header, (data,))
        while counter.frames < frames * burst and time.monotonic() < began + LIMIT_S:
            time.sleep(0.005)
        arrived = counter.frames - frames * (burst - 1)
        rate = arrived * FRAME_BYTES * 8 / 1e6 / (time.monotonic() - began)
    result.send((rate, len(links._outlets["there"].connections)))
    os._exit(0)


def _settle(town: Town, space: Namespace, counter: Counter, contender: str) -> None:
    _enter(space, contender)
    town.add("there", counter, address=space.address)


def _enter(space: Namespace, contender: str) -> None:
    """Of this thread, and of those that it starts."""
    space.enter()
    usual = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # each namespace has its own
    usual.write_text("bbr" if contender == BBR else BY_LOSS, encoding="ascii")


def turn(rtt_s: float, mbit_s: float, loss: float, contender: str) -> tuple[float, int]:
    with line(rtt_s=rtt_s, mbit_s=mbit_s, loss=loss) as spaces:
        mine, theirs = multiprocessing.Pipe(duplex=False)
        frames = max(FRAMES, int(mbit_s / WIDE))
        process: Any = multiprocessing.get_context("spawn").Process(
            target=send, args=(spaces, contender, frames, theirs)
        )
        process.start()
        theirs.close()  # else its death would not end the wait
        found: tuple[float, int] = mine.recv()
        process.join()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help="results/lines.md")
    options = parser.parse_args()
    run, rows = Run(), []
    for rtt_s, mbit_s, loss in LINES:
        row = [f"{mbit_s:.0f} Mbit/s, {1000 * rtt_s:.0f} ms, {loss:.2%} lost"]
        for contender in (ONE, LANES, BBR):
            turns = [turn(rtt_s, mbit_s, loss, contender) for _ in range(options.repeats)]
            rates, most = summary([rate for rate, _ in turns]).show(), max(count for _, count in turns)
            row.append(rates + (f", {number(most)} connections" if most > 1 else ""))
            print(row[0], contender, row[-1], file=sys.stderr, flush=True)
        rows.append(row)
    heads = ["line", *(f"{contender}, Mbit/s" for contender in (ONE, LANES, BBR))]
    facts = run.facts()
    text = report("Long lines", facts, markdown_table(heads, rows), [])
    print(text)
    if options.write:
        write("lines", text, facts, [], rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
