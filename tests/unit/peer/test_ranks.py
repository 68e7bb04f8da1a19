"""How the ranks of one peer speak: real sockets, a thread for each rank."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hivemind.errors import RanksError
from lightning_hivemind.peer import ranks as module
from lightning_hivemind.peer.ranks import Ranks
from lightning_hivemind.peer.words import (
    Add,
    Done,
    Failed,
    Gather,
    GatherSum,
    Item,
    Shared,
    Step,
    Values,
    Waiting,
    Word,
    decode,
    encode,
)


class Group:
    """Of so many threads, of which rank 0 broadcasts once."""

    def __init__(self, size: int) -> None:
        self.size, self._sent = size, Future[Any]()

    def of(self, rank: int) -> Any:
        def broadcast(obj: Any, src: int = 0) -> Any:
            if rank == 0:
                self._sent.set_result(obj)
            return self._sent.result(10)

        environment = SimpleNamespace(main_address="127.0.0.1")
        return SimpleNamespace(
            global_rank=rank,
            world_size=self.size,
            num_nodes=1,
            broadcast=broadcast,
            cluster_environment=environment,
        )

    @property
    def sent(self) -> Any:
        return self._sent.result(10)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is a thread here, and does not end for long after the test: nobody waits for that."""
    monkeypatch.setattr(module, "PATIENCE_S", 2.0)


def together(size: int, act: Callable[[Ranks], Any]) -> list[Any]:
    """What ``act`` returns, or raises, at each rank."""
    group = Group(size)

    def run(rank: int) -> Any:
        ranks = Ranks.connect(group.of(rank))
        try:
            return act(ranks)
        except RanksError as error:
            return error
        finally:
            ranks.close()

    with ThreadPoolExecutor(size) as pool:
        return [one.result(30) for one in [pool.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_is_shared_all_have_by_rank(size: int) -> None:
    found = together(size, lambda ranks: [ranks.share("a", ranks.rank), ranks.share("b", [float("inf"), "ö"])])
    assert found == [[list(range(size)), [[float("inf"), "ö"]] * size]] * size


def test_the_others_hear_all_that_rank_0_says_in_order() -> None:
    said: list[Word] = [Step(4, [True, False]), Step(5, None), Values(5, 3), Done("step", 6, True, 2, 8, 16, None, 0.5)]

    def act(ranks: Ranks) -> Any:
        if ranks.leads:
            for word in said:
                ranks.tell(word)
            return ranks.share("end", 0)
        heard = [ranks.hear("step") for _ in said]
        ranks.share("end", 0)
        return heard

    assert together(3, act)[1:] == [said, said]


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("last", ["tell", "share", "fail"])
def test_a_word_that_is_held_goes_with_what_comes_next(last: str) -> None:
    add, done = Add(1.0, first=True), Done("step", 6, True, 2, 8, 16, None)

    def act(ranks: Ranks) -> Any:
        found: list[Any] = [ranks.share("batch", ranks.rank, more=True)]
        if ranks.leads:
            ranks.tell(add, more=True)
        else:
            found.append(ranks.hear("step"))
        if last == "share":
            return [*found, ranks.share("next", ranks.rank)]
        if ranks.leads:
            ranks.tell(done) if last == "tell" else ranks.fail(ValueError("too hot"))
            return found
        with contextlib.nullcontext() if last == "tell" else pytest.raises(RanksError, match="ValueError: too hot"):
            found.append(ranks.hear("step"))
        return found

    ends = {"tell": [done], "share": [[0, 1, 2]], "fail": []}
    assert together(3, act)[1:] == [[[0, 1, 2], add, *ends[last]]] * 2


@pytest.mark.parametrize(
    "word",
    [
        Item("a", [1, "b"]),
        Shared("a", [None, 2.5]),
        Step(1, [True]),
        Values(3, 7),
        Add(0.5, first=False),
        Gather(1),
        GatherSum(),
        Failed("no"),
        Waiting("step", 3),
        Done("step", 1, True, 2, 3, 4, 5),
    ],
)
def test_words_come_back_as_they_were(word: Word) -> None:
    assert decode(encode(word)) == word


def test_ranks_that_are_not_at_the_same_place_are_all_told() -> None:
    """Rank 1 has one batch less."""
    found = together(2, lambda ranks: ranks.share("batch" if ranks.leads else "swarm_mean loss", 1))
    assert all(isinstance(one, RanksError) for one in found), found
    assert "rank 0 at 'batch', another one at 'swarm_mean loss'" in str(found[0])


@pytest.mark.usefixtures("briefly")
def test_who_waits_for_a_word_that_rank_0_will_not_say_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 validates already, rank 0 waits for its part of the next batch."""
    monkeypatch.setattr(module, "POLL_S", 0.05)

    def act(ranks: Ranks) -> Any:
        with ranks.together():
            return ranks.share("batch", 1) if ranks.leads else ranks.hear("before_validation")

    first, second = together(2, act)
    assert "rank 0 at 'batch', another one at 'before_validation'" in str(first)
    assert "rank 0 of this peer has ended: RanksError" in str(second)


def test_who_has_waited_for_long_and_was_told_then_is_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)

    def act(ranks: Ranks) -> Any:
        for _ in range(3):
            if ranks.leads:
                time.sleep(0.1)
                ranks.tell(Step(1, None))
            else:
                ranks.hear("step")
        return ranks.share("batch", ranks.rank)

    assert together(2, act) == [[0, 1], [0, 1]]


def test_a_word_of_another_call_is_not_taken_for_its_end() -> None:
    ranks = Ranks(1, 2)
    done = Done("begin_batch", 1, False, 1, 0, 0, None)
    assert ranks.expect(Done, "begin_batch", done) is done
    with pytest.raises(RanksError, match="rank 1 at 'step', another one at 'begin_batch'"):
        ranks.expect(Done, "step", done)
    with pytest.raises(RanksError, match="another one at 'Values'"):
        ranks.expect(Done, "step", Values(1, 1))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_has_gone_is_told_to_the_others_at_once(who: int) -> None:
    def act(ranks: Ranks) -> Any:
        return None if ranks.rank == who else ranks.share("batch", 1)

    found = together(2, act)
    assert f"rank {who} of this peer has ended" in str(found[1 - who])


@pytest.mark.usefixtures("briefly")
def test_what_rank_0_raises_the_others_raise_with_its_reason() -> None:
    def act(ranks: Ranks) -> Any:
        if not ranks.leads:
            return ranks.hear("step")
        with pytest.raises(ValueError, match="no such address"), ranks.together():
            raise ValueError("no such address")
        return None

    _, first, second = together(3, act)
    assert isinstance(first, RanksError)
    assert str(first) == str(second) == "rank 0 of this peer has ended: ValueError: no such address"


def test_what_another_rank_raises_rank_0_hears_at_once() -> None:
    """Before that rank saves a checkpoint for which it waits for rank 0; and it can still be heard meanwhile."""

    def act(ranks: Ranks) -> Any:
        if ranks.leads:
            with pytest.raises(RanksError, match="rank 1 of this peer has ended"):
                ranks.share("batch", 1)
            return None
        ranks.fail(ValueError("no memory"))
        began = time.monotonic()
        ranks.close()
        return time.monotonic() - began

    _, waited = together(2, act)
    assert waited < module.PATIENCE_S / 2, "rank 0 has gone"


def test_who_does_not_know_the_secret_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.2)
    group, found = Group(2), []
    leader = threading.Thread(target=lambda: found.append(Ranks.connect(group.of(0))))
    leader.start()
    host, port, _ = group.sent
    with socket.create_connection((host, port)) as silent, socket.create_connection((host, port)) as stranger:
        stranger.sendall(bytes(32) + (1).to_bytes(4, "big"))
        silent.sendall(b"1")
        follower = Ranks.connect(group.of(1))
        leader.join(10)
        assert found
        assert stranger.recv(1) == silent.recv(1) == b""
    shared = threading.Thread(target=lambda: found.append(found[0].share("batch", 0)))
    shared.start()
    assert follower.share("batch", 1) == [0, 1]
    shared.join(10)
    follower.close()
    found[0].close()


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.2)
    with pytest.raises(RanksError, match=r"ranks \[1, 2\] of this peer did not come"):
        Ranks.connect(Group(3).of(0))


@pytest.mark.usefixtures("briefly")
def test_rank_0_says_which_rank_has_gone_and_the_others_hear_a_reason_of_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a collective raises says only that a connection has broken."""
    monkeypatch.setattr(module.log, "propagate", True)

    def act(ranks: Ranks) -> Any:
        if ranks.rank == 2:
            return None
        if not ranks.leads:
            return ranks.hear("step")
        time.sleep(0.2)
        ranks.fail(RuntimeError("Connection closed\nby peer. " + "x" * 1000))
        return None

    heard = str(together(3, act)[1])
    assert "rank 2 of this peer has ended" in caplog.text
    assert heard.startswith("rank 0 of this peer has ended: RuntimeError: Connection closed by peer. xx")
    assert len(heard) < 300


def test_who_waits_for_long_says_for_what(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is in a collective, to which this rank will not come."""
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "TELL_S", 0.1)
    monkeypatch.setattr(module.log, "propagate", True)

    def act(ranks: Ranks) -> Any:
        if ranks.leads:
            time.sleep(0.5)
            ranks.tell(Step(1, None))
        else:
            ranks.hear("before_validation")

    together(2, act)
    said = [text for text in caplog.messages if "rank 1 of this peer waits in 'before_validation' for rank 0" in text]
    assert 2 <= len(said) <= 3, "after 0.1, 0.2 and 0.4 s"


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("who", [0, 1, 2])
def test_all_meet_at_the_end_if_it_is_that_of_rank_0(who: int) -> None:
    """Then a checkpoint of all their parts can be saved."""

    def act(ranks: Ranks) -> Any:
        if ranks.rank == who:
            ranks.fail(ValueError("bad"))
        else:
            with pytest.raises(RanksError) as caught:
                ranks.share("batch", 1)
            ranks.fail(caught.value)
        return [ranks.meet(), ranks.meet()]

    assert together(3, act) == [[who == 0] * 2] * 3


def test_nobody_waits_for_long_where_one_does_not_come_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a collective, which ends when the others have gone."""
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)

    def act(ranks: Ranks) -> Any:
        if ranks.rank == 2:
            time.sleep(1)
            return None
        if ranks.leads:
            ranks.fail(ValueError("bad"))
        else:
            with pytest.raises(RanksError):
                ranks.hear("step")
        return ranks.meet()

    assert together(3, act) == [False, False, None]


def test_alone_one_is_all() -> None:
    ranks = Ranks()
    ranks.fail(ValueError("bad"))
    assert ranks.meet()
