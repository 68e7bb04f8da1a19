"""Ports that the user gave are free before libp2p starts: it shares one with whoever has it, and neither is reached."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence

from lightning_hivemind.errors import AddressError
from lightning_hivemind.network.addresses import Address, check_listened


def await_free(host_maddrs: Sequence[str], timeout_s: float) -> None:
    """Until all of them are: the daemon of a peer that was killed leaves a moment later.

    Raises:
        AddressError: another process listens at one, for longer than that.
    """
    deadline = time.monotonic() + timeout_s
    for address in check_listened("host_maddrs", host_maddrs):
        while address.port and _in_use(address):
            if time.monotonic() > deadline:
                raise AddressError(
                    f"host_maddrs={list(host_maddrs)}: {address.transport} port {address.port} is in use on this"
                    " machine, perhaps by another peer. Nothing was started. Give this peer another one, two apart"
                    ' (engine="native" listens at the next, too), or port 0 for any that is free.'
                )
            time.sleep(0.05)


def _in_use(address: Address) -> bool:
    """(Whatever else is wrong with an address the daemon says.)"""
    family = socket.AF_INET6 if address.host_protocol == "ip6" else socket.AF_INET
    kind = socket.SOCK_DGRAM if address.transport == "udp" else socket.SOCK_STREAM
    try:
        with socket.socket(family, kind) as probe:
            if kind is socket.SOCK_STREAM:  # connections that have ended are nobody's
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
