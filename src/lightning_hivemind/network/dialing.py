"""Have the libp2p daemon connect to a peer whose addresses are known, where its own routing does not find it.

Addresses are written here as the daemon reads them: hivemind's ``Multiaddr`` writes a peer's id as a CID, which it
refuses ("length greater than remaining number of bytes in buffer").
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

_P2P_CODE = b"\xa5\x03"  # 421 as a varint (https://github.com/multiformats/multiaddr/blob/master/protocols.csv)


async def dial(p2p: P2P, peer: str, addresses: Iterable[str]) -> None:
    """Connect the daemon to ``peer``. (hivemind's own call leaves its descriptor open where it is cancelled.)

    Raises:
        ConnectionError: an address is none, or nobody with this id answers at any of them.
    """
    try:
        asked = p2pd_pb2.ConnectRequest(peer=PeerID.from_base58(peer).to_bytes(), addrs=map(encode, addresses))
    except ValueError as error:
        raise ConnectionError(f"an address of it that is none: {error}") from None
    answer = p2pd_pb2.Response()
    reader, writer = await p2p._client.control.daemon_connector.open_connection()  # no public way
    try:
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=asked))
        await read_pbmsg_safe(reader, answer)
        raise_if_failed(answer)
    except ControlFailure as error:
        raise ConnectionError(in_one_line(str(error))) from None
    finally:
        writer.close()


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
