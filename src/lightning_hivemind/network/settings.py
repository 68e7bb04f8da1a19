"""Everything that :class:`~lightning_hivemind.network.daemon.PeerNetwork` is told, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.network.addresses import check_announced, check_listened, check_peers

#: Every interface by TCP, ports chosen by the system. A protocol that a machine lacks (IPv6, say) is left out by the
#: daemon; it gives up only if none can be listened on. Not QUIC: over it the daemon loses the end of what
#: stock peers answer (of 60 rounds with two of them on loopback 15 were whole, over TCP all).
LISTEN_EVERYWHERE = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """How a peer listens, whom it joins, and how long it waits.

    Attributes:
        run_id: name of the run; prefix of its keys in the DHT.
        initial_peers: full addresses, ending in ``/p2p/<peer id>``, of peers to join through; empty: be the first.
        host_maddrs: where to listen; ``None``: :data:`LISTEN_EVERYWHERE` (nowhere, if ``client_mode``).
        announce_maddrs: where others can reach this peer, if it cannot know that itself (a forwarded port).
        identity_path: file with the private key that makes the peer id; made if missing.
        client_mode: accept no connection from others.
        use_relay: reach peers behind NAT through relays.
        use_auto_relay: be reachable through a relay while behind NAT.
        use_ipfs: join through the public IPFS network, not through ``initial_peers``.
        trusted_relays: full addresses of relays to be reachable through.
        wait_timeout: s that one DHT request may take. Raise it where live peers are said not to answer.
        bootstrap_timeout: s to wait for the other ``initial_peers`` once one has answered; ``None``: ``wait_timeout``.
        startup_timeout: s until :meth:`PeerNetwork.start` gives up. Raise it on slow or overloaded machines.
    Raises:
        AddressError: an address that cannot be used where it stands.
        ArgumentError: a timeout that is not positive, or an empty ``run_id``.
    """

    run_id: str
    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] | None = None
    announce_maddrs: tuple[str, ...] | None = None
    identity_path: str | None = None
    client_mode: bool = False
    use_relay: bool = True
    use_auto_relay: bool = False
    use_ipfs: bool = False
    trusted_relays: tuple[str, ...] = ()
    wait_timeout: float = 3.0
    bootstrap_timeout: float | None = None
    startup_timeout: float = 120.0

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ArgumentError("run_id='': the run needs a name; all peers of a run use the same one.")
        for name in ("wait_timeout", "bootstrap_timeout", "startup_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"{name}={value!r}: must be a number of seconds greater than 0.")
        check_peers("initial_peers", self.initial_peers)
        check_peers("trusted_relays", self.trusted_relays)
        check_listened("host_maddrs", self.host_maddrs or ())
        check_announced("announce_maddrs", self.announce_maddrs or ())
