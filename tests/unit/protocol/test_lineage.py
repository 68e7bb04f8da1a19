"""The chain of commits."""

from __future__ import annotations

from lightning_hivemind.engine.native.protocol.lineage import (
    REMEMBERED,
    Commit,
    Contribution,
    Head,
    History,
    following,
    rank,
)

ROOT = Head.root("run", "founder")


def commit(parent: Head, samples: int = 8, digest: bytes = b"average") -> Commit:
    contribution = Contribution(peer="p", number=parent.epoch, samples=samples)
    return Commit(round=b"%d" % parent.epoch, parent=parent, contributions=(contribution,), digest=digest)


def chain(count: int) -> list[Commit]:
    commits = [commit(ROOT)]
    while len(commits) < count:
        commits.append(commit(commits[-1].head))
    return commits


def test_a_head_says_all_that_led_to_it() -> None:
    assert commit(ROOT).head.epoch == 1
    assert commit(ROOT).head == commit(ROOT).head
    assert commit(ROOT).head.lineage != commit(ROOT, digest=b"another").head.lineage
    assert commit(ROOT, 8).head.lineage != commit(ROOT, 9).head.lineage
    assert ROOT.lineage != Head.root("run", "another").lineage != Head.root("other", "founder").lineage


def test_of_two_lineages_exactly_one_outweighs_the_other() -> None:
    light, heavy = commit(ROOT, 8).head, commit(ROOT, 9).head
    assert heavy.outweighs(light)
    assert not light.outweighs(heavy)
    one, other = commit(ROOT, digest=b"1").head, commit(ROOT, digest=b"2").head
    assert one.outweighs(other) != other.outweighs(one)
    assert not one.outweighs(one)


def test_a_late_peer_hears_what_follows_its_head_and_nothing_of_other_chains() -> None:
    history, commits = History(), chain(5)
    for one in commits:
        history.add(one)
    assert history.since(commits[1].head) == tuple(commits[2:])
    assert history.since(commits[-1].head) == ()
    assert history.since(Head.root("run", "another")) == ()
    assert history.of_round(commits[3].round) == commits[3]
    assert history.of_round(b"unknown") is None


def test_only_the_last_commits_are_remembered() -> None:
    history, commits = History(), chain(REMEMBERED + 5)
    for one in commits:
        history.add(one)
    assert history.since(ROOT) == ()
    assert len(history.since(commits[4].head)) == REMEMBERED


def test_a_chain_with_a_gap_leads_nowhere() -> None:
    commits = chain(4)
    assert following(ROOT, commits) == tuple(commits)
    assert following(ROOT, [commits[0], commits[2]]) == ()
    assert following(commits[2].head, commits) == (commits[3],)


def test_every_peer_calls_sooner_or_later() -> None:
    peers = [f"p{number}" for number in range(4)]
    callers = [min(peers, key=lambda peer: rank("run", epoch, peer)) for epoch in range(400)]
    assert all(70 < callers.count(peer) < 130 for peer in peers)
