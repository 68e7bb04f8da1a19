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
#: what every test with real peers gives
GIVEN_BY_ALL = {"target_batch_size", "engine"}
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


@cache
def sources() -> dict[str, str]:
    """Of each test what it is made of: its own code, and that of its file's own names that are in it.

    (And that of the constants that these are made of.)
    """
    found: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        names, constants = dict[str, str](), dict[str, str]()
        for part in ast.parse(text).body:
            source = code_of(part)
            if isinstance(part, ast.ClassDef):
                tests = [one for one in part.body if isinstance(one, ast.FunctionDef)]
                names |= {one.name: source for one in tests} | {part.name: source}
            elif isinstance(part, ast.FunctionDef):
                names[part.name] = source
            elif isinstance(part, ast.Assign | ast.AnnAssign):
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                constants |= {one.id: with_constants(source, constants) for one in targets if isinstance(one, ast.Name)}
        for test in (name for name in names if name.startswith("test_")):
            used = [names[one] for one in re.findall(r"\w+", names[test]) if one in names and one != test]
            found[test] = with_constants("\n".join([names[test], *used]), constants)
    return found


def code_of(part: ast.stmt) -> str:
    """Without comments and docstrings, which give no argument."""
    for one in ast.walk(part):
        if isinstance(one, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(one) is not None:
            one.body[0] = ast.Pass()
    return ast.unparse(part)


def with_constants(source: str, constants: dict[str, str]) -> str:
    return "\n".join([source, *(constants[one] for one in re.findall(r"\w+", source) if one in constants)])


def engines_that_show(argument: str) -> frozenset[str]:
    """The engines on which a test runs that is cited for this argument, and gives it."""
    engines, made_of = engines_of_tests(), sources()
    tests = cited_tests().get(argument, [])
    assert tests, "it has no row"
    for name in tests:
        assert name in engines, f"there is no {name}"
    given = re.compile(rf"\b{argument}\b")
    giving = [name for name in tests if argument in GIVEN_BY_ALL or given.search(made_of[name])]
    shown = frozenset[str]().union(*(engines[name] for name in giving))
    return BOTH if argument in BEFORE_ANY_ENGINE and shown else shown


def refused_by(engine: str) -> set[str]:
    return set(argument_rules._NOT_NATIVE if engine == "native" else argument_rules._ONLY_NATIVE)


@pytest.mark.parametrize("engine", sorted(BOTH))
@pytest.mark.parametrize("argument", [one.name for one in fields(Arguments) if "check" in one.metadata])
def test_a_test_that_gives_the_argument_runs_on_each_engine_or_it_is_refused_there(argument: str, engine: str) -> None:
    if argument in OUT_OF_REACH or (argument in refused_by(engine) and argument != "averager_opts"):
        return
    shown = engines_that_show(argument)
    assert engine in shown, f"of {cited_tests()[argument]} those that give it run on {sorted(shown)}"
