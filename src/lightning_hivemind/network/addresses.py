"""Multiaddresses: what they mean, whether they can work where they stand, and which of them to tell others.

A multiaddress is a path of protocols and values, ``/ip4/203.0.113.7/tcp/31330/p2p/12D3Koo...``
(https://multiformats.io/multiaddr). Nothing here needs hivemind or the network.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hivemind.errors import AddressError

Reach = Literal["public", "private", "loopback"]

#: Protocols of libp2p addresses: does a value follow the name?
_PROTOCOLS = {
    **dict.fromkeys(("ip4", "ip6", "ip6zone", "dns", "dns4", "dns6", "dnsaddr", "tcp", "udp"), True),
    **dict.fromkeys(("p2p", "ipfs", "sni", "certhash", "http-path"), True),
    **dict.fromkeys(("quic", "quic-v1", "ws", "wss", "tls", "noise", "http", "https"), False),
    **dict.fromkeys(("webtransport", "webrtc-direct", "webrtc", "p2p-circuit"), False),
}
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?$")
_PEER_ID_HINT = "<peer id>"
#: arguments with addresses of this peer, which do not say whose they are
_OWN = ("host_maddrs", "announce_maddrs")
_HOST_AND_PORT = re.compile(
    r"^(?:[a-z0-9+]+://)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^/:\s\[\]]+)):(?P<port>\d+)/?$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """One parsed multiaddress. ``port`` is None where the address has none (``dnsaddr``); ``peer_id`` is the last one.

    ``relayed`` says that the path leads through another peer, to which ``host`` and ``port`` belong.
    """

    text: str
    host_protocol: str
    host: str
    transport: str | None
    port: int | None
    peer_id: str | None
    relayed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Shareable:
    """The addresses to print for others, how far they reach, and what to say about that ("" for public ones)."""

    addresses: tuple[str, ...]
    reach: Reach
    advice: str


def normalise_initial_peers(value: str | Iterable[object] | None) -> tuple[str, ...]:
    """Addresses from a comma-separated string, a list (of strings or hivemind's ``Multiaddr``), or None.

    Tolerates spaces, line ends, empty entries, quotes, one pair of brackets and a trailing slash; drops repetitions.
    Does not validate: :func:`check_peers` does.
    """
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else [str(entry) for entry in value]
    found: dict[str, None] = {}
    for entry in entries:
        entry = entry.strip().strip("'\"")
        if entry.startswith("[") and entry.endswith("]"):  # a list that was pasted as it was printed
            entry = entry[1:-1]
        for part in re.split(r"[,\s]+", entry):
            address = part.strip("'\"").rstrip("/")
            if address:
                found[address] = None
    return tuple(found)


def parse_address(field: str, text: str) -> Address:
    """Read one multiaddress.

    Args:
        field: the argument or variable that it came from, for messages.
    Raises:
        AddressError: it is none; the message has the corrected form where that can be guessed.
    """
    if not text.startswith("/"):
        raise _error(field, text, "is not a multiaddress: it must start with '/'", _suggest(text))
    parts = text.strip("/").split("/")
    pairs: list[tuple[str, str]] = []
    position = 0
    while position < len(parts):
        name = parts[position]
        if name not in _PROTOCOLS:
            raise _error(field, text, f"has an unknown part {name!r}", _suggest(text))
        if _PROTOCOLS[name] and position + 1 >= len(parts):
            raise _error(field, text, f"lacks the value after /{name}", _suggest(text))
        pairs.append((name, parts[position + 1] if _PROTOCOLS[name] else ""))
        position += 2 if _PROTOCOLS[name] else 1
    for name, value in pairs:
        problem = _problem_with(name, value)
        if problem:
            raise _error(field, text, problem, _suggest(text))
    hosts = [(name, value) for name, value in pairs if name in _HOSTS]
    if not hosts:
        raise _error(field, text, "names no host (ip4, ip6, dns4, dns6 or dnsaddr)", _suggest(text))
    ports = [(name, int(value)) for name, value in pairs if name in ("tcp", "udp")]
    if not ports and hosts[0][0] != "dnsaddr":
        raise _error(field, text, "names no port (/tcp/<port>, or /udp/<port>/quic-v1)", _suggest(text))
    ids = [value for name, value in pairs if name in ("p2p", "ipfs")]
    return Address(
        text=text,
        host_protocol=hosts[0][0],
        host=hosts[0][1],
        transport=ports[0][0] if ports else None,
        port=ports[0][1] if ports else None,
        peer_id=ids[-1] if ids and pairs[-1][0] in ("p2p", "ipfs") else None,
        relayed=any(name == "p2p-circuit" for name, _ in pairs),
    )


def check_peers(field: str, addresses: Sequence[str]) -> tuple[Address, ...]:
    """Addresses to dial: each must end in ``/p2p/<peer id>`` and name a real host and port."""
    return tuple(_check_peer(field, text) for text in addresses)


def check_listened(field: str, addresses: Sequence[str]) -> tuple[Address, ...]:
    """Addresses to listen on: port 0 lets the system choose; a peer id does not belong here."""
    parsed = tuple(parse_address(field, text) for text in addresses)
    for address in parsed:
        if address.peer_id is not None:
            raise _error(field, address.text, "carries a peer id, but is listened on", _without_peer_id(address.text))
        if address.host_protocol not in ("ip4", "ip6"):
            raise _error(field, address.text, "must name an IP address of this machine to listen on", None)
    return parsed


def check_announced(field: str, addresses: Sequence[str]) -> tuple[Address, ...]:
    """Addresses that others shall dial: a real host and port, no peer id (the daemon adds it)."""
    parsed = tuple(parse_address(field, text) for text in addresses)
    for address in parsed:
        if address.peer_id is not None:
            problem = "carries a peer id, which is added by itself"
            raise _error(field, address.text, problem, _without_peer_id(address.text))
        _check_can_be_dialled(field, address)
    return parsed


def reach(text: str) -> Reach:
    """Who can dial this address: everyone, the same network, or this machine only. Names count as public.

    Addresses that are neither global nor loopback (documentation, carrier-grade NAT, link-local) count as private.
    """
    address = parse_address("address", text)
    if address.host_protocol.startswith("dns"):
        name = address.host.rstrip(".").lower()
        if name == "localhost" or name.endswith(".localhost"):
            return "loopback"
        return "private" if name.endswith((".local", ".lan", ".internal")) else "public"
    ip = ipaddress.ip_address(address.host)
    if ip.is_loopback:
        return "loopback"
    return "public" if ip.is_global else "private"


def choose_shareable(addresses: Sequence[str]) -> Shareable:
    """Of a peer's visible addresses, those to print for others: the public ones, else private, else loopback.

    Of private ones only one per host (TCP before QUIC), so that the line stays short.

    Raises:
        AddressError: there are no addresses at all (a peer in client mode).
    """
    if not addresses:
        raise AddressError("addresses=[]: this peer listens nowhere (client_mode), so nobody can join through it.")
    by_reach: dict[Reach, list[str]] = {"public": [], "private": [], "loopback": []}
    for text in dict.fromkeys(addresses):
        by_reach[reach(text)].append(text)
    if by_reach["public"]:
        return Shareable(addresses=tuple(_tcp_first(by_reach["public"])), reach="public", advice="")
    if by_reach["private"]:
        advice = (
            "These addresses work inside this machine's own network only. For peers elsewhere, forward a port to this "
            "machine (and the next one, for speed) and give it as host_maddrs=['/ip4/0.0.0.0/tcp/<port>'] and "
            "announce_maddrs=['/ip4/<public address>/tcp/<port>'], or let a third peer run that both can reach."
        )
        return Shareable(addresses=_one_per_host(by_reach["private"]), reach="private", advice=advice)
    advice = (
        "This address works on this machine only. For peers on other machines, listen on all interfaces: leave "
        "host_maddrs out, or set host_maddrs=['/ip4/0.0.0.0/tcp/0']."
    )
    return Shareable(addresses=_one_per_host(by_reach["loopback"]), reach="loopback", advice=advice)


def _check_peer(field: str, text: str) -> Address:
    address = parse_address(field, text)
    if "/ipfs/" in text:
        raise _error(field, text, "uses /ipfs/, the old spelling of /p2p/", text.replace("/ipfs/", "/p2p/"))
    if address.peer_id is None:
        suggestion = None if "/p2p/" in text else f"{text.rstrip('/')}/p2p/{_PEER_ID_HINT}"
        raise _error(field, text, "must end in /p2p/<peer id>, as the peer to be joined prints it", suggestion)
    _check_can_be_dialled(field, address)
    return address


def _check_can_be_dialled(field: str, address: Address) -> None:
    if address.port == 0:
        problem = "has port 0, which means 'any free port' and can be listened on, not dialled"
        suggestion = address.text.replace(f"/{address.transport}/0", f"/{address.transport}/<port>")
        raise _error(field, address.text, problem, suggestion)
    if address.host_protocol in ("ip4", "ip6") and ipaddress.ip_address(address.host).is_unspecified:
        problem = f"names {address.host}, which means 'all interfaces' and can be listened on, not dialled"
        raise _error(field, address.text, problem, None)


def _problem_with(name: str, value: str) -> str | None:
    """What is wrong with one component's value; None if nothing is."""
    if name in ("ip4", "ip6"):
        try:
            ipaddress.IPv4Address(value) if name == "ip4" else ipaddress.IPv6Address(value)
        except ValueError:
            return f"has {value!r} where an IPv{name[-1]} address must stand"
    elif name in ("tcp", "udp"):
        if not (value.isascii() and value.isdigit() and int(value) <= 65535):
            return f"has {value!r} where a port (0 to 65535) must stand"
    elif name.startswith("dns"):
        if not _HOST_NAME.match(value):
            return f"has {value!r} where a host name must stand"
    elif name in ("p2p", "ipfs") and not is_peer_id(value):
        return f"has {value!r} where a peer id ('12D3Koo...' or 'Qm...') must stand"
    return None


def is_peer_id(text: str) -> bool:
    """True for a base58 multihash: SHA-256 ("Qm...") or a whole public key ("12D3Koo...")."""
    if not 0 < len(text) <= 128 or any(letter not in _BASE58 for letter in text):
        return False
    number = 0
    for letter in text:
        number = number * 58 + _BASE58.index(letter)
    zeros = len(text) - len(text.lstrip("1"))
    raw = b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
    return len(raw) >= 34 and raw[0] in (0x00, 0x12) and raw[1] == len(raw) - 2


def _suggest(text: str) -> str | None:
    """The multiaddress that was probably meant; None if there is no good guess."""
    if is_peer_id(text):
        return f"/ip4/<address>/tcp/<port>/p2p/{text}"
    match = _HOST_AND_PORT.match(text)
    if match:
        return f"/{_host_part(match['v6'] or match['host'])}/tcp/{match['port']}/p2p/{_PEER_ID_HINT}"
    if not text.startswith("/") and text.split("/")[0] in _PROTOCOLS:
        return "/" + text
    match = re.match(r"^/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^/:]+):(?P<port>\d+)(?P<rest>/.*)?$", text)
    if match:
        rest = re.sub(r"^/(tcp|udp)(?=/|$)(/\d+)?", "", match["rest"] or "")
        return f"/{_host_part(match['host'])}/tcp/{match['port']}{rest or '/p2p/' + _PEER_ID_HINT}"
    match = re.match(r"^/(?:ip4|ip6)/(?P<host>[^/]+)(?P<rest>/.*)$", text)
    if match and _HOST_NAME.match(match["host"]) and not re.fullmatch(r"[0-9.]+", match["host"]):
        return f"/dns4/{match['host']}{match['rest']}"
    return None


def _host_part(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}/{host}"
    except ValueError:
        return f"dns4/{host}"


def _error(field: str, text: str, problem: str, suggestion: str | None) -> AddressError:
    fix = f" Write {suggestion}" if suggestion else " An example: /ip4/203.0.113.7/tcp/31330/p2p/12D3Koo..."
    if field in _OWN:
        fix = _without_peer_id(fix)
    return AddressError(f"{field}={text!r}: {problem}.{fix}")


def _without_peer_id(text: str) -> str:
    return re.sub(r"/(p2p|ipfs)/[^/]+/?$", "", text)


def _tcp_first(addresses: Iterable[str]) -> list[str]:
    return sorted(addresses, key=lambda text: "/udp/" in text)


def _one_per_host(addresses: Iterable[str]) -> tuple[str, ...]:
    chosen: dict[str, str] = {}
    for text in _tcp_first(addresses):
        chosen.setdefault(parse_address("address", text).host, text)
    return tuple(chosen.values())
