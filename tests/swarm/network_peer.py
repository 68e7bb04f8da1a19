"""A whole peer but for the training: network, records, invitation. A script as a user's would be, for tests.

    [INITIAL_PEERS=...] python network_peer.py [--run-id RUN] [--loopback] [--reachable public|private] [--relayed]

Writes one line of JSON per step to standard output, and the peers that it sees whenever they change. Ends when
standard input says "stop" or is closed; "die" kills it while it speaks to its DHT process; "reach PEER_ID" asks that
peer for an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
from hivemind.p2p import PeerID, p2p_daemon

from lightning_hivemind.events import Event, EventBus
from lightning_hivemind.network.addresses import normalise_initial_peers
from lightning_hivemind.network.daemon import PeerNetwork
from lightning_hivemind.network.invitation import invitation
from lightning_hivemind.network.records import PeerRecords
from lightning_hivemind.network.settings import NetworkSettings


def say(step: str, **values: Any) -> None:
    print(json.dumps({"step": step, **values}), flush=True)


def forward(event: Event) -> None:
    say("event", **event.as_dict())


def believe(reachability: str, folder: str) -> None:
    """Let the daemon take that for granted, which it finds out from other peers elsewhere."""
    real = str(Path(hivemind.hivemind_cli.__file__).parent / "p2pd")
    stand_in = Path(folder) / "p2pd"
    flag = f"-forceReachability{reachability.capitalize()}"
    stand_in.write_text(f'#!/bin/sh\nexec {real} "$@" {flag}\n', encoding="utf-8")
    stand_in.chmod(0o755)
    p2p_daemon.path = lambda *_: contextlib.nullcontext(stand_in)


async def reach(peer_id: str, _dht: hivemind.DHT, node: Any) -> bool:
    """Whether that peer answers; runs in the DHT process."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(node.protocol.call_ping(PeerID.from_base58(peer_id)), 5.0) is not None
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-id", default="test run")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--reachable", choices=["public", "private"])
    parser.add_argument("--relayed", action="store_true", help="its initial peers are relays")
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    if options.reachable:
        believe(options.reachable, folder.name)
    bus = EventBus()
    bus.subscribe(forward)
    settings = NetworkSettings(
        run_id=options.run_id,
        initial_peers=(peers := normalise_initial_peers(os.environ.get("INITIAL_PEERS"))),
        use_auto_relay=options.relayed,
        trusted_relays=peers if options.relayed else (),
        host_maddrs=("/ip4/127.0.0.1/tcp/0",) if options.loopback else None,
    )
    network = PeerNetwork(settings, bus)
    network.start()
    folder.cleanup()
    text = invitation(network.visible_addresses(), argv=sys.orig_argv, executable=sys.executable, environ=os.environ)
    say(
        "up",
        pid=os.getpid(),
        dht_pid=network.dht.pid,
        daemon_pids=network.sockets.daemon_pids(),
        directory=str(network.sockets.path),
        peer_id=network.peer_id,
        addresses=network.visible_addresses(),
        invitation=text,
    )
    records = PeerRecords(network.dht, options.run_id, network.peer_id, refresh_s=0.2, expiration_s=5.0)
    records.publish(pid=os.getpid())
    stopped = threading.Event()
    threading.Thread(target=lambda: (obey(network), stopped.set()), daemon=True).start()
    seen: dict[str, Any] = {}
    while not stopped.wait(0.1):
        if records.read() != seen:
            seen = records.read()
            say("sees", records=seen)
    began = time.monotonic()
    records.close()
    network.shutdown()
    say("down", duration_s=time.monotonic() - began)


def obey(network: PeerNetwork) -> None:
    """Until it is told to stop."""
    for line in sys.stdin:
        if line.strip() == "die":
            network.dht._outer_pipe.send_bytes(b"half a word")  # what the DHT process reads, and cannot understand
            os.kill(os.getpid(), signal.SIGKILL)
        if line.startswith("reach "):
            peer = line.split()[1]
            say("asked", peer=peer, answered=network._call(partial(reach, peer)))
        if line.strip() == "stop":
            return


if __name__ == "__main__":
    main()
