"""Every Python block in the documentation and the README is run; those marked ``notest`` are only compiled."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import lightning_hivemind
from lightning_hivemind import errors, events
from lightning_hivemind.arguments import Arguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
BLOCK = re.compile(r"^```python( notest)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[str, bool]]:
    """(code, whether it can be run) of each Python block of a page."""
    return [(match[2], match[1] is None) for match in BLOCK.finditer(path.read_text(encoding="utf-8"))]


WITH_CODE = [path for path in PAGES if blocks(path)]


#: imports once what takes seconds, then runs each page in a process of its own; one that hangs says where
RUN_PAGES = """
import faulthandler, json, os, sys, traceback
import lightning.pytorch, scipy.optimize, torch
pages, failed = json.load(sys.stdin), []
for page, codes in pages.items():
    sys.stderr.write(f"{page}:\\n"); sys.stderr.flush()
    if (child := os.fork()) == 0:
        faulthandler.dump_traceback_later(300, exit=True)
        status = 1
        try:
            for code in codes:
                exec(compile(code, page, "exec"), {})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        failed.append(page)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def test_code_in_the_documentation_runs(tmp_path: Path) -> None:
    pages: dict[str, list[str]] = {}
    for path in WITH_CODE:
        for code, runs in blocks(path):
            compile(code, str(path), "exec")
            if runs and "trainer.fit" not in code:
                pages.setdefault(str(path.relative_to(ROOT)), []).append(code)
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGES], input=json.dumps(pages), cwd=tmp_path, capture_output=True, text=True,
        timeout=600, env={**os.environ, "PYTHONPATH": str(Path(lightning_hivemind.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_there_is_code_to_run() -> None:
    assert len(WITH_CODE) >= 9


def test_the_reference_lists_every_argument_event_and_error() -> None:
    text = generated_reference()
    arguments = {one.name for one in fields(Arguments) if "check" in one.metadata} | {"target_batch_size"}
    missing = [name for name in arguments if f" - ``{name}``" not in text]
    missing += [one.__name__ for one in events.Event.__subclasses__() if f"events.{one.__name__}\n" not in text]
    missing += [name for name, one in vars(errors).items() if isinstance(one, type) and f"errors.{name}(" not in text]
    assert not missing


def test_the_reference_refers_to_nothing_that_has_no_page() -> None:
    """(Sphinx would say so, too, and is not installed for the tests.)"""
    assert not re.findall(r":(?:class|meth|func|attr|mod):`[^`]+`", generated_reference())


def generated_reference() -> str:
    spec = importlib.util.spec_from_file_location("reference_text", ROOT / "docs" / "_ext" / "reference_text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "\n".join([*module.arguments_text(), *module.events_text(), *module.errors_text()]) + "\n"


#: with or without its file and its parameters
NAMED = re.compile(r"`(?:[\w/]+\.py::)?(test_\w+)(?!\.py)\b[^`]*`")


def test_every_file_that_a_page_refers_to_is_there_and_of_a_page_of_the_documentation_is_one_itself() -> None:
    wrong, found = [], 0
    for page in [*PAGES, ROOT / "ARCHITECTURE.md"]:
        top = ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                found += 1
                file = (page.parent / target).resolve()
                if not (file.exists() and file.is_relative_to(top)):
                    wrong.append((page.name, target))
    assert found > 30
    assert wrong == []


def test_what_is_called_a_test_with_real_peers_is_one() -> None:
    functions: list[ast.FunctionDef] = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        functions += [one for one in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(one, ast.FunctionDef)]
    real = {one.name for one in functions if "swarm" in [argument.arg for argument in one.args.args]}
    text = (ROOT / "docs" / "reference" / "evidence.md").read_text(encoding="utf-8")
    parts = [part for row in text.splitlines() for part in re.split("[;|]", row)]
    named = {
        name for part in parts if not part.strip().startswith(("*unit*", "*daemon*")) for name in NAMED.findall(part)
    }
    assert len(named) > 50
    assert named <= real


def test_every_test_that_the_documentation_names_exists() -> None:
    reference = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("evidence", "invariants")]
    pages = [*reference, *(ROOT / "docs" / "failures").glob("*.md")]
    named = {name for page in pages for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 60
    assert not {name for name in named if f"def {name}(" not in tests}


def test_every_test_that_is_named_with_its_file_is_in_that() -> None:
    texts: dict[str, str] = {}  # by name; of several files of one name, together
    for path in (ROOT / "tests").rglob("test_*.py"):
        texts[path.name] = texts.get(path.name, "") + path.read_text(encoding="utf-8")
    named = [
        (file, name)
        for page in [ROOT / "ARCHITECTURE.md", *PAGES]
        for file, name in re.findall(r"(test_\w+\.py)::(test_\w+)", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 60
    assert [(file, name) for file, name in named if f"def {name}(" not in texts.get(file, "")] == []


def test_every_invariant_names_its_tests_itself() -> None:
    """Not by where it stands: a row that is put between makes "the same" another one."""
    text = (ROOT / "docs" / "reference" / "invariants.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| I")]
    assert len(rows) > 100
    assert {len(row) for row in rows} == {4}
    assert [row for row in rows if "the same" in (row[2] + row[3]) or not re.search("test_|simulated", row[3])] == []


SOURCES = ROOT / "src" / "lightning_hivemind"
#: `Class.attribute`, or what begins so; in that a class is what has a small letter, too
OF_A_CLASS = re.compile(r"(?<![\w.])([A-Z]\w*[a-z]\w*)\.(\w+)")
#: classes that the documentation names and that are not of this package: Lightning's, and a test's
ELSEWHERE = {"Trainer", "Swarm"}


def own_names(node: ast.ClassDef) -> set[str]:
    """What a class has: methods, fields, constants, and what its methods keep in ``self``."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(one.name)
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            found |= {one.attr} if isinstance(one.value, ast.Name) and one.value.id == "self" else set()
    fields = [target for one in node.body for target in getattr(one, "targets", [getattr(one, "target", None)])]
    return found | {target.id for target in fields if isinstance(target, ast.Name)}


def classes() -> dict[str, set[str]]:
    """What each class of the package has, with what it inherits; of several of one name, all that any of them has."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(own_names(node))
                bases.setdefault(node.name, set()).update(one.id for one in node.bases if isinstance(one, ast.Name))

    def inherited(name: str) -> set[str]:
        return own.get(name, set()).union(*map(inherited, bases.get(name, set()) - {name}))

    return {name: inherited(name) for name in own}


def test_what_the_documentation_says_that_a_class_has_is_there() -> None:
    known, wrong, count = classes(), [], 0
    for path in [ROOT / "ARCHITECTURE.md", *PAGES]:
        for code in re.findall("`([^`\n]+)`", path.read_text(encoding="utf-8")):
            for name, attribute in OF_A_CLASS.findall(code):
                count += 1
                if name not in ELSEWHERE and attribute not in known.get(name, ()):
                    wrong.append(f"{path.name}: {name}.{attribute}")
    assert count > 100
    assert wrong == []


@pytest.mark.parametrize("folder", ["training", "engine", "engine/native", "engine/stock", "simulation"])
def test_the_table_of_rooms_names_every_file_of_those_of_which_it_names_files(folder: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+\.py", text.split("## Rooms")[1].split("```")[1]))
    assert {path.name for path in (SOURCES / folder).glob("*.py")} - {"__init__.py"} <= named
