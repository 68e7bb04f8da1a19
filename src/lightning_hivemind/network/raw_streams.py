"""libp2p streams as plain sockets: the last way to a peer that only its libp2p daemon gets through to.

The daemon gets through routers (by hole punching, or the one port that somebody has forwarded); what it carries between
two peers comes out of a unix socket at either end. The protocol is that of go-libp2p-daemon
(https://github.com/libp2p/go-libp2p-daemon/blob/master/specs/CONTROL.md): messages after a varint of their length, then
the stream's bytes. hivemind's own client does the same for asyncio only.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

log = logging.getLogger("lightning_hivemind")
M = TypeVar("M", bound=Message)

#: of what the daemon says before the stream's own bytes
MAX_MESSAGE_BYTES = 1 << 16
ANSWER_S, GOODBYE_S = 5.0, 0.5
_SOCKET = "streams.sock"


class RawStreams:
    """Opens streams to other peers, and accepts theirs. One per peer and protocol; any thread may open.

    Args:
        daemon: the unix socket on which the daemon is controlled.
        directory: private, short; a socket is made in it.
        protocol: what both ends call these streams.
        taken: gets each accepted stream, which it must close; must return quickly.
    """

    def __init__(self, daemon: Path, directory: Path, protocol: str, taken: Callable[[socket.socket], None]) -> None:
        self._daemon, self._path, self._protocol, self._taken = daemon, directory / _SOCKET, protocol, taken
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Accept streams from now on. Raises OSError if the daemon does not answer."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.settimeout(None)  # whatever socket.setdefaulttimeout() was told
        try:
            listener.bind(str(self._path))
            listener.listen(128)
            self._control(self._handler())[0].close()
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="accepts streams", daemon=True).start()

    def open(self, peer: str, timeout_s: float) -> socket.socket:
        """A stream to ``peer``, to which the daemon has a connection or knows a way.

        Raises:
            OSError: there is none within ``timeout_s``, or that peer accepts no such streams, or only through a relay
                peer: those cut a connection after 128 KiB by default.
        """
        request = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(), proto=[self._protocol], timeout=max(1, round(timeout_s))
        )
        sock, answer = self._control(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), timeout_s)
        if not answer.HasField("streamInfo") or _is_relayed(answer.streamInfo.addr):
            sock.close()
            raise ConnectionError("libp2p reaches it through a relay only, which does not carry gradients")
        return sock

    def close(self) -> None:
        """Accept no more; those that are open stay. Safe to call twice."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):  # the daemon has ended: nobody comes any more
            self._control(self._handler(removed=True), GOODBYE_S)[0].close()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._listener is None:
                    return
                log.warning("a libp2p stream could not be accepted: %s", error)  # too many open files
                time.sleep(0.5)
                continue
            try:
                sock.settimeout(ANSWER_S)
                _receive(sock, p2pd_pb2.StreamInfo)  # whose it is, whoever takes it has to find out by itself
                self._taken(sock)
            except Exception as error:
                log.warning("a libp2p stream was closed: %s", error)
                sock.close()

    def _handler(self, *, removed: bool = False) -> p2pd_pb2.Request:
        address = Multiaddr(f"/unix{self._path}").to_bytes()
        if removed:
            old = p2pd_pb2.RemoveStreamHandlerRequest(addr=address, proto=[self._protocol])
            return p2pd_pb2.Request(type=p2pd_pb2.Request.REMOVE_STREAM_HANDLER, removeStreamHandler=old)
        new = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[self._protocol], balanced=False)
        return p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=new)

    def _control(
        self, request: p2pd_pb2.Request, timeout_s: float = ANSWER_S
    ) -> tuple[socket.socket, p2pd_pb2.Response]:
        """Ask the daemon on a connection of its own, which is the stream afterwards if one was asked for."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(self._daemon))
            data = request.SerializeToString()
            sock.sendall(_varint(len(data)) + data)
            answer = _receive(sock, p2pd_pb2.Response)
            if answer.type != p2pd_pb2.Response.OK:
                raise ConnectionError(f"libp2p: {answer.error.msg}")
        except BaseException:
            sock.close()
            raise
        return sock, answer


def _is_relayed(address: bytes) -> bool:
    """Whether this multiaddress, as the daemon writes it, leads through another peer."""
    try:
        return "/p2p-circuit" in str(Multiaddr(address))
    except ValueError:
        return True  # whatever it is, it is no plain connection


def _varint(number: int) -> bytes:
    data = bytearray()
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _receive(sock: socket.socket, kind: type[M]) -> M:
    """One message, and not a byte more: what follows is the stream's. Raises OSError if it is none."""
    length = shift = 0
    while True:
        (byte,) = _exactly(sock, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > MAX_MESSAGE_BYTES or shift > 28:
            raise ConnectionError(f"the libp2p daemon announces a message of more than {MAX_MESSAGE_BYTES} bytes")
        if not byte & 0x80:
            break
    message: M = kind()
    try:
        message.ParseFromString(_exactly(sock, length))
    except DecodeError as error:
        raise ConnectionError(f"the libp2p daemon's answer cannot be understood: {error}") from None
    return message


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the libp2p daemon has closed the connection")
        data += part
    return data
