"""Faults that a peer of a swarm test brings upon itself, at a moment that cannot be hit from outside."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from hivemind.compression import NoCompression

from lightning_hivemind.engine.native.codecs.floating import ScaledFloat16
from swarm.spec import PeerSpec


class DiesInARound(NoCompression):  # type: ignore[misc]  # hivemind has no types
    """Sends values as they are, until the test touches ``die`` in the peer's folder: then it kills the trainer.

    Values are encoded in the averager's process once a group has formed, so the peer dies in the middle of a round,
    before it has sent any value of its own (it may already have averaged some of the other peer's).
    """

    def __init__(self, folder: str) -> None:
        self._die, self._trainer = Path(folder, "die"), os.getpid()

    def compress(self, *args: Any, **kwargs: Any) -> Any:
        if self._die.exists():
            os.kill(self._trainer, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compress(*args, **kwargs)


def cannot_encode(spec: PeerSpec) -> None:
    """Trains; once there is a file ``fail`` in the peer's folder, Float16 cannot encode anything any more."""
    _codec_fails(spec, "encode")


def cannot_decode(spec: PeerSpec) -> None:
    """The same with what others have encoded."""
    _codec_fails(spec, "decode")


def _codec_fails(spec: PeerSpec, name: str) -> None:
    method, fail = getattr(ScaledFloat16, name), Path(spec.folder, "fail")

    def called(codec: ScaledFloat16, *args: Any) -> Any:
        if fail.exists():
            raise ValueError(f"induced: cannot {name}")
        return method(codec, *args)

    setattr(ScaledFloat16, name, called)
    from swarm.peer_main import train

    train(spec)
