"""The command line: a table, JSON, and what is said of wrong arguments."""

from __future__ import annotations

import json

import pytest

from lightning_hivemind.cli import main

SMALL = ["simulate", "--peers", "3", "--parameters", "1e5", "--steps", "2"]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    for row in ("seconds per step", "sent per peer and step", "coordinator per step", "forks seen", "samples"):
        assert row in text


def test_one_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 2
    assert found["peers"] == 3


def test_a_run_without_a_step_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL[:3], "--profile", "perfect", "--uplink", "0.1", "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "No step was made. The slowest line needs 1672.9 s to send a gradient once, of the 30 s of" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["simulate"], "--peers"),
        (["simulate", "--peers", "many"], "invalid whole number value: 'many'"),
        (["simulate", "--peers", "inf"], "invalid whole number value: 'inf'"),
        (["simulate", "--peers", "2.5"], "invalid whole number value: '2.5'"),
        (["simulate", "--peers", "1"], "--peers=1: give a number from 2"),
        (["simulate", "--peers", "4", "--profile", "dial-up"], "give one of perfect, lan, home-broadband"),
        (["simulate", "--peers", "4", "--churn", "-1"], "--churn=-1.0: give a number that is not negative"),
    ],
)
def test_bad_arguments_give_a_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as ended:  # argparse's own
        status = int(ended.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err
