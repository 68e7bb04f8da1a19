"""The tensors of one round at one peer: what it gives, what others give it to reduce, what comes of it.

No thread, no socket: the driver calls it, and puts the memory that it names under the connections.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hivemind.engine.native.codecs.base import ChunkCodec, Exact, memory_of, view_of
from lightning_hivemind.engine.native.early import EarlyRoom
from lightning_hivemind.engine.native.host import host_floats
from lightning_hivemind.engine.native.layout import Layout
from lightning_hivemind.engine.native.memory import Memory
from lightning_hivemind.engine.native.protocol.lineage import Commit, Contribution, PeerId
from lightning_hivemind.engine.native.protocol.plan import MOST_VERSIONS, Plan
from lightning_hivemind.engine.native.wire.checksum import checksum
from lightning_hivemind.errors import WireError


class UnusableInput(Exception):
    """What a peer gave cannot be averaged."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer, self.reason = peer, reason


class Exchange:
    """See the module.

    Args:
        codecs: one for each chunk.
        given: float32 CPU (elements,), this peer's contribution; unchanged here, and must stay so until the round ends.
            None: it gives nothing.

    Attributes:
        result: float32 CPU (elements,), where the average is put; its own memory, so that an aborted round leaves
            ``given`` whole. See :meth:`end`.
        handed_over: ``time.monotonic()`` of the last chunk that each other peer was sent.
    """

    def __init__(
        self,
        layout: Layout,
        codecs: Sequence[ChunkCodec],
        me: PeerId,
        given: Tensor | None,
        memory: Memory | None = None,
    ) -> None:
        self._layout, self._codecs, self._me, self._memory = layout, codecs, me, memory or Memory()
        self._given, self.result = given, self._memory.floats(layout.elements)
        #: what goes over connections is the result's own memory, some of it
        self._is_sent = any(isinstance(codec, Exact) for codec in codecs)
        self.handed_over: dict[PeerId, float] = {}
        self._plan: Plan | None = None
        self._lock = threading.Lock()
        self._inputs: dict[tuple[int, PeerId], memoryview] = {}
        #: for what may come before the version of the plan that it belongs to: there is one encoded gradient of
        #: inputs, and one of results, in all, shared out among the owners
        size_bytes = encoded_bytes(layout, codecs)
        self._early_inputs, self._early_outputs = (EarlyRoom(self._memory, size_bytes) for _ in range(2))
        #: such results, with their version, and who sent them
        self._early_results: dict[int, tuple[int, PeerId, memoryview]] = {}
        self._reduced: dict[int, tuple[memoryview, int]] = {}
        #: places in ``result`` that connections were given, and are not known to have done with; chunks of it that
        #: one was given, or that are there
        self._lent = 0
        self._written: set[int] = set()
        self._ended = False
        #: versions of the results that are here
        self._taken: dict[int, int] = {}
        #: what codecs have left out of this peer's contribution, and of the averages of chunks that it has reduced
        self._leaves_out = any(codec.leaves_out for codec in codecs)
        self._unsent = self._memory.scratch(layout.elements if self._leaves_out else 0).zero_()
        self._unsaid: dict[int, Tensor] = {}

    def begin(self, plan: Plan) -> None:
        """The plan, or a newer version of it.

        A newer version gets memory of its own: what still arrives for the older one, or is still being sent of it, does
        not get in its way.
        """
        result, known = self.result, [chunk for chunk, since in enumerate(plan.since) if since < plan.version]
        if self._plan is not None:
            result = self._memory.floats(self._layout.elements)
            for span in map(self._layout.span, known):
                result[span] = self.result[span]
        early = self._early_results
        with self._lock:  # at once: what a connection reads for the plan before never lands here
            self._plan, self.result, self._lent = plan, result, 0
            self._written = {
                *known,
                *(chunk for chunk, (version, peer, _) in early.items() if plan.wants(chunk, version, peer)),
            }
            self._early_results = {}
            self._early_inputs.renew()
            self._early_outputs.renew()
        for chunk, (version, peer, data) in early.items():
            self.take(chunk, version, peer, data)

    @property
    def gives(self) -> bool:
        """Whether this peer offered a contribution."""
        return self._given is not None

    @property
    def counts(self) -> bool:
        """Whether its contribution is in the plan."""
        return self._plan is not None and self._me in self._plan.contributors

    @property
    def begun(self) -> bool:
        """Whether there was a plan."""
        return self._plan is not None

    # ------------------------------------------------------------------ what this peer gives

    def input(self, chunk: int) -> memoryview:
        """This peer's contribution to a chunk, encoded."""
        assert self._given is not None, "this peer has nothing to give in this round"
        span, codec = self._layout.span(chunk), self._codecs[chunk]
        data = codec.encode(self._given[span], self._memory)
        if codec.leaves_out:
            rest = self._unsent[span]
            codec.decode(data, rest)
            torch.sub(self._given[span], rest, out=rest)
        return data

    def keep_own(self, chunk: int) -> None:
        """This peer reduces the chunk itself, with what it gives as it is: nobody has to send it."""
        if self._codecs[chunk].leaves_out:
            self._unsent[self._layout.span(chunk)].zero_()  # it may have been encoded for an owner of before

    # ------------------------------------------------------------------ what others give

    def room_for_input(self, chunk: int, peer: PeerId, length: int) -> memoryview | None:
        """Memory for an input of a chunk that this peer reduces; None if it is not wanted (any more).

        Raises:
            WireError: there can be no such input.
        """
        check_length(self._layout, self._codecs, chunk, length)
        plan = self._plan
        if (chunk, peer) in self._inputs:
            return None  # sent again though it was here
        if plan is not None and peer not in plan.contributors:
            return None
        if plan is None or plan.owners[chunk] != self._me:  # its sender may know a newer one, by which it is
            return self._early_inputs.take(length)
        return memory_of(self._memory.bytes(length))

    def keep(self, chunk: int, peer: PeerId, data: memoryview) -> None:
        self._inputs[chunk, peer] = data

    def reduce(self, chunk: int, contributions: Sequence[Contribution]) -> None:
        """Average a chunk over these, weighted by samples, in this order; encode it once.

        Raises:
            UnusableInput: an input holds a value that is not finite, or the sum would. It is not used.
        """
        size, total = self._layout.size(chunk), sum(one.samples for one in contributions)
        target = self.result[self._layout.span(chunk)]
        codec = self._codecs[chunk]
        room = self._memory.scratch(0 if isinstance(codec, Exact) else size)
        for number, one in enumerate(contributions):
            values, weight = self._values(chunk, one.peer, room), one.samples / total
            if number == 0:
                torch.mul(values, weight, out=target)
            else:
                target.add_(values, alpha=weight)
        if not finite(target):  # as soon as one input is not, or their sum overflows
            self._refuse(chunk, contributions)
        average = self._memory.scratch(size).copy_(target) if codec.leaves_out else target
        data = codec.encode(target, self._memory)
        self._reduced[chunk] = data, checksum(data)
        codec.decode(data, target)  # what the others will have
        if codec.leaves_out:
            self._unsaid[chunk] = average.sub_(target)

    def _values(self, chunk: int, peer: PeerId, room: Tensor) -> Tensor:
        """What that peer gives to a chunk, where it lies, or decoded into ``room``."""
        if peer == self._me:
            assert self._given is not None, "this peer has nothing to give in this round"
            return self._given[self._layout.span(chunk)]
        data, codec = self._inputs[chunk, peer], self._codecs[chunk]
        if isinstance(codec, Exact):
            return view_of(data, torch.float32)
        codec.decode(data, room)
        return room

    def _refuse(self, chunk: int, contributions: Sequence[Contribution]) -> None:
        room = host_floats(self._layout.size(chunk))
        for one in contributions:
            if not finite(self._values(chunk, one.peer, room)):
                raise UnusableInput(one.peer, "its gradient has values that are not finite")
        raise UnusableInput(contributions[-1].peer, "with its gradient the sum is more than float32 can hold")

    # ------------------------------------------------------------------ what comes of it

    def reduced(self, chunk: int) -> tuple[memoryview, int]:
        """A chunk that this peer has reduced, encoded, and its checksum."""
        return self._reduced[chunk]

    def room_for_result(self, chunk: int, version: int, peer: PeerId, length: int) -> memoryview | None:
        """Memory for a reduced chunk: the result's own where the codec allows it; None if it is void.

        Raises:
            WireError: there can be no such result.
        """
        check_length(self._layout, self._codecs, chunk, length)
        with self._lock:
            plan = self._plan
            if self._ended or version > MOST_VERSIONS:
                return None
            if plan is not None and version <= plan.version:
                if not plan.wants(chunk, version, peer) or self._taken.get(chunk) == version:
                    return None  # (it was sent again though it was here, and its digest has been counted)
                if isinstance(self._codecs[chunk], Exact) and chunk not in self._written:
                    self._written.add(chunk)  # what comes again, damaged perhaps, would be written over it
                    self._lent += 1
                    return memory_of(self.result[self._layout.span(chunk)])
                return memory_of(self._memory.bytes(length))
        return self._early_outputs.take(length)

    def take(self, chunk: int, version: int, peer: PeerId, data: memoryview) -> None:
        """Use a reduced chunk that is in the memory of :meth:`room_for_result`, unless it has become void."""
        if self._plan is None or version > self._plan.version:
            self._early_results[chunk] = version, peer, data
            return
        place = self.result[self._layout.span(chunk)]
        wanted = self._plan.wants(chunk, version, peer)
        with self._lock:
            self._lent -= _is_at(data, place)
            if wanted:
                self._written.add(chunk)
        if wanted:
            self._codecs[chunk].decode(data, place)
            self._taken[chunk] = version

    def end(self, *, sending: bool) -> Tensor:
        """The result, for its new owner to change: nobody reads or writes it any more.

        A copy, if it is still being sent (``sending``), or may still be arriving (a chunk can come twice).
        """
        with self._lock:
            self._ended = True
            if not (sending and self._is_sent) and not self._lent:
                return self.result
        return self._memory.floats(self._layout.elements).copy_(self.result)

    def left_out(self, commit: Commit, *, complete: bool) -> Tensor | None:
        """What is to be added to what this peer gives next, once the round has ended in ``commit``.

        float32 CPU (elements,), a sum over samples: what codecs have left out of its contribution, if that is in the
        commit, and (if its plan was the last one: ``complete``) of the averages that it has sent to all. None if they
        leave out nothing.
        """
        if not self._leaves_out or self._plan is None:
            return None
        mine = sum(one.samples for one in commit.contributions if one.peer == self._me)
        rest = self._unsent.mul_(mine) if mine else self._unsent.zero_()  # (it may not be finite)
        for chunk, unsaid in self._unsaid.items():
            if complete and self._plan.owners[chunk] == self._me:
                rest[self._layout.span(chunk)].add_(unsaid, alpha=commit.samples)
        return rest


def encoded_bytes(layout: Layout, codecs: Sequence[ChunkCodec]) -> int:
    """Of a whole vector."""
    return sum(codec.size_bytes(layout.size(chunk)) for chunk, codec in enumerate(codecs))


def check_length(layout: Layout, codecs: Sequence[ChunkCodec], chunk: int, length: int) -> None:
    """Raises WireError if no chunk with this number has so many bytes, encoded."""
    if chunk >= layout.chunks:
        raise WireError(f"chunk {chunk} of a model that has {layout.chunks}")
    expected = codecs[chunk].size_bytes(layout.size(chunk))
    if length != expected:
        raise WireError(f"{length} bytes for chunk {chunk}, which has {expected}: another model or codec")


def _is_at(data: memoryview, values_N: Tensor) -> bool:
    return len(data) > 0 and view_of(data, torch.uint8).data_ptr() == values_N.data_ptr()


def finite(values_N: Tensor) -> bool:
    """Whether all values are finite; the sum says so at once unless it overflows itself."""
    return bool(torch.isfinite(values_N.sum())) or bool(torch.isfinite(values_N).all())
