"""What holds in every run, whatever the test is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from swarm.harness import Peer
from swarm.replay import distance, replay, replay_outer


def assert_ledger(peers: Iterable[Peer]) -> None:
    """Each commit's count of samples is that of the next batches which the peer gave, and which no step has had yet.

    A step that counted samples again would run out of batches in the end, and its parameters are not those of
    :func:`.replay`, which is given these batches. Nor does the data come twice within one pass.
    """
    for peer in peers:
        seen: list[int] = []
        commits = peer.commits
        newest = max(commits, default=-1)  # a running peer says first that it committed, and records it a moment later
        for event in peer.said("EpochCommitted"):
            if event["epoch"] > newest:
                break
            commit = commits.get(event["epoch"])
            assert commit is not None, f"{peer.name}: epoch {event['epoch']} was committed but not recorded"
            assert event["samples"] == len(commit.indices), f"{peer.name}, epoch {commit.epoch}"
            seen += commit.indices
        if len(seen) <= peer.spec.data_samples:  # within one pass over the data
            assert len(seen) == len(set(seen)), f"{peer.name} used a sample twice"


def assert_complete(peers: Sequence[Peer], epochs: Iterable[int]) -> None:
    """In these epochs every peer's gradient reached every peer, whole.

    The native engine does not wait for who is late, as anybody may be on a busy machine: there all were in every round,
    and in some with a gradient.
    """
    waits = peers[0].spec.engine == "hivemind"
    for peer in peers:
        incomplete = [e for e in peer.said("RoundIncomplete") if e["epoch"] in epochs or e["epoch"] + 1 in epochs]
        assert not incomplete, f"{peer.name}: {incomplete}"
        for epoch in epochs:
            (event,) = peer.said("EpochCommitted", epoch=epoch)
            assert event["fraction"] == 1.0, f"{peer.name}: {event}"
            assert event["contributors"] == len(peers) or not waits, f"{peer.name}: {event}"
    assert set(together(peers)) & set(epochs), "no round had a gradient of everybody"


def assert_in_step(peers: Sequence[Peer], epochs: Iterable[int], *, within: float = 1e-6) -> None:
    """After each of these epochs the peers are equal: with the native engine bit for bit, and so are their buffers.

    With the other one parameters are, up to a relative ``within``. -1: at the end.
    """
    first, *others = peers
    native, checked = first.spec.engine == "native", list(epochs)
    for epoch in checked:
        for other in others:
            apart = distance(other.parameters(epoch), first.parameters(epoch))
            assert apart <= (0.0 if native else within), f"epoch {epoch}: {other.name} is {apart:.2e} from {first.name}"
        at_step = {peer.name: one["buffers"] for peer in peers for one in peer.said("step", epoch=epoch)}
        assert len({*at_step.values()}) <= 1 or not native, f"epoch {epoch}: buffers are {at_step}"


def together(peers: Sequence[Peer]) -> list[int]:
    """Epochs that all these peers committed with all the others in them."""
    sets = []
    for peer in peers:
        events = peer.said("EpochCommitted", contributors=len(peers), fraction=1.0)
        sets.append({event["epoch"] for event in events})
    return sorted(set.intersection(*sets))


def assert_one_process(peers: Sequence[Peer], steps: int) -> None:
    """After so many steps they are, within 1e-5, one process that takes the samples which each step recorded."""
    assert_complete(peers, range(1, steps + 1))
    assert_ledger(peers)
    expected = replay(peers, steps)
    for peer in peers:
        assert np.isfinite(peer.parameters(steps)).all()
        assert distance(peer.parameters(steps), expected[steps]) < 1e-5
    assert distance(expected[steps], expected[0]) > 1e-2, "nothing was learned: the comparison would prove nothing"
    assert_in_step(peers, [steps])


def assert_workers(peers: Sequence[Peer], rounds: int, **settings: Any) -> None:
    """What they have in common after so many rounds is, within 1e-5, what workers one after another make of it.

    ``settings``: of the outer step, see :func:`.replay_outer`.
    """
    assert_complete(peers, range(1, rounds + 1))
    assert_ledger(peers)
    expected = replay_outer(peers, rounds, **settings)
    assert distance(expected[rounds], expected[0]) > 1e-2, "nothing was learned: the comparison would prove nothing"
    common = [peer.parameters(f"common_{rounds}") for peer in peers]
    assert all((common[0] == one).all() for one in common)
    apart = [distance(peers[0].parameters(f"common_{r}"), expected[r]) for r in range(1, rounds + 1)]
    assert max(apart) < 1e-5, apart
