"""The round that this peer goes to, and what came of it before its plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_hivemind.engine.native.protocol.lineage import PeerId
from lightning_hivemind.engine.native.protocol.messages import Call, RoundId
from lightning_hivemind.engine.native.protocol.plan import Offer


@dataclass(kw_only=True, slots=True)
class Joined:
    """See the module.

    ``since``: when its coordinator called to it, or to one before that it did not begin. ``heard_at``: when the
    coordinator spoke of it last. ``askers`` have lost it and want to hear how the round ends. ``early`` inputs and
    results have overtaken the plan, ``next_call`` the commit.
    """

    round: RoundId
    coordinator: PeerId
    since: float
    heard_at: float
    resend_at: float
    offer: Offer | None = None
    askers: set[PeerId] = field(default_factory=set)
    early: set[tuple[int, PeerId]] = field(default_factory=set)
    early_results: dict[int, tuple[int, bytes, PeerId]] = field(default_factory=dict)
    next_call: tuple[PeerId, Call] | None = None
