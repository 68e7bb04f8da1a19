"""What is known of one download while it goes on: who was asked, who has what, which ranges are here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_hivemind.engine.native.protocol.lineage import PeerId
from lightning_hivemind.engine.native.state.snapshot import Description
from lightning_hivemind.errors import StateError

#: in the order in which they are to be asked, as of now
Donors = Callable[[], Sequence[PeerId]]


@dataclass(slots=True)
class Attempt:
    """See the module. Connections' threads use it, too, under the lock, but for what only the training thread has."""

    number: bytes
    #: whom to ask, and who was; only the training thread
    donors: Donors
    met: set[PeerId] = field(default_factory=set)
    #: when each has said that it has nothing now; how many have described what they have
    empty: dict[PeerId, float] = field(default_factory=dict)
    answers: int = 0
    #: when somebody was asked for the first time, last
    asked_at: float = -math.inf
    #: when each was asked for its description last, which has not come
    asked: dict[PeerId, float] = field(default_factory=dict)
    #: descriptions that have come and were not yet read
    described: dict[PeerId, memoryview] = field(default_factory=dict)
    #: what those have that have described it, so that they keep a copy until they hear that this has ended
    offers: dict[PeerId, Description] = field(default_factory=dict)
    #: what was wrong with what somebody sent
    problem: StateError | None = None
    #: that is being fetched
    chosen: Description | None = None
    is_enough: bool = False
    missing: list[int] = field(default_factory=list)
    #: which ranges each may write now, and when it was asked for them; how many at a time
    expected: dict[PeerId, dict[int, float]] = field(default_factory=dict)
    window: dict[PeerId, int] = field(default_factory=dict)
    #: those that have come, and from whom; how many were not found to be right yet
    unchecked: list[tuple[PeerId, int, memoryview]] = field(default_factory=list)
    left: int = 0
    #: when anything came of each last, and when something of this download did, or was asked for
    moved_at: dict[PeerId, float] = field(default_factory=dict)
    came_at: dict[PeerId, float] = field(default_factory=dict)
    #: something has come, or somebody has gone, since the training thread looked
    news: bool = False

    @property
    def spare(self) -> list[PeerId]:
        """Those still to be asked."""
        return [donor for donor in self.donors() if donor not in self.met]

    def forget_empty(self, before: float) -> None:
        """Who had nothing by then may be asked again."""
        for donor in [donor for donor, at in self.empty.items() if at <= before]:
            del self.empty[donor]
            self.met.discard(donor)

    def drop(self, donor: PeerId) -> None:
        """It has nothing, or has gone, or lies."""
        self.asked.pop(donor, None)
        self.offers.pop(donor, None)
        self.missing += sorted(self.expected.pop(donor, ()))
        self.news = True
