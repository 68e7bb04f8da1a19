"""``lightning-hivemind simulate``: what a run of the user's shape would be like, before anybody rents a machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from lightning_hivemind.cli.numbers import bytes_of, count
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.simulation.forecast import Forecast, forecast
from lightning_hivemind.simulation.profiles import PROFILES
from lightning_hivemind.simulation.scenario import CODECS, Scenario

#: by the fields that are called otherwise
OPTIONS = {"batch_s": "--batch-seconds", "churn_per_min": "--churn", "up_mbit_s": "--uplink"}
#: between two lines that say how far the simulation is, in real seconds
REPORT_S = 5.0


def add_to(commands: Any) -> None:
    """Declare the command. Its defaults are those of :class:`.Scenario`."""
    profiles = "\n".join(f"  {one.name}: {one.basis}" for one in PROFILES.values())
    parser = commands.add_parser(
        "simulate",
        help="forecast the steps of a swarm that does not exist yet",
        description='Runs the rounds of engine="native" on virtual time, with modelled lines and training.',
        epilog=f"profiles:\n{profiles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Scenario(peers=2)
    add = parser.add_argument
    add("--peers", type=count, required=True, help="how many take part")
    add("--profile", default=default.profile, help=f"their lines: {', '.join(PROFILES)} (%(default)s)")
    add("--parameters", type=count, default=default.parameters, help="values that are averaged, as 50e6 (%(default)s)")
    add("--codec", default=default.codec, help=f"{', '.join(CODECS)} (%(default)s)")
    add("--batch-seconds", type=float, default=default.batch_s, help="of a peer of middle speed (%(default)s)")
    add("--batch-samples", type=count, default=default.batch_samples, help="samples of a batch (%(default)s)")
    add("--target-batch-size", type=count, help="samples of a global step (one batch of every peer)")
    add("--steps", type=count, default=default.steps, help="to be measured (%(default)s)")
    add(
        "--churn", type=float, default=default.churn_per_min, help="peers killed and restarted per minute (%(default)s)"
    )
    add("--uplink", type=float, metavar="MBIT", help="Mbit/s of every peer's uplink, instead of the profile's")
    add("--matchmaking-time", type=float, default=default.matchmaking_time, help="the strategy's, s (%(default)s)")
    add("--averaging-timeout", type=float, default=default.averaging_timeout, help="the strategy's, s (%(default)s)")
    add("--next-chunk-timeout", type=float, help="the strategy's, s (matchmaking time)")
    add("--seed", type=int, default=default.seed, help="the same seed is the same run (%(default)s)")
    add("--json", action="store_true", help="one object instead of a table")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Simulate and print; status 1 if no step was made."""
    try:
        scenario = Scenario(
            peers=given.peers,
            profile=given.profile,
            parameters=given.parameters,
            codec=given.codec,
            batch_s=given.batch_seconds,
            batch_samples=given.batch_samples,
            target_batch_size=given.target_batch_size,
            steps=given.steps,
            churn_per_min=given.churn,
            up_mbit_s=given.uplink,
            matchmaking_time=given.matchmaking_time,
            averaging_timeout=given.averaging_timeout,
            next_chunk_timeout=given.next_chunk_timeout,
            seed=given.seed,
        )
    except ArgumentError as error:
        field, _, rest = str(error).partition("=")
        raise ArgumentError(f"{OPTIONS.get(field, '--' + field.replace('_', '-'))}={rest}") from None
    began = reported = time.monotonic()

    def progress(steps: int, now: float) -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            print(f"step {steps} of {scenario.steps}, {now:.0f} s simulated", file=sys.stderr, flush=True)  # noqa: T201

    found = forecast(scenario, progress)
    took_s = time.monotonic() - began
    text = json.dumps(found.as_dict(), indent=2) if given.json else table(scenario, found, took_s)
    print(text)  # noqa: T201
    return 0 if found.steps else 1


def table(scenario: Scenario, found: Forecast, took_s: float) -> str:
    """What a person reads."""
    rows = [
        ("swarm", f"{found.peers} peers, {scenario.profile}; {found.reducers} can be dialled and reduce"),
        ("gradient", f"{scenario.parameters:,} values, {bytes_of(found.encoded_bytes)}, {found.chunks} chunks"),
        ("global steps", f"{found.steps} of {scenario.steps}, in {found.simulated_s:.1f} s"),
        ("seconds per step", f"median {_seconds(found.step_s_median)}, 95th percentile {_seconds(found.step_s_p95)}"),
        ("sent per peer and step", _mean_and_largest(found.sent_bytes_mean, found.sent_bytes_largest)),
        ("received per peer and step", _mean_and_largest(found.received_bytes_mean, found.received_bytes_largest)),
        (
            "coordinator per step",
            f"{found.coordinator_messages:,.0f} messages, {bytes_of(found.coordinator_message_bytes)}",
        ),
        ("peers in a round", f"{found.members:.1f}"),
        ("rounds with all called", "-" if found.full_rounds is None else f"{found.full_rounds:.0%}"),
        ("rounds aborted", f"{found.aborted_rounds}"),
        ("peers killed, restarted", f"{found.crashes}, {found.restarts}"),
        ("forks seen", f"{found.forks}"),
        (
            "samples",
            f"{found.samples_committed:,} in steps, {found.samples_open:,} waiting,"
            f" {found.samples_lost_by_crash:,} lost with killed peers, {found.samples_dropped:,} dropped",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines += [f"{'':{width}}  {count} x {reason}" for reason, count in found.reasons.items()]
    if not found.steps:
        lines.append(
            f"No step was made. The slowest line needs {scenario.slowest_send_s:.1f} s to send a gradient once, of the"
            f" {scenario.averaging_timeout:g} s of --averaging-timeout: a longer one, fewer values or a smaller codec"
            " may help."
        )
    return "\n".join([*lines, f"(simulated in {took_s:.1f} s)"])


def _mean_and_largest(mean: float, largest: float) -> str:
    return f"mean {bytes_of(mean)}, largest {bytes_of(largest)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
