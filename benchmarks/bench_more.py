"""What was measured before on such a machine: seven repeats of all cases take longer than one has a quiet one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench_results import RESULTS
from bench_spec import TurnSpec
from bench_stats import Round
from bench_turn import Turn

#: facts that may differ: when, and of which commit
_OWN = ("date", "command", "duration", "repeats", "load", "commit")


class OtherMeasurement(ValueError):
    """What was measured before cannot be joined with what is measured now."""


def measured_before(
    name: str, plan: Sequence[Sequence[TurnSpec]], facts: Mapping[str, str]
) -> tuple[list[Turn], dict[str, str]]:
    """The turns of ``results/<name>.json``, and its facts; ``facts`` are of this machine.

    Raises OtherMeasurement: there is none, or it is of another machine or version of a package, or of other turns in a
    case of the plan.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise OtherMeasurement(f"--more: {path} is not there; measure without it first")
    found = json.loads(path.read_text(encoding="utf-8"))
    for fact, value in facts.items():
        if fact not in _OWN and found.get(fact) != value:
            raise OtherMeasurement(f"--more: {path.name} has {fact} {found.get(fact)!r}, this is {value!r}")
    turns = [_turn(record) for record in found["turns"]]
    asked = [spec for specs in plan for spec in specs]
    cases = {spec.case for spec in asked}
    if unknown := next((turn.spec for turn in turns if turn.spec.case in cases and turn.spec not in asked), None):
        raise OtherMeasurement(f"--more: {path.name} has other turns, such as {unknown}; give the same arguments")
    return turns, {fact: found[fact] for fact in _OWN}


def next_repeat(before: Sequence[Turn], specs: Sequence[TurnSpec]) -> int:
    """Of the case of these."""
    cases = {spec.case for spec in specs}
    return 1 + max((turn.repeat for turn in before if turn.spec.case in cases), default=-1)


def both(before: Mapping[str, str], facts: Mapping[str, str]) -> dict[str, str]:
    """``facts`` of all turns, with those that were of the first of them only; each value once."""
    own = {fact: [*before[fact].split("; "), value] for fact, value in facts.items() if fact in before}
    own.pop("repeats", None)
    return {**facts, **{fact: "; ".join(dict.fromkeys(values)) for fact, values in own.items()}}


def _turn(record: Mapping[str, Any]) -> Turn:
    rounds = {
        name: [[Round(**{"time": math.nan, **_numbers(one)}) for one in peer] for peer in record[name]]
        for name in ("rounds", "history")
    }
    return Turn(**{**_numbers(record), **rounds, "spec": TurnSpec(**record["spec"])})


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes what :func:`.plain` makes of those that JSON does not have."""
    return {name: math.nan if value is None else value for name, value in record.items()}
