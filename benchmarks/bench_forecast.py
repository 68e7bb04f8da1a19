"""What the simulator foretells, beside what real peers did on lines of the same width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from bench_bars import Bar, is_so
from bench_plan import NATIVE_FLOAT16
from bench_spec import TurnSpec
from bench_stats import markdown_table, number, summary
from bench_turn import Turn
from lightning_hivemind.simulation.forecast import Forecast, forecast
from lightning_hivemind.simulation.scenario import Scenario

UPLINK_MBIT_S = 50.0
MILLIONS = 8


def forecast_specs(peers: int) -> list[TurnSpec]:
    """A step is two batches of half a second and an exchange that takes longer."""
    return [
        TurnSpec(
            contender=NATIVE_FLOAT16,
            kind="ours",
            peers=peers,
            layers=MILLIONS,
            batches=2,
            batch_s=0.5,
            codec="Float16Compression",
            options={"engine": "native"},
            steps=8,
            window_s=60.0,
            uplink_mbit_s=UPLINK_MBIT_S,
        )
    ]


def foretold(spec: TurnSpec) -> Forecast:
    """The simulated run of the same shape."""
    scenario = Scenario(
        peers=spec.peers,
        profile="perfect",
        up_mbit_s=spec.uplink_mbit_s,
        parameters=spec.parameters,
        codec="fp16",
        batch_s=spec.batch_s,
        batch_samples=spec.batch_samples,
        target_batch_size=spec.target_samples,
        steps=spec.steps,
    )
    return forecast(scenario)


def seconds_of_steps(turn: Turn) -> list[float]:
    """Of peer 0, from the end of one to the end of the next; several that it made at once share their time."""
    ends = turn.rounds[0] if turn.rounds else []
    return [
        (after.time - before.time) / after.advanced for before, after in pairwise(ends) for _ in range(after.advanced)
    ]


def ratio(turns: Sequence[Turn]) -> float:
    """Foretold by measured, of turns of one case; NaN without a measurement."""
    expected_s = foretold(turns[0].spec).step_s_median
    measured_s = summary(step_s for turn in turns for step_s in seconds_of_steps(turn)).median
    return math.nan if expected_s is None else expected_s / measured_s


def forecast_bars(turns: Sequence[Turn]) -> list[Bar]:
    bars = []
    for peers in sorted({turn.spec.peers for turn in turns}):
        own = [turn for turn in turns if turn.spec.peers == peers]
        expected = foretold(own[0].spec)
        for what, found in (
            ("seconds per step", ratio(own)),
            ("bytes sent", expected.sent_bytes_mean / mean(one.sent_bytes for one in own)),
            ("coordinator's messages", expected.coordinator_messages / mean(one.led_messages for one in own)),
            ("their bytes", expected.coordinator_message_bytes / mean(one.led_bytes for one in own)),
        ):
            name = f"simulator, {peers} peers: {what}, foretold / measured"
            bars.append(is_so(name, "0.8 to 1.2", number(found), holds=0.8 <= found <= 1.2))
    return bars


def forecast_table(turns: Sequence[Turn]) -> str:
    """As Markdown, with its caption."""
    caption = (
        "## Forecast and reality\n\n"
        f'`engine="native"`, Float16, {MILLIONS} million values; batches of half a second, two of each peer in a step;'
        f" every peer in a network of its own that sends at most {UPLINK_MBIT_S:g} Mbit/s. *foretold*: by"
        " `lightning-hivemind simulate --profile perfect --uplink ...` with the same figures. *s per step*: median; of"
        " peer 0 with the range, all repeats. *MB sent*: per peer and step, mean; measured at the interfaces, so with"
        " TLS's own bytes, the DHT's, and part of the headers of TCP and IP. *ideal*: 2(n-1)/n times the encoded"
        " gradient. *coordinator*: messages that it sends and receives in a step, and their kB with headers; mean."
        " Peers share the cores, which the simulator does not know."
    )
    rows = []
    for peers in sorted({turn.spec.peers for turn in turns}):
        own = [turn for turn in turns if turn.spec.peers == peers]
        expected = foretold(own[0].spec)
        expected_s = math.nan if expected.step_s_median is None else expected.step_s_median
        measured = summary(step_s for turn in own for step_s in seconds_of_steps(turn))
        sent = mean(one.sent_bytes for one in own)
        ideal = 2 * (peers - 1) / peers * expected.encoded_bytes
        rows.append(
            [
                str(peers),
                number(expected_s),
                measured.show(),
                number(expected_s / measured.median),
                number(expected.sent_bytes_mean / 1e6),
                number(sent / 1e6),
                number(sent / ideal),
                number(expected.coordinator_messages),
                number(mean(one.led_messages for one in own)),
                number(expected.coordinator_message_bytes / 1e3),
                number(mean(one.led_bytes for one in own) / 1e3),
                ", ".join(turn.failure for turn in own if turn.failure),
            ]
        )
    header = [
        "peers",
        "s per step, foretold",
        "measured",
        "foretold / measured",
        "MB sent, foretold",
        "measured",
        "measured / ideal",
        "coordinator's messages, foretold",
        "measured",
        "kB, foretold",
        "measured",
        "",
    ]
    return f"{caption}\n\n{markdown_table(header, rows)}"


def mean(of_turns: Iterable[Sequence[float]]) -> float:
    """Of all values of all turns; NaN if there is none."""
    values = [one for values in of_turns for one in values]
    return fmean(values) if values else math.nan
