"""A peer that takes a state, and its donors, in one process: a post office of threads brings what they say."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.state import questions
from lightning_hivemind.engine.native.state.donor import Donor
from lightning_hivemind.engine.native.state.download import Downloads
from lightning_hivemind.engine.native.state.questions import Done, Question, WantsDescription, WantsRange
from lightning_hivemind.engine.native.state.room import StateMemory
from lightning_hivemind.engine.native.state.snapshot import Description, Snapshot, read_description, take_state
from lightning_hivemind.engine.native.trail import Trail
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.errors import WireError

SILENCE_S = 0.3
RANGE_BYTES = 1000
#: bytes of a state below: so many ranges, the last one shorter
STATE_BYTES, RANGES = 20480, 21
Rogue = Callable[["Office", bytes, Question], None]


def optimizer(seed: int, elements: int = STATE_BYTES // 4) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    return torch.optim.SGD([torch.nn.Parameter(torch.randn(elements))], lr=0.1)


def snapshot(seed: int, samples: int = 100, elements: int = STATE_BYTES // 4) -> Snapshot:
    return take_state(
        optimizer(seed, elements), [], [], Trail(Head(epoch=1, lineage=b"x" * 16, samples=samples))
    ).described()


def read(data: memoryview) -> Description:
    return read_description(data, optimizer(0), [], [])


class Office:
    """Brings questions to donors and frames to the joiner, by one thread for each donor, as connections do.

    A frame that is refused is not read on, as when its connection is closed; later ones come over another.
    """

    def __init__(self) -> None:
        self.downloads = Downloads(self._ask, SILENCE_S, StateMemory())
        self.asked: list[tuple[str, Question]] = []
        self.refused: list[str] = []
        self.passed_by = 0
        self._donors: dict[str, Donor | Rogue] = {}
        self._boxes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}

    def add(self, name: str, source: Snapshot | Callable[[Snapshot | None], Snapshot | None] | None) -> Donor:
        """A real donor, of what is copied when it is asked."""
        copy = source if callable(source) else lambda known: source
        self._donors[name] = donor = Donor(lambda peer, header, payload: self.bring(name, header, *payload), copy)
        self._open(name)
        return donor

    def add_rogue(self, name: str, answer: Rogue) -> None:
        """A donor that does what a test wants."""
        self._donors[name] = answer
        self._open(name)

    def kill(self, name: str) -> None:
        self._boxes[name].put(None)
        self.downloads.lost(name)

    def bring(self, name: str, header: Header, *payload: bytes | memoryview) -> None:
        """A frame from donor ``name``."""
        self._boxes[name].put(lambda: self._deliver(name, header, b"".join(payload)))

    def answer(self, name: str, download: bytes, number: int, data: bytes | memoryview) -> None:
        self.bring(name, Header(kind=Kind.STATE, round=download, chunk=number, length=len(data)), data)

    def fetch(
        self,
        *donors: str,
        timeout_s: float = 5.0,
        enough: Callable[[Head], bool] = lambda head: True,
        known: tuple[Head, bytes] | None = None,
    ) -> tuple[Description, Tensor] | None:
        return self.downloads.fetch(
            lambda: donors or list(self._donors), read, timeout_s, lambda: False, enough=enough, known=known
        )

    def ranges_of(self) -> Counter[str]:
        """How many ranges each was asked for."""
        return Counter(name for name, question in self.asked if isinstance(question, WantsRange))

    def close(self) -> None:
        for name, donor in self._donors.items():
            self._boxes[name].put(None)
            if isinstance(donor, Donor):
                donor.stop()

    def _open(self, name: str) -> None:
        box: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._boxes[name] = box
        threading.Thread(target=self._run, args=(box,), daemon=True).start()

    @staticmethod
    def _run(box: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := box.get()) is not None:
            task()

    def _ask(self, name: str, header: Header, payload: object) -> None:
        assert header.kind is Kind.REQUEST
        (data,) = payload  # type: ignore[misc]
        question, donor = questions.read(data), self._donors[name]
        self.asked.append((name, question))
        if isinstance(donor, Donor):
            self._boxes[name].put(lambda: donor.asked("joiner", header.round, question))
        elif not isinstance(question, Done):  # a rogue keeps no copies
            self._boxes[name].put(lambda: donor(self, header.round, question))

    def _deliver(self, name: str, header: Header, data: bytes) -> None:
        try:
            room = self.downloads.room(name, header)
        except WireError as error:
            self.refused.append(str(error))
            return
        if room is None:
            self.passed_by += 1
            return
        room[:] = data
        self.downloads.moved(name, header)
        self.downloads.arrived(name, header, room)


def honest(name: str, source: Snapshot, *, instead: Callable[[int], bytes | None] = lambda number: None) -> Rogue:
    """Answers as a donor does, but for ranges for which ``instead`` has other bytes (empty: no answer)."""

    def answer(office: Office, download: bytes, question: Question) -> None:
        if isinstance(question, WantsDescription):
            office.answer(name, download, 0, source.description)
            return
        data = bytes(source.content.copy().numpy())[source.spans[question.number]]
        other = instead(question.number)
        if other != b"":
            office.answer(name, download, 1 + question.number, data if other is None else other)

    return answer


def mute(office: Office, download: bytes, question: Question) -> None:
    pass
