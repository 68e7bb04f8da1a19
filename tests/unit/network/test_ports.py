"""Ports that were given: two peers on one of them would answer for one another."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from lightning_hivemind.errors import AddressError
from lightning_hivemind.network.ports import await_free


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
def test_a_port_at_which_another_listens_is_refused_by_name_however_much_it_shares(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as libp2p does
        other.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            other.listen()
        port = other.getsockname()[1]
        path = f"tcp/{port}" if kind is socket.SOCK_STREAM else f"udp/{port}/quic-v1"
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(AddressError, match=f"port {port} is in use on this machine.*two apart"):
                await_free([f"/ip4/{host}/{path}"], timeout_s=0.0)
    await_free([f"/ip4/127.0.0.1/{path}"], timeout_s=0.0)


def test_the_daemon_of_a_peer_that_was_killed_may_leave_first() -> None:
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    threading.Timer(0.2, other.close).start()
    began = time.monotonic()
    await_free([f"/ip4/127.0.0.1/tcp/{port}"], timeout_s=20.0)
    assert time.monotonic() - began >= 0.1


def test_connections_that_have_ended_and_any_port_are_no_obstacle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # who closes first keeps the port for a minute
            assert client.recv(1) == b""
    await_free([f"/ip4/127.0.0.1/tcp/{port}", "/ip4/127.0.0.1/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1"], timeout_s=0.0)


def test_an_address_of_another_machine_is_left_to_the_daemon() -> None:
    await_free(["/ip4/203.0.113.7/tcp/31330"], timeout_s=0.0)
