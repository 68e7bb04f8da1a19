"""How peers are connected and how unlike their speeds are: a few named mixtures.

What has a source names it; everything else is an assumption, and says so. Rates are per peer and direction. The mean
lines of the Speedtest Global Index of September 2020, as the press reported them, are the anchor (fixed 85.7 Mbit/s
down, 45.7 up, 21 ms; mobile 36.0 down, 11.2 up, 40 ms). Means hide how slow the slowest are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One kind of connection.

    Attributes:
        share: of the peers that have it; the shares of a profile sum to 1.
        up_mbit_s, down_mbit_s: megabits (10^6 bits) per second.
        latency_ms: from the peer to the middle of the network; between two peers it is the sum of both.
        loss: of packets, as a fraction; it bounds what one connection carries (see :mod:`.links`).
        undialled: fraction of these peers that nobody can connect to (``client_mode``): they reduce nothing.
    """

    share: float
    up_mbit_s: float
    down_mbit_s: float
    latency_ms: float
    loss: float
    undialled: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A swarm's peers. ``spread``: their batches take between 1/spread and spread times the stated seconds."""

    name: str
    lines: tuple[Line, ...]
    spread: float
    basis: str


_HOME = Line(share=1.0, up_mbit_s=20.0, down_mbit_s=86.0, latency_ms=20.0, loss=0.0005, undialled=0.5)

PROFILES = {
    one.name: one
    for one in (
        Profile(
            name="perfect",
            lines=(Line(share=1.0, up_mbit_s=1000.0, down_mbit_s=1000.0, latency_ms=0.0, loss=0.0, undialled=0.0),),
            spread=1.0,
            basis="1 Gbit/s and nothing else that costs time: for checking figures by hand.",
        ),
        Profile(
            name="lan",
            lines=(Line(share=1.0, up_mbit_s=940.0, down_mbit_s=940.0, latency_ms=0.1, loss=0.0, undialled=0.0),),
            spread=1.2,
            basis="Gigabit Ethernet less its headers; latency and spread are assumptions.",
        ),
        Profile(
            name="home-broadband",
            lines=(_HOME,),
            spread=2.0,
            basis="Downlink and latency near the mean fixed line of the Speedtest Global Index 2020. Assumptions: an"
            " uplink of 20 (the mean of 45.7 is pulled up by fibre), loss, spread, half of them behind NAT.",
        ),
        Profile(
            name="mixed",
            lines=(
                Line(share=0.1, up_mbit_s=1000.0, down_mbit_s=1000.0, latency_ms=5.0, loss=0.0, undialled=0.0),
                Line(share=0.3, up_mbit_s=100.0, down_mbit_s=250.0, latency_ms=10.0, loss=0.0001, undialled=0.3),
                Line(share=0.6, up_mbit_s=20.0, down_mbit_s=86.0, latency_ms=20.0, loss=0.0005, undialled=0.5),
            ),
            spread=4.0,
            basis="Assumption: one machine in ten in a data centre, three on fibre, six as in home-broadband.",
        ),
        Profile(
            name="mobile",
            lines=(Line(share=1.0, up_mbit_s=11.2, down_mbit_s=36.0, latency_ms=40.0, loss=0.005, undialled=0.9),),
            spread=3.0,
            basis="Rates and latency: the mean mobile line of the Speedtest Global Index 2020. Assumptions: loss,"
            " spread, nine in ten behind the operator's NAT.",
        ),
    )
}
