"""Repeats that were measured before, of the same plan on such a machine: seven take longer than one has a quiet one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bench_results import RESULTS
from bench_spec import TurnSpec
from bench_stats import Round
from bench_turn import Turn

#: facts that may differ: when, and of which commit
_OWN = ("date", "command", "duration", "repeats", "load", "commit")


class OtherMeasurement(ValueError):
    """What was measured before cannot be joined with what is measured now."""


def turns_before(name: str, plan: Sequence[Sequence[TurnSpec]], facts: Mapping[str, str]) -> list[Turn]:
    """Those of ``results/<name>.json``; ``facts`` are of this machine.

    Raises OtherMeasurement: there is none, or it is of another plan, machine or version of a package.
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
    if unknown := next((turn.spec for turn in turns if turn.spec not in asked), None):
        raise OtherMeasurement(f"--more: {path.name} has other turns, such as {unknown}; give the same arguments")
    return turns


def both(facts: Mapping[str, str], name: str) -> dict[str, str]:
    """``facts`` of what was measured now, with those that ``results/<name>.json`` says of what was before."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {
        fact: f"{found[fact]}; {value}" if fact in _OWN and fact != "repeats" else value
        for fact, value in facts.items()
    }


def _turn(record: Mapping[str, Any]) -> Turn:
    values = {name: math.nan if value is None else value for name, value in record.items()}
    for name in ("rounds", "history"):
        values[name] = [[_round(one) for one in peer] for peer in record[name]]
    return Turn(**{**values, "spec": TurnSpec(**record["spec"])})


def _round(record: Mapping[str, Any]) -> Round:
    """Of which it was not kept when it was."""
    return Round(**{one.name: math.nan if record.get(one.name) is None else record[one.name] for one in fields(Round)})
