"""What the training thread does between batches, with whole engines: it waits for rounds, or trains on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hivemind import codecs
from lightning_hivemind.engine.native import engine as engine_module
from lightning_hivemind.engine.native.parts import Parts
from lightning_hivemind.errors import StateError
from lightning_hivemind.events import BatchAccumulated, RoundIncomplete, RoundMissed, Waiting
from swarm.engines import FOUNDER, Trainer, connected
from swarm.town import wait_for
from unit.default_dtype import default_dtype

STEP_DELAYED = {"delay_state_averaging": True, "delay_optimizer_step": True}
ALL_DELAYS = {**STEP_DELAYED, "delay_grad_averaging": True}
LOCAL = {"use_local_updates": True}
#: arguments, and whether batches go on while a round is under way
WAYS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"delay_state_averaging": True}, False),
    (STEP_DELAYED, False),
    (ALL_DELAYS, True),
    (LOCAL, False),
    ({**LOCAL, "delay_state_averaging": True}, True),
]

Make = Callable[..., Trainer]


@pytest.mark.parametrize("auxiliary", [False, True], ids=["alone", "with a helper"])
def test_who_joins_a_run_waits_for_its_founder_to_begin(monkeypatch: pytest.MonkeyPatch, *, auxiliary: bool) -> None:
    """Who founds it may be slow (Lightning's sanity check): else it would begin with the values of who was quicker."""
    connected(monkeypatch)
    founder = Trainer("founder", begins=False)
    founder.weight.data.fill_(7.0)
    helpers = [Trainer("helper", initial_peers=[FOUNDER], auxiliary=True)] if auxiliary else []
    late = threading.Timer(1.5, founder.engine.synchronise)
    late.start()
    joiner = Trainer("joiner", initial_peers=[FOUNDER])
    late.join()
    assert joiner.weight.unique().tolist() == [7.0]
    assert joiner.engine._head == founder.engine._head
    for one in (joiner, *helpers, founder):
        one.engine.shutdown(5.0)


def test_who_is_stopped_while_it_waits_for_the_founder_is_not_found_by_others_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would take its initial values."""
    connected(monkeypatch)
    founder, joiner = Trainer("founder", begins=False), Trainer("joiner", begins=False, initial_peers=[FOUNDER])
    joiner.aborted = True
    joiner.engine.synchronise()
    assert joiner.engine._whereabouts is not None
    assert "place" not in joiner.engine._whereabouts._records.read()["joiner"]
    for one in (joiner, founder):
        one.engine.shutdown(5.0)


def test_a_founder_that_does_not_begin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch)
    founder = Trainer("founder", begins=False)
    with pytest.raises(StateError, match=r"peer founder.* has not begun to train for 1 s \(load_state_timeout\)"):
        Trainer("joiner", initial_peers=[FOUNDER], load_state_timeout=1.0)
    founder.engine.shutdown(5.0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes trainers of one swarm; all but the first join it, and know one another when this returns."""
    trainers: list[Trainer] = []
    connected(monkeypatch)

    def made(**given: Any) -> Trainer:
        peers = {"initial_peers": [FOUNDER]} if trainers else {}
        trainers.append(Trainer("abc"[len(trainers)], **{**peers, **given}))
        wait_for(lambda: all(one.engine.num_peers == len(trainers) for one in trainers), "all know one another")
        return trainers[-1]

    yield made
    for one in trainers:
        one.engine.shutdown(5.0)


def held(monkeypatch: pytest.MonkeyPatch, other: Trainer) -> Callable[[], None]:
    """From now on ``other`` is called by rounds and comes to none; what is returned lets it come."""
    handover, joins = other.parts.handover, other.parts.handover.ready_at
    monkeypatch.setattr(handover, "ready_at", lambda now: now + 1000.0)

    def let_go() -> None:
        monkeypatch.setattr(handover, "ready_at", joins)
        other.parts.driver.contributed()

    return let_go


@pytest.mark.parametrize(("given", "overlaps"), WAYS, ids=["+".join(given) or "none" for given, _ in WAYS])
def test_the_next_batch_is_accumulated_while_a_round_is_held_open_only_with_overlap(
    make: Make, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], overlaps: bool
) -> None:
    """The other peer is called and does not come; once the batch that reached the target has waited for it, it does."""
    peer, other = (make(matchmaking_time=60.0, averaging_timeout=120.0, **given) for _ in "ab")
    peer.impatient = let_go = held(monkeypatch, other)
    peer.begin()
    assert peer.end(samples=16) is not overlaps, "who waits makes the step before it begins the next batch"
    if overlaps:
        wait_for(lambda: peer.parts.handover.under_way, "the round has called")
        assert not peer.begin()
        assert not peer.end()
        assert peer.parts.handover.under_way
        assert (peer.engine.epoch, peer.engine.local_samples) == (0, 24), "a batch more, and the round is still open"
        assert len([event for event in peer.events if isinstance(event, BatchAccumulated)]) == 2
        let_go()
        wait_for(lambda: not peer.parts.handover.under_way, "the round has ended")
        assert peer.begin(), "a step that was decided meanwhile is made before the next batch"
    assert peer.engine.epoch == 1


def test_who_makes_steps_of_its_own_trains_on_during_a_round_until_it_has_its_share_of_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rounds would be fewer, and each of more steps, the longer they take."""
    given = {**LOCAL, "delay_state_averaging": True, "matchmaking_time": 60.0, "averaging_timeout": 120.0}
    peer, other = (make(**given) for _ in "ab")
    let_go = held(monkeypatch, other)
    peer.begin()
    assert not peer.end(samples=16)
    wait_for(lambda: peer.parts.handover.under_way, "the round has called")
    assert not peer.begin()
    assert not peer.end()
    assert peer.parts.handover.under_way
    assert (peer.engine.epoch, peer.engine.local_samples) == (0, 24)
    peer.impatient = let_go
    assert peer.begin(), "it waits, and the step is made"
    assert peer.waited > peer.patience
    assert peer.engine.epoch == 1


@pytest.mark.parametrize(("given", "overlaps"), WAYS, ids=["+".join(given) or "none" for given, _ in WAYS])
def test_a_batch_begins_in_the_middle_of_a_round_that_called_between_two_only_with_overlap(
    make: Make, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], overlaps: bool
) -> None:
    """The other peer reaches the target, and comes to its own round only when this one has waited for it."""
    peer = make(matchmaking_time=60.0, averaging_timeout=120.0, **given)
    trains_on = {**LOCAL, "delay_state_averaging": True} if "use_local_updates" in given else ALL_DELAYS
    other = make(matchmaking_time=60.0, averaging_timeout=120.0, **trains_on)
    peer.begin()
    assert not peer.end()
    assert not peer.parts.handover.under_way, "there are samples missing"
    peer.impatient = let_go = held(monkeypatch, other)
    other.begin()
    other.end()
    wait_for(lambda: peer.parts.handover.under_way, "the round has called")
    assert peer.begin() is not overlaps
    assert (peer.engine.epoch, peer.parts.handover.under_way) == ((0, True) if overlaps else (1, False))
    let_go()


def test_after_its_last_step_a_peer_makes_no_other_though_a_batch_still_runs(make: Make) -> None:
    """The last may be made before a batch: Lightning's loop ends after it only."""
    peer = make()
    peer.engine._training = replace(peer.engine._training, last_step=lambda: 1)
    peer.begin()
    peer.end(samples=16)
    wait_for(lambda: peer.begin() or peer.engine.epoch == 1, "its last step")
    assert not peer.end(samples=16)
    assert not peer.begin()
    assert peer.engine.epoch == 1


def test_who_has_made_its_last_step_does_not_run_after_those_that_go_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes their state once, though they are ahead again when it is here: it would never be where they are."""
    peer, runs = make(), 0

    def run(head: Any) -> Any:
        nonlocal runs
        runs += 1
        assert runs < 5, "one state after another"
        return head

    peer.engine._training = replace(peer.engine._training, last_step=lambda: 0)
    monkeypatch.setattr(peer.engine._catching_up, "run", run)
    monkeypatch.setattr(peer.parts.handover, "settle", lambda head: False)
    peer.parts.handover.owe()
    assert not peer.begin()
    assert runs == 1


def test_training_goes_on_once_averaging_timeout_and_matchmaking_time_are_over_without_a_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other peer is in every round, and silent: each ends by ``averaging_timeout``, and another one begins."""
    monkeypatch.setattr(engine_module, "REPORT_S", 0.0)
    limits = {"matchmaking_time": 0.3, "averaging_timeout": 0.6, "next_chunk_timeout": 60.0}
    peer, other = (make(averager_opts={"min_group_size": 2}, **limits, **given) for given in ({}, ALL_DELAYS))
    monkeypatch.setattr(other.parts.driver._chunks, "send_input", lambda action: False)
    peer.begin()
    peer.end()
    other.begin()
    other.end()
    wait_for(lambda: peer.parts.handover.under_way, "the round has called")

    def gives_up() -> None:
        peer.aborted = True

    peer.patience, peer.impatient = 60, gives_up

    def ended() -> set[str]:
        return {event.reason for event in peer.events if isinstance(event, RoundIncomplete)}

    batches, by_timeout = 1, "not finished in 0.6 s (allreduce_timeout or averaging_timeout)"
    while by_timeout not in ended() and batches < 20:
        assert not peer.begin()
        assert not peer.end()
        batches += 1
        assert not peer.aborted, "it would have waited much longer, if not for ever"
    assert peer.engine.local_samples == 8 * batches
    assert peer.engine.epoch == 0
    assert by_timeout in ended()
    assert {event.limit_s for event in peer.events if isinstance(event, Waiting)} == {0.3 + 0.6}


@pytest.mark.parametrize(
    ("given", "steps"), [({}, 1), (STEP_DELAYED, 2), (ALL_DELAYS, 3)], ids=["none", "step", "gradients"]
)
def test_each_delay_lets_gradients_be_one_step_older(make: Make, given: dict[str, Any], steps: int) -> None:
    peer = make(target_batch_size=1000, **given)
    peer.begin()
    peer.end()
    peer.engine._gradients.committed([], steps)
    assert peer.engine.local_samples == 8
    peer.engine._gradients.committed([], steps + 1)
    assert peer.engine.local_samples == 0


def test_a_batch_that_is_too_old_at_its_end_is_told_with_all_its_samples_and_all_as_lost(make: Make) -> None:
    """So that who adds up events finds each sample once."""
    peer = make(target_batch_size=1000)
    peer.begin()
    peer.engine._gradients.committed([], 2)
    peer.end()
    (batch,) = [event for event in peer.events if isinstance(event, BatchAccumulated)]
    assert (batch.batch_samples, batch.local_samples) == (8, 0)
    assert [event.samples_lost for event in peer.events if isinstance(event, RoundMissed)] == [8]


def steps_take(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_step = torch.optim.SGD.step

    def slow_step(*args: Any) -> Any:
        time.sleep(seconds)
        return plain_step(*args)

    monkeypatch.setattr(torch.optim.SGD, "step", slow_step)


@pytest.mark.parametrize("given", [{}, STEP_DELAYED, ALL_DELAYS], ids=["none", "step", "gradients"])
def test_parameters_are_compared_also_where_a_step_always_is_under_way(
    make: Make, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    steps_take(0.05, monkeypatch)
    peer = make(target_batch_size=8, average_state_every=2, **given)
    for _ in range(12):
        peer.begin()
        peer.end()
        wait_for(lambda: not peer.parts.driver.status.due or peer.parts.handover.ready(peer.engine._head), "a round")
    compared = [epoch for epoch, _, _ in peer.engine._agreement.record()[1]]
    assert compared
    assert compared[-1] >= peer.engine.epoch - 4


@pytest.mark.parametrize("batches", [1, 2, 3], ids="{} a step".format)
@pytest.mark.parametrize("given", [{}, STEP_DELAYED, ALL_DELAYS], ids=["none", "step", "gradients"])
def test_all_that_a_buffer_has_seen_comes_into_steps_however_late_they_are_made(
    make: Make, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], batches: int
) -> None:
    """BatchNorm's statistics: a step that is made in the background ends when later batches have moved them already."""
    steps_take(0.05, monkeypatch)
    seen, made = torch.zeros(1), 0
    peer = make(target_batch_size=8 * batches, buffers=[seen], **given)
    while made < 12 or peer.engine.local_samples:
        made += 1
        peer.begin()
        seen += 1.0
        peer.end()
        wait_for(lambda: not peer.parts.driver.status.due or peer.parts.handover.ready(peer.engine._head), "a round")
        assert made < 100, "some samples are in no step"
    peer.engine.flush()
    assert seen.item() == made


def test_a_batch_in_half_precision_lets_the_rounds_go_on_as_ever(make: Make) -> None:
    """Lightning makes it the default dtype of the whole process meanwhile."""
    quick, slow = (make(grad_compression=codecs.Blockwise4BitQuantization(), max_staleness=8) for _ in range(2))
    slow.begin()
    with default_dtype(torch.bfloat16):
        wait_for(lambda: (quick.begin(), quick.end(torch.ones(1000, dtype=torch.float32)))[1], "a step of the other")
    slow.end()
    wait_for(lambda: (slow.begin(), slow.engine.epoch >= quick.engine.epoch)[1], "the same step here")
    assert torch.equal(quick.weight, slow.weight)


@pytest.mark.parametrize(
    ("given", "hosted", "at_once"),
    [
        ({}, False, True),
        ({"delay_state_averaging": True}, True, True),
        ({"delay_state_averaging": True, "offload_optimizer": False}, False, True),
        ({**LOCAL, "delay_state_averaging": True}, False, True),
        (STEP_DELAYED, True, False),
    ],
    ids=lambda value: ("+".join(value) or "none") if isinstance(value, dict) else None,
)
def test_delay_state_averaging_by_itself_moves_the_optimizer_to_host_memory_and_delays_nothing(
    make: Make, given: dict[str, Any], hosted: bool, at_once: bool
) -> None:
    peer = make(target_batch_size=8, **given)
    start = peer.weight.detach().clone()
    peer.begin()
    assert peer.end(0.5)
    assert torch.equal(peer.weight, start - 0.5 if at_once else start)
    peer.engine.flush()
    assert torch.equal(peer.weight, start - 0.5)
    (stepped,) = peer.engine.optimizer.param_groups[0]["params"]
    assert (stepped is not peer.weight) is hosted


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [(None, 0.0, 1e-6), (codecs.Float16Compression(), 1e-5, 2**-10), (codecs.Uniform8BitQuantization(), 1e-3, 2e-2)],
    ids=["none", "Float16", "Uniform8Bit"],
)
def test_the_codec_of_parameters_is_that_of_local_updates(make: Make, codec: object, least: float, most: float) -> None:
    """Both peers have the same bits, which are the mean of what each had become, but for what the codec rounds."""
    patient = {"matchmaking_time": 60.0, "averaging_timeout": 120.0}
    peers = [make(**LOCAL, **patient, state_averaging_compression=codec) for _ in "ab"]
    torch.manual_seed(1)
    start, gradients = peers[0].weight.detach().clone(), [torch.randn(1000) for _ in peers]
    for peer, gradient in zip(peers, gradients, strict=True):
        peer.begin()
        peer.end(gradient)
    wait_for(lambda: all(peer.parts.driver.status.head.epoch == 1 for peer in peers), "the step is decided")
    for peer in peers:
        peer.begin()
    first, second = (peer.weight.detach() for peer in peers)
    assert torch.equal(first, second)
    change = -(gradients[0] + gradients[1]) / 2
    assert least <= torch.dist(first, start + change) / change.norm() < most


@pytest.mark.parametrize("at", ["whereabouts", "introductions"])
def test_ctrl_c_while_it_leaves_leaves_nothing_behind(at: str) -> None:
    """In a notebook the process lives on; a second teardown finds nothing to do."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    done: list[str] = []

    def does(what: str) -> Any:
        return interrupted if what == at else lambda *_: done.append(what)

    engine = engine_module.NativeEngine.__new__(engine_module.NativeEngine)
    parts: dict[str, Any] = {
        "donor": SimpleNamespace(stop=does("donor")),
        "introductions": SimpleNamespace(close=does("introductions")),
        "driver": SimpleNamespace(stop=does("driver")),
    }
    engine._parts = Parts(handover=None, telling=None, downloads=None, connected=None, **parts)  # type: ignore[arg-type]
    engine._records = SimpleNamespace(close=does("records"))  # type: ignore[assignment]
    engine._whereabouts = SimpleNamespace(stop=does("whereabouts"))  # type: ignore[assignment]
    engine._stepper = SimpleNamespace(close=does("stepper"))  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.shutdown(5.0)
    assert {*done} == {"donor", "introductions", "driver", "records", "whereabouts", "stepper"} - {at}
