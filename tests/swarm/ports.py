"""A port to name in advance: whoever listens there does so a moment later, and nobody else until then."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A free one of those that no process of this machine is given for the asking (by port 0, or to connect from)."""
    first_given = int(_GIVEN.read_text(encoding="ascii").split()[0]) if _GIVEN.exists() else 32768
    choices = range(10000, first_given) if first_given > 20000 else range(20000, 60000)
    while True:
        port = random.SystemRandom().choice(choices)  # all workers of pytest have one seed
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
