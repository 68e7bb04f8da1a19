"""What peers run besides plain training: see ``PeerSpec.scenario``."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from swarm.peer_main import Recorder, wait
from swarm.spec import PeerSpec


def leak(spec: PeerSpec) -> None:
    """End, and leave a detached process behind."""
    subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)


def listen(spec: PeerSpec) -> None:
    """Hold a port until the test says go."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        Recorder(spec).write("listening", port=server.getsockname()[1])
        wait((Path(spec.folder) / "go").exists, "go")


def sleep(spec: PeerSpec) -> None:
    """Do nothing for long."""
    time.sleep(600)
