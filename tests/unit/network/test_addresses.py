"""Multiaddresses: what is accepted, what is refused with which fix, and what is printed for others."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hivemind.errors import AddressError, ArgumentError
from lightning_hivemind.network.addresses import (
    check_announced,
    check_listened,
    check_peers,
    choose_shareable,
    is_peer_id,
    normalise_initial_peers,
    parse_address,
    reach,
)
from lightning_hivemind.network.settings import NetworkSettings

ID = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"
OLD_ID = "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/203.0.113.7/tcp/31330/p2p/{ID}",
        f"/ip4/203.0.113.7/tcp/31330/p2p/{OLD_ID}",
        f"/ip6/2001:db8::1/udp/31330/quic-v1/p2p/{ID}",
        f"/ip4/203.0.113.7/udp/31330/quic/p2p/{ID}",
        f"/dns4/peer.example.org/tcp/443/wss/p2p/{ID}",
        f"/dnsaddr/bootstrap.libp2p.io/p2p/{ID}",
        f"/ip4/203.0.113.7/tcp/31330/p2p/{OLD_ID}/p2p-circuit/p2p/{ID}",
    ],
)
def test_full_addresses_are_accepted_as_peers(text: str) -> None:
    (address,) = check_peers("initial_peers", [text])
    assert address.text == text
    assert address.peer_id in (ID, OLD_ID)


def test_a_relayed_address_belongs_to_the_last_peer_of_its_path() -> None:
    address = parse_address("x", f"/ip4/203.0.113.7/tcp/31330/p2p/{OLD_ID}/p2p-circuit/p2p/{ID}")
    assert (address.peer_id, address.relayed, address.host, address.port) == (ID, True, "203.0.113.7", 31330)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("203.0.113.7:31330", "/ip4/203.0.113.7/tcp/31330/p2p/<peer id>"),
        ("[2001:db8::1]:31330", "/ip6/2001:db8::1/tcp/31330/p2p/<peer id>"),
        ("peer.example.org:31330", "/dns4/peer.example.org/tcp/31330/p2p/<peer id>"),
        ("tcp://peer.example.org:31330", "/dns4/peer.example.org/tcp/31330/p2p/<peer id>"),
        ("/ip4/203.0.113.7/tcp/31330", "/ip4/203.0.113.7/tcp/31330/p2p/<peer id>"),
        (f"ip4/203.0.113.7/tcp/31330/p2p/{ID}", f"/ip4/203.0.113.7/tcp/31330/p2p/{ID}"),
        (f"/ip4/203.0.113.7:31330/p2p/{ID}", f"/ip4/203.0.113.7/tcp/31330/p2p/{ID}"),
        (f"/ip4/peer.example.org/tcp/31330/p2p/{ID}", f"/dns4/peer.example.org/tcp/31330/p2p/{ID}"),
        (f"/ip4/203.0.113.7/tcp/31330/ipfs/{ID}", f"/ip4/203.0.113.7/tcp/31330/p2p/{ID}"),
        (f"/ip4/203.0.113.7/tcp/0/p2p/{ID}", f"/ip4/203.0.113.7/tcp/<port>/p2p/{ID}"),
        (ID, f"/ip4/<address>/tcp/<port>/p2p/{ID}"),
    ],
)
def test_common_mistakes_are_answered_with_the_corrected_address(text: str, fix: str) -> None:
    with pytest.raises(AddressError) as caught:
        check_peers("initial_peers", [text])
    message = str(caught.value)
    assert message.startswith(f"initial_peers={text!r}: ")
    assert message.endswith(f"Write {fix}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"/ip4/203.0.113.777/tcp/1/p2p/{ID}", "'203.0.113.777' where an IPv4 address"),
        (f"/ip4/203.0.113.7/tcp/70000/p2p/{ID}", "'70000' where a port"),
        (f"/ip4/203.0.113.7/tcp/-1/p2p/{ID}", "'-1' where a port"),
        ("/ip4/203.0.113.7/tcp/1/p2p/12D3KooWwrong", "'12D3KooWwrong' where a peer id"),
        (f"/ip4/203.0.113.7/p2p/{ID}", "names no port"),
        (f"/p2p/{ID}", "names no host"),
        (f"/carrier-pigeon/1/p2p/{ID}", "unknown part 'carrier-pigeon'"),
        ("/ip4/203.0.113.7/tcp", "lacks the value after /tcp"),
        (f"/ip4/0.0.0.0/tcp/5/p2p/{ID}", "all interfaces"),
    ],
)
def test_impossible_addresses_are_refused_with_the_part_that_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(AddressError, match="initial_peers=") as caught:
        check_peers("initial_peers", [text])
    assert problem in str(caught.value)


@given(st.text(max_size=80))
def test_any_text_that_is_no_address_is_refused_with_an_address_error(text: str) -> None:
    with pytest.raises(AddressError, match=re.escape(repr(text))):  # Hypothesis does not come upon a good one
        check_peers("initial_peers", [text])


def test_a_peer_id_that_was_not_copied_whole_is_refused() -> None:
    for whole in (ID, OLD_ID):
        assert is_peer_id(whole)
        assert not [part for part in (whole[:n] for n in range(len(whole))) if is_peer_id(part)]
        assert not is_peer_id(whole + "1")
        assert not is_peer_id("0" + whole[1:])  # base58 has no zero


def test_listening_takes_port_0_and_refuses_a_peer_id_or_a_name() -> None:
    check_listened("host_maddrs", ["/ip4/0.0.0.0/tcp/0", "/ip6/::/udp/0/quic-v1"])
    with pytest.raises(AddressError, match=r"Write /ip4/0\.0\.0\.0/tcp/0$"):
        check_listened("host_maddrs", [f"/ip4/0.0.0.0/tcp/0/p2p/{ID}"])
    with pytest.raises(AddressError, match="must name an IP address of this machine"):
        check_listened("host_maddrs", ["/dns4/me.example.org/tcp/0"])
    with pytest.raises(AddressError, match=r"/ip4/0\.0\.0\.0/tcp/3000(?!/p2p)"):
        check_listened("host_maddrs", ["0.0.0.0:3000"])


@pytest.mark.parametrize("field", ["initial_peers", "INITIAL_PEERS", "trusted_relays"])
def test_who_dials_an_address_is_told_that_it_names_its_peer(field: str) -> None:
    with pytest.raises(AddressError, match=re.escape("/ip4/192.0.2.1/tcp/3000/p2p/<peer id>")):
        check_peers(field, ["192.0.2.1:3000"])


def test_announcing_needs_a_real_port_and_host() -> None:
    check_announced("announce_maddrs", ["/ip4/203.0.113.7/tcp/31330", "/dns4/me.example.org/tcp/31330"])
    with pytest.raises(AddressError, match=r"port 0.*Write /ip4/203\.0\.113\.7/tcp/<port>"):
        check_announced("announce_maddrs", ["/ip4/203.0.113.7/tcp/0"])
    with pytest.raises(AddressError, match="all interfaces"):
        check_announced("announce_maddrs", ["/ip4/0.0.0.0/tcp/31330"])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("ip4/8.8.8.8", "public"),
        ("ip6/2a00:1450::1", "public"),
        ("dns4/peer.example.org", "public"),
        ("dnsaddr/peer.example.org", "public"),
        ("ip4/192.168.1.5", "private"),
        ("ip4/10.0.0.1", "private"),
        ("ip4/172.17.0.1", "private"),
        ("ip4/100.64.3.2", "private"),
        ("ip4/169.254.1.1", "private"),
        ("ip6/fd00::2", "private"),
        ("ip6/fe80::1", "private"),
        ("dns4/node7.local", "private"),
        ("ip4/127.0.0.1", "loopback"),
        ("ip4/127.8.8.8", "loopback"),
        ("ip6/::1", "loopback"),
        ("dns4/localhost", "loopback"),
    ],
)
def test_reach_of_an_address(host: str, expected: str) -> None:
    assert reach(f"/{host}/tcp/31330/p2p/{ID}") == expected


def full(host: str, rest: str = "tcp/1") -> str:
    return f"/{host}/{rest}/p2p/{ID}"


def test_only_public_addresses_are_shared_where_there_are_any() -> None:
    shared = choose_shareable(
        [full("ip4/127.0.0.1"), full("ip4/8.8.8.8", "udp/1/quic-v1"), full("ip4/10.0.0.1"), full("ip4/8.8.8.8")]
    )
    assert shared.addresses == (full("ip4/8.8.8.8"), full("ip4/8.8.8.8", "udp/1/quic-v1"))
    assert (shared.reach, shared.advice) == ("public", "")


def test_private_addresses_are_shared_one_per_host_with_advice() -> None:
    shared = choose_shareable(
        [full("ip4/10.0.0.1", "udp/1/quic-v1"), full("ip4/127.0.0.1"), full("ip4/10.0.0.1"), full("ip4/172.17.0.1")]
    )
    assert shared.addresses == (full("ip4/10.0.0.1"), full("ip4/172.17.0.1"))
    assert shared.reach == "private"
    assert "announce_maddrs" in shared.advice


def test_loopback_is_shared_only_if_there_is_nothing_else_and_says_so() -> None:
    shared = choose_shareable([full("ip4/127.0.0.1"), full("ip4/127.0.0.1", "udp/1/quic-v1")])
    assert shared.addresses == (full("ip4/127.0.0.1"),)
    assert shared.reach == "loopback"
    assert "this machine only" in shared.advice
    assert "host_maddrs" in shared.advice


def test_a_peer_without_addresses_cannot_be_shared() -> None:
    with pytest.raises(AddressError, match="client_mode"):
        choose_shareable([])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ("", ()),
        ([], ()),
        (" , ,", ()),
        ("/a,/b", ("/a", "/b")),
        (" /a , /b ,\n", ("/a", "/b")),
        ("/a /b", ("/a", "/b")),
        ('"/a,/b"', ("/a", "/b")),
        ("'/a','/b',", ("/a", "/b")),
        ("['/a', '/b']", ("/a", "/b")),
        (["/a", " '/b' "], ("/a", "/b")),
        (["/a,/b", "/c/"], ("/a", "/b", "/c")),
        ("/a,/a", ("/a",)),
        ("[::1]:80", ("[::1]:80",)),
    ],
)
def test_initial_peers_are_read_from_strings_and_lists_as_people_write_them(
    value: str | list[str] | None, expected: tuple[str, ...]
) -> None:
    assert normalise_initial_peers(value) == expected


def test_settings_refuse_what_cannot_work_when_they_are_made() -> None:
    NetworkSettings(run_id="r", initial_peers=(full("ip4/8.8.8.8"),), host_maddrs=("/ip4/0.0.0.0/tcp/0",))
    with pytest.raises(AddressError, match=r"initial_peers='8\.8\.8\.8:1'"):
        NetworkSettings(run_id="r", initial_peers=("8.8.8.8:1",))
    with pytest.raises(AddressError, match="trusted_relays="):
        NetworkSettings(run_id="r", trusted_relays=("/ip4/8.8.8.8/tcp/1",))
    with pytest.raises(AddressError, match="announce_maddrs="):
        NetworkSettings(run_id="r", announce_maddrs=("/ip4/8.8.8.8/tcp/0",))
    with pytest.raises(ArgumentError, match="startup_timeout=0"):
        NetworkSettings(run_id="r", startup_timeout=0)
    with pytest.raises(ArgumentError, match="run_id=''"):
        NetworkSettings(run_id="")
