"""Have the libp2p daemon connect to a peer whose addresses are known, where its own routing does not find it.

Addresses are written here as the daemon reads them: hivemind's ``Multiaddr`` writes a peer's id as a CID, which it
refuses ("length greater than remaining number of bytes in buffer").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

_P2P_CODE = b"\xa5\x03"  # 421 as a varint (https://github.com/multiformats/multiaddr/blob/master/protocols.csv)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Stands in for a ``Multiaddr``."""

    data: bytes

    def to_bytes(self) -> bytes:
        return self.data


async def dial(p2p: P2P, peer: str, addresses: Iterable[str]) -> None:
    """Connect the daemon to ``peer``.

    Raises:
        ConnectionError: an address is none, or nobody with this id answers at any of them.
    """
    try:
        encoded = [_Encoded(encode(address)) for address in addresses]
        await p2p._client.connect(PeerID.from_base58(peer), encoded)  # no public way
    except ValueError as error:
        raise ConnectionError(f"an address of it that is none: {error}") from None
    except ControlFailure as error:
        raise ConnectionError(in_one_line(str(error))) from None


def in_one_line(answer: str) -> str:
    """What libp2p says of an attempt, in a line for each address; those that only the other machine has left out."""
    tried = re.findall(r"\[(\S+)\] (.+)", answer)
    tried = [one for one in tried if not one[0].startswith(("/ip4/127.", "/ip6/::1/"))] or tried
    why = "; ".join(f"{address}: {reason.strip()}" for address, reason in tried) or " ".join(answer.split())
    return f"libp2p does not get through ({why})"


def encode(address: str) -> bytes:
    """A multiaddress in bytes. Raises ValueError if it is none."""
    between_ids = re.split(r"/p2p/([^/]+)", address)  # every second one is an id
    return b"".join(_id(part) if index % 2 else _path(part) for index, part in enumerate(between_ids))


def _id(peer: str) -> bytes:
    data: bytes = PeerID.from_base58(peer).to_bytes()
    return _P2P_CODE + bytes([len(data)]) + data


def _path(text: str) -> bytes:
    encoded: bytes = Multiaddr(text).to_bytes() if text else b""
    return encoded
