"""How fast bytes go between two machines: one listens, the other measures each way for a moment."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from lightning_hivemind.errors import ArgumentError

#: how long bytes go each way; how long either end waits for the other one
SECONDS, PATIENCE_S = 2.0, 10.0
_UP, _DOWN, _ECHO, _ECHOES = b"U", b"D", b"E", 5
_CHUNK = bytes(1 << 16)
_COUNTED = struct.Struct("!Qd")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Mbit/s from here and to here, and the time there and back in seconds."""

    up_mbit_s: float
    down_mbit_s: float
    rtt_s: float


def serve(listener: socket.socket) -> None:
    """Answer whoever measures, one after another, until interrupted. A stranger's bytes cost :data:`PATIENCE_S`."""
    while True:
        joined, _ = listener.accept()
        with joined:
            joined.settimeout(PATIENCE_S)
            try:
                _answer(joined)
            except OSError:
                continue  # gone, or silent


def measure(host: str, port: int) -> Line:
    """From here to a machine that listens.

    Raises:
        ArgumentError: it does not, or is something else.
    """
    try:
        with _dialled(host, port, _ECHO) as one:
            rtt_s = min(_echo(one) for _ in range(_ECHOES))
        with _dialled(host, port, _UP) as one:
            _send_for(one, SECONDS)
            one.shutdown(socket.SHUT_WR)
            received, took_s = _COUNTED.unpack(_exactly(one, _COUNTED.size))
        with _dialled(host, port, _DOWN) as one:
            got, seconds = _count(one)
        return Line(up_mbit_s=_mbit_s(received, took_s), down_mbit_s=_mbit_s(got, seconds), rtt_s=rtt_s)
    except (OSError, struct.error) as error:
        raise ArgumentError(
            f"the line to {host}:{port} cannot be measured ({error}). There, start: lightning-hivemind advise"
            f" --listen {port}, and let that port through."
        ) from error


def _answer(joined: socket.socket) -> None:
    what = joined.recv(1)
    if what == _ECHO:
        while byte := joined.recv(1):
            joined.sendall(byte)
    elif what == _UP:
        joined.sendall(_COUNTED.pack(*_count(joined)))
    elif what == _DOWN:
        _send_for(joined, SECONDS)


def _dialled(host: str, port: int, what: bytes) -> socket.socket:
    one = socket.create_connection((host, port), timeout=PATIENCE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.sendall(what)
    return one


def _echo(one: socket.socket) -> float:
    began = time.perf_counter()
    one.sendall(_ECHO)
    _exactly(one, 1)
    return time.perf_counter() - began


def _send_for(one: socket.socket, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        one.sendall(_CHUNK)


def _count(one: socket.socket) -> tuple[int, float]:
    """Bytes that come until the other end has sent all, and in what time."""
    received, began, last = 0, 0.0, 0.0
    deadline = time.perf_counter() + SECONDS + PATIENCE_S
    while (data := one.recv(1 << 20)) and last < deadline:
        last = time.perf_counter()
        began = began or last
        received += len(data)
    return received, last - began


def _exactly(one: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (data := one.recv(size - len(found))):
            raise ConnectionError("the other end has closed the connection")
        found += data
    return found


def _mbit_s(size: int, seconds: float) -> float:
    if seconds <= 0:
        raise ConnectionError("nothing came")
    return 8e-6 * size / seconds
