"""The process that peers are forked from: importing torch and Lightning takes seconds, a fork takes none.

Run as ``python -m swarm.zygote lightning|pytorch_lightning|both``. Each line on its standard input is a job (JSON);
for each it forks a *supervisor*, which forks the peer. The supervisor is a child subreaper (Linux): whatever a peer
starts, however it detaches it, stays below its supervisor, so that nothing escapes the leak check. It writes the
peer's pid and exit status to files, and on SIGTERM kills all that is left.

The zygote has no threads and has imported neither hivemind nor ``lightning_hivemind``: a peer does that for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, CLONE_NEWNET = 1, 36, 0x40000000
# hivemind is left to the peers: at import it makes locks that forked processes would share. What it imports is not.
_OF_HIVEMIND = ["google.protobuf", "msgpack", "pydantic", "scipy.optimize", "uvloop"]
_OF_HIVEMIND += ["base58", "blake3", "cryptography.x509", "cryptography.hazmat.primitives.asymmetric.rsa", "mmh3"]
_OF_HIVEMIND += ["multihash", "netaddr", "prefetch_generator", "sortedcontainers", "varint"]
HEAVY = {
    "lightning": ["torch", "lightning.pytorch", *_OF_HIVEMIND],
    "pytorch_lightning": ["torch", "pytorch_lightning", *_OF_HIVEMIND],
    "both": ["torch", "lightning.pytorch", "pytorch_lightning", *_OF_HIVEMIND],
}


def serve(flavour: str) -> dict[str, Any] | None:
    """Fork peers until standard input ends. Returns None in the zygote, and in each peer the job that it must do."""
    for name in HEAVY[flavour]:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()
    assert not {"hivemind", "lightning_hivemind"} & set(sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are reaped by the kernel
    print("ready", flush=True)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        if os.fork() == 0:
            return job if _supervise(job) else None
    return None


def _supervise(job: dict[str, Any]) -> bool:
    """Fork the peer. True in the peer; the supervisor never returns."""
    folder = Path(job["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: _kill_all_below())
    peer = os.fork()
    if peer == 0:
        _become_peer(job, libc)
        return True
    _write(folder / "pid", f"{peer} {os.getpid()}")
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()  # nothing left; wait for SIGTERM
            continue
        if pid == peer:
            _write(folder / "exit", str(os.waitstatus_to_exitcode(status)))


def _become_peer(job: dict[str, Any], libc: ctypes.CDLL) -> None:
    """In the freshly forked peer: its own session, signals, output, environment and random numbers."""
    libc.prctl(PR_SET_PDEATHSIG, 0)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job["network"]:
        with open(f"/run/netns/{job['network']}", encoding="ascii") as network:
            if libc.setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    os.chdir(job["folder"])
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(os.path.join(job["folder"], "output.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for name, value in job["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    random.seed()
    importlib.import_module("numpy").random.seed()
    if job.get("argv"):
        os.execvpe(job["argv"][0], job["argv"], os.environ)
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, for a reader that polls."""
    path.with_suffix(".tmp").write_text(text, encoding="ascii")
    path.with_suffix(".tmp").rename(path)


def _kill_all_below() -> None:
    me = os.getpid()
    deadline = time.monotonic() + 10
    while (below := _not_torchs(descendants(me))) and time.monotonic() < deadline:
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    os._exit(0 if not below else 1)


def _not_torchs(pids: list[int]) -> list[int]:
    """All but torch's manager of shared memory: it goes by itself after the others, and cleans up what they left."""
    others = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() != "torch_shm_manager"[:15]:
                others.append(pid)
            else:
                os.kill(pid, signal.SIGCONT)  # it may be frozen
    return others


def descendants(root: int) -> list[int]:
    """Pids of all processes below ``root``, zombies left out."""
    children: dict[int, list[int]] = {}
    alive = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (
                Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
            children.setdefault(int(fields[1]), []).append(int(entry))
            if fields[0] not in "ZX":
                alive.add(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += [pid for pid in below if pid in alive]
    return found


def main() -> None:
    job = serve(sys.argv[1])
    if job is None:
        return
    sys.argv = [str(part) for part in job.get("sys_argv", ["peer"])]
    module, _, function = job["entry"].partition(":")
    if not function:
        import runpy

        runpy.run_path(module, run_name="__main__")
    else:
        getattr(importlib.import_module(module), function)(job["folder"])


if __name__ == "__main__":
    main()
