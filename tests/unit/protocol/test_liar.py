"""One peer says whatever it likes, in messages that can be read: the others neither fail nor say what cannot be sent.

(That it takes part, and gives wrong gradients, nobody can prevent; a run's peers trust one another so far.)
"""

from __future__ import annotations

import random
import typing
from dataclasses import is_dataclass, replace
from typing import Any

import pytest

from lightning_hivemind.engine.native.protocol import messages
from lightning_hivemind.engine.native.protocol.actions import Action, CatchUp, Reduce
from lightning_hivemind.engine.native.protocol.lineage import Head
from lightning_hivemind.engine.native.protocol.messages import Message
from lightning_hivemind.engine.native.protocol.settings import Settings
from lightning_hivemind.engine.native.wire.encoding import MAX_INT, decode, encode
from lightning_hivemind.engine.native.wire.frames import Header, Kind
from lightning_hivemind.errors import WireError
from swarm.table import Data, Table
from unit.seeds import seeds

SETTINGS = Settings(run="run", target_samples=16, chunks=3, matchmaking_s=1.0, stall_s=1.0, round_s=3.0)
NAMES = ["a", "b", "liar"]
#: so many letters of the liar are replaced in a run at most
MOST = 12
SEEDS = seeds(150)

KINDS = typing.get_args(messages.Message)
NUMBERS = [0, 1, 2, 3, 7, 24, 1000, 2**32, 2**62, MAX_INT]
SPEEDS = [0.0, 5e-324, 1e-300, 0.5, 1.0, 1e308]


class LiarsTable(Table):
    """Keeps what was on the table, so that lies can be about it; and checks what the honest ones want done."""

    def __init__(self) -> None:
        super().__init__(NAMES, SETTINGS)
        self.rounds, self.heads = [b"r" * 16], [Head.root("run", "a"), Head.nowhere()]

    def note(self, what: Message | Data) -> None:
        if isinstance(what, messages.Call):
            self.rounds.append(what.round)
            self.heads.append(what.head)

    def read(self, sender: str, receiver: str, what: Message | Data) -> None:
        if sender == "liar" and not isinstance(what, Data):
            try:
                what = decode(encode(what))
            except (WireError, OverflowError):
                return  # its connection closes
        if receiver in self.peers:  # an honest one may be told to go to who does not exist
            super().read(sender, receiver, what)

    def _do(self, name: str, action: Action) -> None:
        if name != "liar":
            if isinstance(action, Reduce):
                peers = [one.peer for one in action.contributions]
                assert peers, "an average over nothing"
                assert len(set(peers)) == len(peers), "a peer counts twice"
                assert all(one.samples > 0 for one in action.contributions), "a weight of zero"
            if isinstance(action, CatchUp):  # the driver fetches a state, or finds that nobody has it
                own = self.peers[name].head
                assert own is not None
                self.peers[name].adopt(action.head, action.commits, self.now)
                if all(self.peers[other].head != action.head for other in {"a", "b"} - {name}):
                    self.peers[name].give_up(own, self.now)
        super()._do(name, action)
        for sender, _, what in self.letters:
            if sender == "liar":
                continue
            if isinstance(what, Data):
                header = Header(kind=Kind.RESULT, round=what.round, chunk=what.chunk, version=what.version)
                assert Header.unpack(header.pack()) == header, "an honest peer sends what cannot be a frame"
            else:
                assert decode(encode(what)) == what, "an honest peer says what cannot be sent"


def lie(chance: random.Random, table: LiarsTable, kind: Any, truth: Any = None) -> Any:
    """A value of that type; a true one but for a part of it, where there is one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if truth is not None and chance.random() < 0.75:
        if is_dataclass(kind):
            name, hint = chance.choice(list(typing.get_type_hints(kind).items()))
            return replace(truth, **{name: lie(chance, table, hint, getattr(truth, name))})
        if origin is tuple and truth and arguments[-1] is Ellipsis:
            at = chance.randrange(len(truth))
            changed = lie(chance, table, arguments[0], truth[at])
            return chance.choice([truth[:at], truth + truth[at:], (*truth[:at], changed, *truth[at + 1 :])])
    if kind is Head and chance.random() < 0.7:
        return chance.choice(table.heads)
    if is_dataclass(kind):
        return kind(**{name: lie(chance, table, hint) for name, hint in typing.get_type_hints(kind).items()})
    if origin is tuple:
        count = chance.randint(0, 4) if arguments[-1] is Ellipsis else len(arguments)
        return tuple(lie(chance, table, arguments[0 if arguments[-1] is Ellipsis else at]) for at in range(count))
    if type(None) in arguments:
        (inner,) = (one for one in arguments if one is not type(None))
        return None if chance.random() < 0.3 else lie(chance, table, inner)
    simple: dict[Any, list[Any]] = {
        int: [*NUMBERS, chance.randint(0, MAX_INT)],
        float: SPEEDS,
        bool: [False, True],
        str: [*NAMES, "nobody", ""],
        bytes: [*table.rounds, chance.randbytes(16)],
    }
    return chance.choice(simple[kind])


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_a_peer_says_the_others_do_not_fail(seed: int) -> None:
    chance, table = random.Random(seed), LiarsTable()
    lies = 0

    def replaces(sender: str, receiver: str, what: Message | Data) -> bool:
        """Whether another letter is read instead of this one."""
        nonlocal lies
        table.note(what)
        if sender != "liar" or receiver == "liar" or isinstance(what, Data) or lies > MOST or chance.random() < 0.5:
            return False
        lies += 1
        table.read("liar", receiver, lie(chance, table, type(what), what))
        return True

    table.hold = replaces
    for _ in range(chance.randint(1, 4)):
        table.train(**{name: chance.randint(1, 20) for name in NAMES})
        table.wait(chance.choice([0.0, 0.1, 1.0, 5.0]))
        for _ in range(chance.randint(0, 5)):
            table.read("liar", chance.choice(["a", "b"]), lie(chance, table, chance.choice(KINDS)))
            table.flow()
    table.wait(10.0)
    made = {name: len(table.applied[name]) for name in ("a", "b")}
    table.hold = lambda *_: False
    table.kill("liar")
    for _ in range(10):  # where the liar said that it was may first have to be given up
        table.train(a=SETTINGS.target_samples, b=SETTINGS.target_samples)
        table.wait(2.0)
    for name, before in made.items():
        assert len(table.applied[name]) > before, f"{name} makes no step any more"
