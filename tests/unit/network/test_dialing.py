"""Addresses as the libp2p daemon reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from lightning_hivemind.network.dialing import dial, encode, in_one_line

PEER = "12D3KooWKqmwm5m8ASfxZjnXdhmWSzUgT21rXrCkf4H2dxpJhCY8"
#: an ed25519 key as libp2p writes it: an identity multihash of 36 bytes
PEER_BYTES = bytes.fromhex("0024080112 2094f15576e30a975a844078731ac3c6187ce473d9de0a6052288d02a66a4d2309")
IPV4 = bytes.fromhex("04 01020304 06 0050")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("/ip4/1.2.3.4/tcp/80", IPV4),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}", IPV4 + b"\xa5\x03\x26" + PEER_BYTES),
        (
            f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
            IPV4 + b"\xa5\x03\x26" + PEER_BYTES + b"\xa2\x02" + b"\xa5\x03\x26" + PEER_BYTES,
        ),
    ],
)
def test_an_address_is_written_as_its_specification_says(text: str, data: bytes) -> None:
    assert encode(text) == data


@pytest.mark.parametrize("text", ["x", "/p2p/", "/foo/1", "/ip4/1.2.3.4/tcp/99999", "/ip4/1.2.3.4/p2p/!!"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        encode(text)


def test_a_dial_that_is_given_up_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon answers once libp2p has given up, too, which takes longer."""

    monkeypatch.chdir(tmp_path)  # a unix socket's path is short

    async def run() -> None:
        ended, path = asyncio.Event(), "control"

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            ended.set()
            writer.close()

        server = await asyncio.start_unix_server(silent, path)
        connector = SimpleNamespace(open_connection=lambda: asyncio.open_unix_connection(path))
        p2p: Any = SimpleNamespace(_client=SimpleNamespace(control=SimpleNamespace(daemon_connector=connector)))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(dial(p2p, PEER, ["/ip4/1.2.3.4/tcp/80"]), 0.2)
        await asyncio.wait_for(ended.wait(), 30.0)
        server.close()

    asyncio.run(run())


def test_a_failed_attempt_is_told_in_one_line() -> None:
    answer = (
        "Connect failed. msg=failed to dial: all dials failed\n  * [/ip6/::1/tcp/42399] dial backoff"
        "\n  * [/ip4/10.77.1.2/tcp/41105] connection refused\n  * [/ip4/127.0.0.1/tcp/41105] dial backoff"
    )
    assert in_one_line(answer) == "libp2p does not get through (/ip4/10.77.1.2/tcp/41105: connection refused)"
    assert in_one_line("[/ip6/::1/tcp/1] no") == "libp2p does not get through (/ip6/::1/tcp/1: no)"
    assert in_one_line("Connect failed.\nno addresses") == "libp2p does not get through (Connect failed. no addresses)"
