"""The examples: the data is the same everywhere, the model learns, and the demo tells the truth about its peers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from lightning_hivemind import events
from lightning_hivemind.subscribers import JsonLinesSubscriber

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return __import__(name)


@pytest.fixture
def byte_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("byte_gpt", monkeypatch)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder like the standard library's, small."""
    folder = tmp_path / "stdlib"
    for index in range(60):
        path = folder / f"package{index % 3}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {index}\n" + f"value_{index} = {index}\n" * 40)
    return folder


# -- data -------------------------------------------------------------------------------------------------------------


def crops_of(data: Any, count: int) -> list[torch.Tensor]:
    data.setup("fit")
    return list(islice(iter(data.train_dataloader()), count))


def test_equal_seeds_crop_alike_and_different_seeds_do_not(byte_gpt: ModuleType, sources: Path) -> None:
    first, again, other = (
        torch.stack(crops_of(byte_gpt.StdlibText(folder=sources, batch_size=4, seed=seed), 3)) for seed in (1, 1, 2)
    )
    assert first.shape == (3, 4, 129)
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_peers_without_a_given_seed_draw_different_ones(byte_gpt: ModuleType) -> None:
    assert len({byte_gpt.StdlibText().seed for _ in range(4)}) > 1


def test_text_is_split_by_file_and_no_file_is_in_both_parts(byte_gpt: ModuleType, sources: Path) -> None:
    data = byte_gpt.StdlibText(folder=sources)
    data.setup("fit")
    train, held_out = (bytes(text.tolist()) for text in (data.train_text, data.held_out_text))
    files = [path.read_bytes() for path in byte_gpt.source_files(sources)]
    assert len(train) + len(held_out) == sum(map(len, files))
    assert all((file in train) != (file in held_out) for file in files)


def test_validation_crops_do_not_depend_on_the_seed(byte_gpt: ModuleType, sources: Path) -> None:
    one, two = (byte_gpt.StdlibText(folder=sources, seed=seed, held_out_crops=70) for seed in (1, 2))
    for data in (one, two):
        data.setup("validate")
    crops = torch.cat(list(one.val_dataloader()))
    assert crops.shape == (70, 129)
    assert torch.equal(crops, torch.cat(list(two.val_dataloader())))


def test_files_come_in_the_order_of_their_names_without_tests_and_tables(byte_gpt: ModuleType, sources: Path) -> None:
    for skipped in ("site-packages/x.py", "test/test_x.py", "package0/tests/x.py", "encodings/x.py"):
        (sources / skipped).parent.mkdir(parents=True, exist_ok=True)
        (sources / skipped).write_text("skipped = True\n")
    (sources / "table.py").write_bytes(b"#" * (byte_gpt.LARGEST_FILE_BYTES + 1))
    (sources / "empty.py").touch()
    names = [path.relative_to(sources).as_posix() for path in byte_gpt.source_files(sources)]
    assert len(names) == 60
    assert names == sorted(names)


def test_the_standard_library_is_large_enough(byte_gpt: ModuleType) -> None:
    data = byte_gpt.StdlibText()
    data.setup("fit")
    assert len(data.train_text) > 3_000_000
    assert 0.02 < len(data.held_out_text) / len(data.train_text) < 0.25


def test_a_folder_without_sources_is_refused(byte_gpt: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="0 bytes of Python to train on"):
        byte_gpt.StdlibText(folder=tmp_path).setup("fit")


# -- model ------------------------------------------------------------------------------------------------------------


def test_model_has_the_size_it_says(byte_gpt: ModuleType) -> None:
    assert sum(parameter.numel() for parameter in byte_gpt.ByteGPT().parameters()) == pytest.approx(830_000, rel=0.01)


def test_untrained_model_predicts_almost_evenly(byte_gpt: ModuleType) -> None:
    torch.manual_seed(0)
    crops = torch.randint(256, (2, 129), dtype=torch.uint8)
    model = byte_gpt.ByteGPT()
    assert model(crops[:, :-1]).shape == (2, 128, 256)
    assert model.loss(crops).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_byte_is_predicted_from_those_before_it_only(byte_gpt: ModuleType) -> None:
    model = byte_gpt.ByteGPT()
    one = torch.randint(256, (1, 64))
    two = one.clone()
    two[0, 40] += 1
    two %= 256
    changed = (model(one) - model(two)).abs().amax(dim=-1)[0]
    assert changed[:40].max().item() < 1e-5
    assert changed[40:].min().item() > 0


def test_generate_continues_prompts_shorter_and_longer_than_the_context(byte_gpt: ModuleType) -> None:
    model = byte_gpt.ByteGPT(context=16)
    for prompt in ("def ", "a prompt that is longer than the context"):
        text = model.generate(prompt, 20, temperature=1.0)
        assert text.startswith(prompt)
        assert len(text) > len(prompt)


@pytest.mark.parametrize(("prompt", "temperature"), [("", 1.0), ("x", 0.0)])
def test_generate_refuses_what_it_cannot_do(byte_gpt: ModuleType, prompt: str, temperature: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        byte_gpt.ByteGPT().generate(prompt, 1, temperature=temperature)


def test_sixty_steps_alone_lower_the_loss_and_are_recorded(
    byte_gpt: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    demo_peer = load("demo_peer", monkeypatch)
    monkeypatch.setattr(demo_peer, "LINE_EVERY_S", 0.0)
    options = byte_gpt.parse(
        ["--plain", "--max-steps", "60", "--batch-size", "8", "--validate-every", "60", "--seed", "1", "--no-progress"]
    )
    model = byte_gpt.train(options, [demo_peer.Recorder(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start"] + ["train"] * 60 + ["held_out", "end"]
    assert lines[1]["loss"] == pytest.approx(math.log(256), abs=0.5)  # knows nothing yet
    assert lines[-2]["loss"] < 3.5
    assert lines[-1]["samples"] == 60 * 8
    assert demo_peer.held_out_loss(model) == pytest.approx(lines[-2]["loss"], abs=1e-3)
    with np.load(tmp_path / "parameters.npz") as kept:
        assert kept["epochs_E"].tolist() == list(range(51, 61))
        last = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert np.array_equal(kept["parameters_EP"][-1], last.numpy())
        assert not np.array_equal(kept["parameters_EP"][-2], last.numpy())


# -- the demo ---------------------------------------------------------------------------------------------------------


def test_view_follows_a_peer_through_its_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    view = load("demo_view", monkeypatch).PeerView("peer 1", tmp_path)
    view.refresh()
    assert view.state == "starting"
    bus = events.EventBus()
    bus.subscribe(JsonLinesSubscriber(tmp_path / "events.jsonl"))
    steps: list[tuple[events.Event, Callable[[], bool]]] = [
        (
            events.PeerStarted(peer_id="p", addresses=["/a", "/b"], run_id="r", duration_s=1.0),
            lambda: (view.state, view.address) == ("joining", "/a,/b"),
        ),
        (events.SwarmReady(epoch=7, num_peers=2), lambda: (view.state, view.epoch) == ("training", 7)),
        (events.PeersChanged(num_peers=3), lambda: view.num_peers == 3),
        (
            events.BatchAccumulated(
                epoch=7, batch_samples=16, local_samples=16, swarm_samples=48, target_batch_size=64, num_peers=3
            ),
            lambda: (view.swarm_samples, view.target) == (48, 64),
        ),
        (events.RoundStarted(epoch=7, samples=16), lambda: view.state == "averaging"),
        (
            events.EpochCommitted(epoch=8, samples=16, contributors=3, fraction=1.0, duration_s=0.5),
            lambda: (view.state, view.epoch, view.peers_per_step) == ("training", 8, 3.0),
        ),
        (
            events.RoundIncomplete(
                epoch=8, kind="state", reason="why", fraction=0.5, contributors=2, expected=3, action="kept"
            ),
            lambda: view.incomplete == 1 and "why" in view.notes[-1][1],
        ),
        (
            events.BatchDropped(epoch=8, samples=16, reason="non-finite gradient"),
            lambda: "non-finite" in view.notes[-1][1],
        ),
        (events.RoundMissed(epoch=8, samples_lost=16), lambda: view.state == "catching up"),
        (events.StateLoaded(epoch=9, duration_s=0.2), lambda: view.epoch == 9),
        (events.StepsUndone(epoch=9, first=7, last=8, samples=16), lambda: "7 to 8" in view.notes[-1][1]),
        (events.StateUnavailable(epoch=9, reason="gone", action="waits"), lambda: "gone" in view.notes[-1][1]),
        (events.Waiting(what="a friend", elapsed_s=1, limit_s=2), lambda: view.state == "waiting"),
        (events.StopRequested(epoch=10, by_this_peer=True), lambda: view.state == "stopping"),
        (events.PeerStopped(epoch=10, duration_s=1.0), lambda: view.state == "stopped"),
    ]
    for event, seen in steps:
        bus.emit(event)
        view.refresh()
        assert seen(), event


def test_a_line_that_is_still_being_written_is_read_once_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = load("demo_view", monkeypatch).JsonLines(tmp_path / "lines")
    assert list(lines.new()) == []
    (tmp_path / "lines").write_bytes(b'{"a": 1}\n{"a":')
    assert list(lines.new()) == [{"a": 1}]
    assert list(lines.new()) == []
    with open(tmp_path / "lines", "ab") as file:
        file.write(b" 2}\n")
    assert list(lines.new()) == [{"a": 2}]


STUBBORN = """
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(pathlib.Path(sys.argv[1]) / "child").write_text(f"{child.pid}\\n")
child.wait()
"""


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_peer_that_ignores_sigterm_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes = load("demo_processes", monkeypatch)
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    monkeypatch.setattr(processes, "SCRIPT", script)
    peer = processes.PeerProcess(tmp_path / "peer", [], "")
    pid_file = tmp_path / "peer" / "child"
    wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "the start of the peer's child")
    child = int(pid_file.read_text())
    assert alive(child)
    processes.stop_all([peer], grace_s=0.2)
    assert peer.status == -9
    wait_until(lambda: not alive(child), "the end of the peer's child")


#: Writes what a peer of the demo writes, within a moment. Its held-out loss is the environment's.
FAKE_PEER = """
import json, os, pathlib, sys, time
import numpy
folder = pathlib.Path(sys.argv[1])
index = int(folder.name[-1])
if os.environ.get("FAIL") == str(index):
    sys.exit("peer broke")
def line(name, **values):
    with open(folder / name, "a") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\\n")
line("events.jsonl", event="PeerStarted", addresses=["/ip4/127.0.0.1/tcp/1"], peer_id="p", run_id="r", duration_s=1.0)
line("events.jsonl", event="SwarmReady", epoch=0, num_peers=index)
for step in range(3):
    line("training.jsonl", kind="train", loss=5.0 - step, samples=16 * (step + 1))
    commit = dict(epoch=step + 1, samples=16, contributors=2, fraction=1.0, duration_s=0.1)
    line("events.jsonl", event="EpochCommitted", **commit)
line("training.jsonl", kind="held_out", loss=3.0, samples=48)
# the first peer ends a step ahead of the others
epochs_E = numpy.arange(1, 5 if index == 1 else 4)
parameters_EP = numpy.full((len(epochs_E), 4), 0.5 * index, dtype="float32") * epochs_E[:, None]
numpy.savez(folder / "parameters.npz", epochs_E=epochs_E, parameters_EP=parameters_EP)
result = {"epoch": int(epochs_E[-1]), "samples": 48, "held_out_loss": float(os.environ["HELD_OUT"]), "text": "def f():"}
(folder / "result.json").write_text(json.dumps(result))
"""


def fake_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, held_out: float, fail: int = 0
) -> tuple[int, ModuleType, Path]:
    """Run the demo with fake peers; returns its exit status, its module and its folder."""
    pytest.importorskip("matplotlib")
    demo = load("demo", monkeypatch)
    script = tmp_path / "fake.py"
    script.write_text(FAKE_PEER)
    monkeypatch.setattr(load("demo_processes", monkeypatch), "SCRIPT", script)
    monkeypatch.setattr(demo, "LATE_JOIN_S", 0.5)
    monkeypatch.setattr(demo.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("HELD_OUT", str(held_out))
    monkeypatch.setenv("FAIL", str(fail))
    out = tmp_path / "out"
    return demo.main(["--minutes", "1", "--out", str(out)]), demo, out


def test_demo_ends_with_a_table_and_a_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, out = fake_demo(monkeypatch, tmp_path, held_out=1.9)
    text = capsys.readouterr().out
    assert status == 0, text
    assert "after steps [3, 4]" in text
    assert "largest difference between their parameters after step 3: 3.0e+00" in text
    assert "def f():" in text
    summary = json.loads((out / "summary.json").read_text())
    assert [peer["peers_per_step"] for peer in summary["peers"]] == [2.0, 2.0, 2.0]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_demo_fails_if_the_bar_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, demo, _ = fake_demo(monkeypatch, tmp_path, held_out=2.6)
    assert status == 1
    assert f"(2.600), peer 2 (2.600), peer 3 (2.600) is not below {demo.BARS['native']}" in capsys.readouterr().out


def test_demo_fails_if_a_peer_fails_and_shows_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, _ = fake_demo(monkeypatch, tmp_path, held_out=2.1, fail=2)
    text = capsys.readouterr().out
    assert status == 1
    assert "peer 2 failed with status 1" in text
    assert "peer broke" in text


@pytest.mark.parametrize("wrong", [["--peers", "1"], ["--minutes", "0.2"], ["--engine", "none"]])
def test_demo_refuses_impossible_options(wrong: list[str]) -> None:
    pytest.importorskip("matplotlib")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), *wrong],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ended.returncode == 2
    assert wrong[0] in ended.stderr
