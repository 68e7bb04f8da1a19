"""The end that hands its gradient over: to whom, how far it is, what becomes of it.

A gradient is handed over once: if it is not known whether the other one has it, it counts as lost.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_hivemind.engine.native.carrying.papers import Offered, Receipt, write_offer
from lightning_hivemind.engine.native.chunks import send_values
from lightning_hivemind.engine.native.codecs import ChunkCodec
from lightning_hivemind.engine.native.exchange import encoded_bytes
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import Head, PeerId, rank
from lightning_hivemind.engine.native.seam import Outcome, Parcel, Training
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.engine.native.wire.links import Links

log = logging.getLogger("lightning_hivemind")

#: how often to ask how far a parcel is, once nothing of it waits to be sent
ASK_AGAIN_S = 0.5
#: a peer that does not answer for so long carries nothing
ANSWER_S = 5.0
#: who has refused is not asked again for so long
REFUSED_S = 30.0
#: a line that was too slow for anything is tried after so long all the same: it is measured while much is sent, and may
#: have been slow for a while only
TRY_S = 30.0


@dataclass(slots=True)
class _UnderWay:
    """``token``: see :class:`.papers.Receipt`; None until the first one. ``sent``: not only offered."""

    number: bytes
    to: PeerId
    parcel: Parcel
    began: float
    heard_at: float
    asked_at: float
    offered: Offered
    token: bytes | None = None
    sent: bool = False


class Sender:
    """See the module. Used by the rounds' thread."""

    def __init__(
        self,
        links: Links,
        training: Training,
        me: PeerId,
        heads: Callable[[], tuple[Head, ...]],
        layout: Layout,
        codecs: Sequence[ChunkCodec],
        memory: Memory,
    ) -> None:
        self._links, self._training, self._me, self._layout = links, training, me, layout
        self._heads = heads
        self._codecs, self._memory = codecs, memory
        self._size_bytes = encoded_bytes(layout, codecs)
        self._under_way: _UnderWay | None = None
        self._refused: dict[PeerId, float] = {}
        #: since when nothing is under way
        self._idle_since: float | None = None

    @property
    def busy(self) -> bool:
        """Whether it is not known yet what becomes of something."""
        return self._under_way is not None

    @property
    def takes_s(self) -> float:
        """How long this peer's line takes for a gradient."""
        return self._size_bytes / self._links.upload_rate

    def carriers(self, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        """Those of these peers that can be asked, in this peer's own order: so each slow one has another."""
        self._refused = {peer: at for peer, at in self._refused.items() if now - at < REFUSED_S}
        found = [peer for peer in peers if peer not in self._refused]
        return sorted(found, key=lambda peer: rank(self._me, 0, peer))

    def look(self, carriers: Sequence[PeerId], now: float) -> None:
        """Begin, if there is something to hand over and somebody who may take it; ask how far it is."""
        if self._under_way is None and carriers:
            self._idle_since = now if self._idle_since is None else self._idle_since
            parcel = self._training.hand_over(self.takes_s if now - self._idle_since < TRY_S else 0.0)
            if parcel is not None:
                number = secrets.token_bytes(16)
                offered = Offered(parcel.samples, parcel.epoch, parcel.until, self._heads())
                self._under_way = _UnderWay(
                    number, carriers[0], parcel, now, heard_at=now, asked_at=now, offered=offered
                )
                self._ask(self._under_way, now)
        elif (one := self._under_way) is not None:
            self._training.hands_over_in(max(0.0, one.began + self.takes_s - now), self.takes_s)
            if self._training.too_old(one.parcel.until):
                arrived = one.sent and not self._links.sends(one.number)  # and was taken, perhaps
                self._end(one, Outcome.LOST if arrived else Outcome.TOO_OLD, now)
            elif self._links.sends(one.number):
                one.heard_at = now  # what it says comes after that
            elif now - one.heard_at > ANSWER_S:
                self._refused[one.to] = now
                self._end(one, self._unknown(one), now)
            elif now - one.asked_at > ASK_AGAIN_S:
                self._ask(one, now)

    def answered(self, peer: PeerId, number: bytes, receipt: Receipt, now: float) -> None:
        """A receipt has come."""
        one = self._under_way
        if one is None or (one.number, one.to) != (number, peer):
            return
        one.heard_at = now
        if one.token not in (None, receipt.token):
            self._end(one, self._unknown(one), now)  # it has started again
            return
        one.token = receipt.token
        if receipt.refused:
            log.debug("peer %s does not carry this peer's gradient: %s", peer, receipt.refused)
            if not receipt.too_old:
                self._refused[peer] = now
            self._end(one, Outcome.TOO_OLD if receipt.too_old else Outcome.BACK, now)
        elif not receipt.missing:
            self._end(one, Outcome.TAKEN, now)
        elif not self._links.sends(number):
            self._send(one, receipt.missing)

    def suspended(self, now: float) -> None:
        """This process stood still until now: what was answered meanwhile is still to be read."""
        if self._under_way is not None:
            self._under_way.heard_at = now

    def lost(self, peer: PeerId, now: float) -> None:
        """There is no connection to it. What may be there is asked for a while longer: the line may be back soon."""
        if (one := self._under_way) is not None and one.to == peer and not one.sent:
            self._end(one, Outcome.BACK, now)

    def _unknown(self, one: _UnderWay) -> Outcome:
        """What became of it, as far as can be said."""
        return Outcome.LOST if one.sent else Outcome.BACK

    def _ask(self, one: _UnderWay, now: float) -> None:
        one.asked_at = now
        data = write_offer(one.offered)
        self._links.send(one.to, Header(kind=Kind.OFFERED, round=one.number, length=len(data)), (data,))

    def _send(self, one: _UnderWay, chunks: Collection[int]) -> None:
        one.sent = True
        for chunk in chunks:
            data = self._codecs[chunk].encode(one.parcel.values[self._layout.span(chunk)], self._memory)
            send_values(self._links, one.to, Kind.PARCEL, one.number, chunk, data)

    def _end(self, one: _UnderWay, outcome: Outcome, now: float) -> None:
        self._under_way, self._idle_since = None, now
        self._links.forget(one.number)
        self._training.handed_over(one.to, one.parcel, outcome, now - one.began)
