"""Why a peer did not start or could not join, in words that say what to do."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lightning_hivemind.errors import DaemonError, JoinError, NetworkError
from lightning_hivemind.network.addresses import parse_address
from lightning_hivemind.network.settings import NetworkSettings

#: How much of the daemon's output goes into a message.
LINES = 10
_TCP_TIMEOUT_S = 2.0


def nobody_answered(error: BaseException) -> bool:
    """True for what hivemind 1.1.12 and its daemon say when no initial peer could be reached."""
    text = str(error)
    return "failed to connect to bootstrap peers" in text or "none of the initial_peers responded" in text


def explain(
    error: BaseException, settings: NetworkSettings, peers: Sequence[str], output: Sequence[str]
) -> NetworkError:
    """The error to raise for one that hivemind's start raised (but for :func:`nobody_answered`)."""
    text = str(error)
    left = "Nothing is left running."
    if "already taken" in text:
        return DaemonError(
            f"identity_path={settings.identity_path!r}: another live peer uses this identity. {left} "
            "Give each peer its own file, or stop the other one."
        )
    if "can't access this node" in text:
        return JoinError(
            f"initial_peers answered, but cannot connect back to this peer ({text}). {left} Open a port in the "
            "firewall and set host_maddrs and announce_maddrs to it, or set use_auto_relay=True, or client_mode=True."
        )
    if "local time must be within" in text:
        return JoinError(
            f"This machine's clock differs too much from that of initial_peers: {text}. {left} "
            "Synchronise the clocks (NTP)."
        )
    if "failed to listen" in text:
        listened = list(settings.host_maddrs or ())
        return DaemonError(
            f"host_maddrs={listened}: none of them can be listened on. {left} Name an address of this machine "
            f"(0.0.0.0: all) and a free port (0: any).{_quoted(output)}"
        )
    joining = f" while joining {', '.join(peers)}" if peers else ""
    return DaemonError(
        f"The peer's network did not start{joining}: {type(error).__name__}: {text}. {left}{_quoted(output)}"
    )


def too_slow(elapsed_s: float, settings: NetworkSettings, peers: Sequence[str], output: Sequence[str]) -> NetworkError:
    """The error after ``startup_timeout``: a JoinError if nothing answers at any of ``peers``."""
    states = probe(peers)
    if peers and not any(state == _ANSWERS for state in states.values()):
        return JoinError(describe_unreachable(peers, settings, states))
    return DaemonError(
        f"The libp2p daemon was not ready after {elapsed_s:.1f} s (startup_timeout={settings.startup_timeout:g}). It "
        f"was stopped; nothing is left running. On a slow or busy machine raise startup_timeout.{_quoted(output)}"
    )


def describe_death(exitcode: int | None, output: Sequence[str]) -> str:
    """Message for a DHT process that ended without a word."""
    return (
        f"The DHT process ended while starting (exit code {exitcode}). Nothing is left running. A negative code is the "
        f"signal that killed it (-9: often the system ran out of memory).{_quoted(output)}"
    )


def describe_unreachable(peers: Sequence[str], settings: NetworkSettings, states: dict[str, str] | None = None) -> str:
    """Message for a failed join, with what a plain TCP connection to each address says."""
    states = probe(peers) if states is None else states
    rows = "".join(f"\n  {address}: {state}" for address, state in states.items())
    return (
        f"None of the {len(peers)} initial_peers answered (wait_timeout={settings.wait_timeout:g}):{rows}\n"
        "Nothing is left running. Check that a peer of this run is up and that these are the addresses that it printed "
        "last (they change when it restarts, unless it has identity_path and a fixed port). To start a new run, "
        "leave initial_peers and INITIAL_PEERS out."
    )


_ANSWERS = "a program listens there, but not as this peer (an old peer id, another program, or it is overloaded)"


def probe(addresses: Sequence[str]) -> dict[str, str]:
    """What a TCP connection to each address says, tried side by side; at most 2 s and name resolution."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(max_workers=min(16, len(addresses))) as pool:
        return dict(zip(addresses, pool.map(_probe_one, addresses), strict=True))


def _probe_one(text: str) -> str:
    address = parse_address("initial_peers", text)
    if address.relayed or address.transport != "tcp" or address.port is None:
        return "no answer"
    try:
        with socket.create_connection((address.host, address.port), timeout=_TCP_TIMEOUT_S):
            return _ANSWERS
    except socket.gaierror:
        return f"the name {address.host} is unknown"
    except TimeoutError:
        return "no answer (a firewall, or the machine is off)"
    except ConnectionRefusedError:
        return "refused: nothing listens at this port"
    except OSError as error:
        return error.strerror or str(error)


def _quoted(output: Sequence[str]) -> str:
    if not output:
        return " The daemon printed nothing."
    return "\nThe daemon's last output:\n" + "\n".join(f"  {line[:500]}" for line in output)
