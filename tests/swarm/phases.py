"""Moments of a round of ``engine="native"`` at which a peer can be made to die, each hit exactly.

``swarm.phases:dies`` is a scenario: it trains, and once there is a file ``die`` in the peer's folder, the first round
with three members in which the moment named by ``spec.free["dies"]`` comes is its last.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_hivemind.engine.native import parts
from lightning_hivemind.engine.native.driver import Driver
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.protocol import actions, messages
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links
from swarm.spec import PeerSpec

#: parameters of a chunk: the small model of the tests has some twenty of them
CHUNK_ELEMENTS = 16
#: for what was just sent to be on its way
SENT_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Before ``what`` is done (by its name: an action, a message or a frame) for the ``count``-th time in a round."""

    what: str
    count: int = 1


#: role and phase: what the peer was about to do
MOMENTS = {
    "member, called": Moment(what="Join"),
    "member, with the plan": Moment(what="INPUT"),
    "member, has given one chunk": Moment(what="INPUT", count=2),
    "owner, with all inputs": Moment(what="Reduce"),
    "owner, has averaged": Moment(what="RESULT"),
    "owner, one other has a result": Moment(what="RESULT", count=2),
    "member, has all results": Moment(what="Done"),
    "member, has said so": Moment(what="Apply"),
    "coordinator, a round is due": Moment(what="Call"),
    "coordinator, has called one": Moment(what="Call", count=2),
    "coordinator, has a plan": Moment(what="Begin"),
    "coordinator, one other has the plan": Moment(what="Begin", count=2),
    "coordinator, has decided": Moment(what="Committed"),
    "coordinator, one other knows": Moment(what="Committed", count=2),
}


class Fuse:
    """Counts what is done in each round, and ends the process at the moment."""

    def __init__(self, moment: Moment, lit: Callable[[], bool]) -> None:
        self._moment, self._lit = moment, lit
        self._seen: dict[bytes, int] = {}

    def about_to(self, what: str, round_id: bytes) -> None:
        if what != self._moment.what or not self._lit():
            return
        self._seen[round_id] = self._seen.get(round_id, 0) + 1
        if self._seen[round_id] == self._moment.count:
            if self._moment.count > 1:
                time.sleep(SENT_S)
            os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: Moment, lit: Callable[[], bool]) -> None:
    """Have this process die at that moment, once ``lit``."""
    fuse, do, send = Fuse(moment, lit), Driver._do, Links.send

    def watched_do(driver: Driver, action: actions.Action) -> None:
        match action:
            case actions.Send(message=messages.Begin(plan=plan)):
                fuse.about_to("Begin", plan.round)
            case actions.Send(message=messages.Committed(commit=commit)) | actions.Apply(commit=commit):
                fuse.about_to(type(getattr(action, "message", action)).__name__, commit.round)
            case actions.Send(message=message):
                fuse.about_to(type(message).__name__, getattr(message, "round", b""))
            case actions.Reduce(round=round_id):
                fuse.about_to("Reduce", round_id)
        do(driver, action)

    def watched_send(links: Links, peer: str, header: Header, *more: Any) -> None:
        if header.kind in (Kind.INPUT, Kind.RESULT):
            fuse.about_to(header.kind.name, header.round)
        send(links, peer, header, *more)

    Driver._do, Links.send = watched_do, watched_send  # type: ignore[method-assign]


def use_chunks_of(elements: int) -> None:
    """So few, in this process, that every member owns some chunks of a small model."""
    parts.layout_of = partial(Layout, chunk_elements=elements)  # type: ignore[assignment]


def trains(spec: PeerSpec) -> None:
    """Train in small chunks."""
    use_chunks_of(CHUNK_ELEMENTS)
    from swarm.peer_main import train

    train(spec)


def dies(spec: PeerSpec) -> None:
    """See the module."""
    arm(MOMENTS[spec.free["dies"]], (Path(spec.folder) / "die").exists)
    trains(spec)
