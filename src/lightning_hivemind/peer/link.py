"""Messages between two processes of one peer, over a socket: each has its length before it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16


class Link:
    """One end.

    Args:
        joined: connected; its own from now on.
        patience_s: how long :meth:`receive` waits, more than 0.
    """

    def __init__(self, joined: socket.socket, patience_s: float) -> None:
        joined.settimeout(None)
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = int(patience_s)
        limit = struct.pack("ll", seconds, int((patience_s - seconds) * 1e6))
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # so a message costs one call of the system
        self._socket, self._come = joined, bytearray()

    def send(self, messages: Sequence[bytes]) -> None:
        """All at once. Raises OSError."""
        self._socket.sendall(b"".join(part for one in messages for part in (_LENGTH.pack(len(one)), one)))

    def receive(self) -> bytes | None:
        """The next one; None if it has not come yet. Ends with Ctrl+C.

        Raises:
            EOFError: nothing comes any more.
            OSError: the same.
        """
        while (message := self._taken()) is None:
            try:
                read = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            if not read:
                raise EOFError("the other end has closed")
            self._come += read
        return message

    def has_ended(self) -> bool:
        """Whether the other end has said all; does not wait."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def say_no_more(self) -> None:
        """The other end hears that nothing comes any more, and can be heard. Raises OSError."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()

    def _taken(self) -> bytes | None:
        """The first of what has come, if it is whole."""
        begin = _LENGTH.size
        if len(self._come) < begin:
            return None
        end = begin + _LENGTH.unpack_from(self._come)[0]
        if len(self._come) < end:
            return None
        message = bytes(self._come[begin:end])
        del self._come[:end]
        return message
