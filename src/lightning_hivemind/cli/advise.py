"""``lightning-hivemind advise``: how to train this model, on this machine, over this line."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from dataclasses import asdict, replace
from typing import Any

from lightning_hivemind.advice import line, machine
from lightning_hivemind.advice.choice import Advice, Situation, advise
from lightning_hivemind.advice.memory import Way
from lightning_hivemind.advice.model import ModelFacts, find, look_at
from lightning_hivemind.cli.numbers import bytes_of, count
from lightning_hivemind.errors import ArgumentError


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "advise",
        help="how to train a model here: local strategy, way to collaborate, codec",
        description=(
            "Looks at the model on the meta device (nothing of it is ever in memory), at this machine, and at the line"
            " to the others; says what to give HivemindStrategy, with the memory and time that it estimates, and why."
        ),
        epilog="To measure the line, start `lightning-hivemind advise --listen 5000` on a machine of another peer, and"
        " here give --measure HOST:5000.",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODULE:CLASS", help="a LightningModule's class, or a function that makes one")
    add("--arguments", type=_json, default={}, metavar="JSON", help='what it is called with, as {"width": 512}')
    add("--peers", type=count, default=4, help="how many take part (%(default)s)")
    add("--batch-samples", type=count, default=8, help="samples of one batch of one device (%(default)s)")
    add("--target-batch-size", type=count, help="samples of a global step (one batch of every device)")
    add("--line", type=float, metavar="MBIT", help="Mbit/s of the slowest peer's uplink")
    add("--measure", metavar="HOST:PORT", help="measure it to a machine that listens")
    add("--listen", type=count, metavar="PORT", help="be that machine, until Ctrl+C")
    add("--devices", type=count, help="instead of those that are here")
    add("--device-memory", type=float, metavar="GB", help="of each, instead of what is here")
    add("--host-memory", type=float, metavar="GB", help="instead of what is here")
    add("--device-tflops", type=float, metavar="TFLOPS", help="in large matrices, instead of what was measured")
    add("--json", action="store_true", help="one object instead of text")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Advise and print; status 1 if the model fits in no way."""
    if given.listen is not None:
        return _listen(given.listen)
    if given.model is None:
        raise ArgumentError("say which model, as MODULE:CLASS, as in train:GPT; or --listen PORT.")
    facts = look_at(find(given.model), given.arguments)
    if (given.line is None) == (given.measure is None):
        raise ArgumentError("say how fast the line to the others is: --line MBIT, or --measure HOST:PORT.")
    for name in ("line", "device_memory", "host_memory", "device_tflops"):
        if (value := getattr(given, name)) is not None and not 0 < value < float("inf"):
            raise ArgumentError(f"--{name.replace('_', '-')}={value}: give a number above 0.")
    for name in ("peers", "batch_samples", "devices", "target_batch_size"):
        if (value := getattr(given, name)) is not None and value < (2 if name == "peers" else 1):
            raise ArgumentError(f"--{name.replace('_', '-')}={value}: give {2 if name == 'peers' else 1} or more.")
    measured = None if given.measure is None else line.measure(*_address(given.measure))
    here = _machine(given)
    situation = Situation(
        model=facts,
        machine=here,
        up_mbit_s=given.line if measured is None else min(measured.up_mbit_s, measured.down_mbit_s),
        peers=given.peers,
        batch_samples=given.batch_samples,
        target_batch_size=given.target_batch_size or given.peers * here.devices * given.batch_samples,
    )
    found = advise(situation)
    if given.json:
        of_line = {"up_mbit_s": given.line} if measured is None else asdict(measured)
        told = {"model": asdict(facts), "machine": asdict(here), "line": of_line}
        sys.stdout.write(json.dumps({**told, "advice": asdict(found)}, indent=2) + "\n")
    else:
        sys.stdout.write(text(situation, found, measured) + "\n")
    return 0 if found.way is not None else 1


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{text} is no JSON ({error}); give it as {{"width": 512}}') from error


def _machine(given: argparse.Namespace) -> machine.Machine:
    """This one, but for what is said otherwise."""
    said = {
        "kind": "device, as given" if given.device_memory else None,
        "devices": given.devices,
        "memory": given.device_memory and int(given.device_memory * 1e9),
        "host_memory": given.host_memory and int(given.host_memory * 1e9),
        "flops": given.device_tflops and given.device_tflops * 1e12,
    }
    return replace(machine.look(), **{name: one for name, one in said.items() if one is not None})


def _listen(port: int) -> int:
    try:
        listener = socket.create_server(("", port))
    except (OSError, OverflowError) as error:
        raise ArgumentError(f"--listen={port}: {error}. Give another port.") from error
    with listener:
        sys.stdout.write(f"listening on port {port}: there, give --measure HOST:{port}\n")
        sys.stdout.flush()
        line.serve(listener)
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentError(f"--measure={text}: give HOST:PORT.")
    return host.strip("[]"), int(port)


def text(here: Situation, found: Advice, measured: line.Line | None) -> str:
    """What a person reads."""
    model, place = here.model, here.machine
    rows = [("model", _model(model))]
    rows.append(
        ("machine", f"{place.devices} x {place.kind}, {bytes_of(place.memory)}, {place.flops / 1e12:.2f} TFLOP/s")
    )
    rtt = "" if measured is None else f", {1000 * measured.rtt_s:.0f} ms there and back, measured"
    rows.append(("line", f"{here.up_mbit_s:.1f} Mbit/s up{rtt}"))
    rows += [("not known", one) for one in model.unknown]
    lines = [f"{name:9}  {value}" for name, value in rows]
    lines += ["", f"{'memory of':42}  {'a device':>9}  {'the host':>9}"]
    lines += [_way(one, here, found) for one in found.ways]
    if model.activation_bytes is None:
        lines.append("(without what a backward pass needs of a batch)")
    lines += ["", f"HivemindStrategy({', '.join(found.arguments)})", ""]
    lines += [f"- {one}" for one in found.reasons]
    computing = "" if found.computing_s is None else f"; computing between two takes {found.computing_s:.2f} s"
    lines.append(
        f"- Each peer sends {bytes_of(found.sent_bytes)} in a round of {here.peers} peers, for"
        f" {found.sending_s:.2f} s{computing}."
    )
    return "\n".join(lines)


def _model(model: ModelFacts) -> str:
    trained = "" if model.trained == model.parameters else f", {model.trained:,} of them trained"
    return f"{model.parameters:,} values ({bytes_of(model.bytes)}){trained}, {model.optimizer or 'Adam, say'}"


def _way(one: Way, here: Situation, found: Advice) -> str:
    place = here.machine
    fits = one.fits(place.memory, place.host_memory, is_cpu=place.is_cpu)
    mark = "<- this" if one is found.way else "" if fits else "does not fit"
    name = f"{one.name}, {one.devices} device{'s' * (one.devices > 1)}"
    return f"{name:42}  {bytes_of(one.device_bytes):>9}  {bytes_of(one.host_bytes):>9}  {mark}".rstrip()
