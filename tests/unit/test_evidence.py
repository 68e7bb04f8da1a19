"""Every argument runs on every engine, or is refused there: ``docs/reference/evidence.md`` against the tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from lightning_hivemind import argument_rules
from lightning_hivemind.arguments import Arguments

ROOT = Path(__file__).resolve().parents[2]
BOTH = frozenset({"native", "hivemind"})
#: a decorator of a test, or of none
MARKS = {"HIVEMIND_ONLY": frozenset({"hivemind"}), "ANY_ENGINE": frozenset({"native"})}
#: whose names are in a file of unit tests that is about one engine
PACKAGES = {"native": "native", "stock": "hivemind"}
NAMED = re.compile(r"`(test_\w+)`")
#: what no test can reach from here, and the table says so
OUT_OF_REACH = {"use_ipfs"}
#: that a test of one engine shows as well as a test of the other: what it does ends before there is an engine
BEFORE_ANY_ENGINE = {"use_relay", "use_auto_relay", "trusted_relays", "startup_timeout", "shutdown_timeout"}


@cache
def engines_of_tests() -> dict[str, frozenset[str]]:
    """Of each test the engines of which it shows something: with real peers those of ``make test-full``."""
    found: dict[str, frozenset[str]] = {}

    def visit(body: list[ast.stmt], usual: frozenset[str]) -> None:
        functions = [one for one in body if isinstance(one, ast.FunctionDef)]
        for one in functions:
            if one.name == "engine":  # a fixture that takes the place of the engines of the run
                (ends,) = [part for part in ast.walk(one) if isinstance(part, ast.Return)]
                usual = frozenset({str(ast.literal_eval(ends.value))})  # type: ignore[arg-type]
        for one in functions:
            names = {part.id for part in one.decorator_list if isinstance(part, ast.Name)}
            marked = [engines for name, engines in MARKS.items() if name in names]
            found[one.name] = marked[0] if marked else usual
        for part in body:
            if isinstance(part, ast.ClassDef):
                visit(part.body, usual)

    for path in (ROOT / "tests" / "swarm").glob("test_*.py"):
        visit(ast.parse(path.read_text(encoding="utf-8")).body, BOTH)
    for path in (ROOT / "tests" / "unit").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        own = {engine for package, engine in PACKAGES.items() if f"lightning_hivemind.engine.{package}" in text}
        visit(ast.parse(text).body, frozenset(own) or BOTH)
    return found


@cache
def cited_tests() -> dict[str, list[str]]:
    """Of each argument in the table, the tests that it names."""
    text = (ROOT / "docs" / "reference" / "evidence.md").read_text(encoding="utf-8")
    table, found = text.partition("## Arguments")[2].partition("\n## ")[0], defaultdict[str, list[str]](list)
    for line in table.splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 2 and cells[0].startswith("`"):
            for argument in re.findall(r"`(\w+)`", cells[0]):
                found[argument] += NAMED.findall(cells[1])
    return found


def rows() -> dict[str, frozenset[str]]:
    """The engines on which these run."""
    real, found = engines_of_tests(), dict[str, frozenset[str]]()
    for argument, tests in cited_tests().items():
        for name in tests:
            assert name in real, f"there is no {name}"
        found[argument] = frozenset[str]().union(*(real[name] for name in tests))
    return found


@cache
def sources() -> dict[str, str]:
    """Of each test what it is made of: its own lines, and those of its file's own names that are in them."""
    found: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        lines, names = text.splitlines(), dict[str, str]()
        for part in ast.parse(text).body:
            first = min([part.lineno, *(one.lineno for one in getattr(part, "decorator_list", []))])
            source = "\n".join(lines[first - 1 : part.end_lineno])
            if isinstance(part, ast.ClassDef):
                tests = [one for one in part.body if isinstance(one, ast.FunctionDef)]
                names |= {one.name: source for one in tests} | {part.name: source}
            elif isinstance(part, ast.FunctionDef):
                names[part.name] = source
            elif isinstance(part, ast.Assign):
                names |= {one.id: source for one in part.targets if isinstance(one, ast.Name)}
        for test in (name for name in names if name.startswith("test_")):
            used = [names[one] for one in re.findall(r"\w+", names[test]) if one in names and one != test]
            found[test] = "\n".join([names[test], *used])
    return found


def refused_by(engine: str) -> set[str]:
    return set(argument_rules._NOT_NATIVE if engine == "native" else argument_rules._ONLY_NATIVE)


@pytest.mark.parametrize("engine", sorted(BOTH))
@pytest.mark.parametrize("argument", [one.name for one in fields(Arguments) if "check" in one.metadata])
def test_every_argument_runs_on_every_engine_or_is_refused_there(argument: str, engine: str) -> None:
    if argument in OUT_OF_REACH or (argument in refused_by(engine) and argument != "averager_opts"):
        return
    assert argument in rows(), "it has no row"
    covered = rows()[argument]
    assert engine in (BOTH if argument in BEFORE_ANY_ENGINE and covered else covered), f"the tests run on {covered}"


@pytest.mark.parametrize("argument", [one.name for one in fields(Arguments) if "check" in one.metadata])
def test_a_test_of_an_argument_names_it(argument: str) -> None:
    if argument in OUT_OF_REACH or argument == "target_batch_size":  # every test of the strategy gives that one
        return
    known = sources()
    named = cited_tests()[argument]
    assert any(re.search(rf"\b{argument}\b", known[test]) for test in named), f"none of {named} has it"
