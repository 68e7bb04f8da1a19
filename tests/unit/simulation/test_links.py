"""When bytes arrive over lines of limited width."""

from __future__ import annotations

import pytest

from lightning_hivemind.simulation.links import SharedLinks, Wire


def links(**wires: Wire) -> SharedLinks:
    return SharedLinks(seed=0, wires=wires)


def test_what_is_sent_at_once_shares_the_uplink() -> None:
    net = links(a=Wire(up=100.0, down=1e9), b=Wire(up=1e9, down=1e9), c=Wire(up=1e9, down=1e9))
    assert net.deliveries("a", "b", 100, 0.0, data=True) == pytest.approx([1.0])
    assert net.deliveries("a", "c", 100, 0.0, data=True) == pytest.approx([2.0])
    assert net.deliveries("a", "c", 100, 5.0, data=True) == pytest.approx([6.0])


def test_what_comes_at_once_shares_the_downlink() -> None:
    net = links(a=Wire(up=1e9, down=1e9), b=Wire(up=1e9, down=1e9), c=Wire(up=1e9, down=50.0))
    assert net.deliveries("a", "c", 100, 0.0, data=True) == pytest.approx([2.0])
    assert net.deliveries("b", "c", 100, 0.0, data=True) == pytest.approx([4.0])


def test_sending_and_reading_overlap() -> None:
    net = links(a=Wire(up=100.0, down=1e9), b=Wire(up=1e9, down=100.0))
    assert net.deliveries("a", "b", 100, 0.0, data=True) == pytest.approx([1.0])


def test_a_message_passes_data_and_takes_its_share_of_the_line() -> None:
    net = links(a=Wire(up=100.0, down=1e9), b=Wire(up=1e9, down=1e9))
    net.deliveries("a", "b", 1000, 0.0, data=True)
    assert net.deliveries("a", "b", 10, 0.0) == pytest.approx([0.1])
    assert net.deliveries("a", "b", 100, 0.0, data=True) == pytest.approx([11.1])


def test_latency_is_the_sum_of_both_sides() -> None:
    net = links(a=Wire(up=1e9, down=1e9, latency_s=0.02), b=Wire(up=1e9, down=1e9, latency_s=0.03))
    assert net.deliveries("a", "b", 1, 1.0) == pytest.approx([1.05])


def test_one_connection_that_loses_packets_is_slower_than_the_line() -> None:
    """100 Mbit/s, 50 ms, 0.1%: the formula gives 9 Mbit/s (cubic was measured at 7) to each of three connections."""
    line = {"up": 12.5e6, "down": 12.5e6, "latency_s": 0.0125, "loss": 0.0005}
    net = links(a=Wire(**line), b=Wire(**line), c=Wire(**line))
    (arrives,) = net.deliveries("a", "b", 1_000_000, 0.0, data=True)
    assert 8.0 / (arrives - 0.025) == pytest.approx(3 * 9.0, rel=0.05)
    (other,) = net.deliveries("a", "c", 1_000_000, 0.0, data=True)
    assert other < arrives + 0.2, "the line has room for a second connection"


def test_two_that_cannot_be_dialled_do_not_reach_one_another() -> None:
    net = links(a=Wire(up=1.0, down=1.0, dialled=False), b=Wire(up=1.0, down=1.0, dialled=False))
    assert net.deliveries("a", "b", 1, 0.0) == []
    net.wires["b"].dialled = True
    assert net.deliveries("a", "b", 1, 0.0) != []
