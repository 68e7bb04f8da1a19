"""The reference as reStructuredText, read from the package's own sources, so that the two cannot differ.

The sources are parsed, not imported: the documentation builds on machines where the package cannot run.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "lightning_hivemind"


def read(name: str) -> tuple[str, ast.Module]:
    source = (PACKAGE / name).read_text(encoding="utf-8")
    return source, ast.parse(source)


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def argument_sections() -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """(heading, rows of name, type, default, meaning), in the order and under the headings of the source."""
    source, tree = read("arguments.py")
    body = class_named(tree, "Arguments").body
    headings = {
        n: m[1] for n, line in enumerate(source.splitlines(), 1) if (m := re.match(r"    # -- (.+?) -+$", line))
    }
    rows: dict[int, list[tuple[str, str, str, str]]] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        default = default_of(node.value)
        if default is None:
            continue
        heading = max(line for line in headings if line < node.lineno)
        row = (node.target.id, ast.unparse(node.annotation), default, attribute_docstring(node.target.id, following))
        rows.setdefault(heading, []).append(row)
    for line, group in sorted(rows.items()):
        yield headings[line], group


def default_of(value: ast.expr | None) -> str | None:
    """The default as source text, "required", or None for a field that is no argument."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    if value.func.id == "_argument":
        return ast.unparse(value.args[0])
    return "required" if value.func.id == "field" else None


def attribute_docstring(name: str, following: ast.stmt | None) -> str:
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        text = inspect.cleandoc(str(following.value.value))
        return re.sub(r":attr:`~?(\w+)`", r"``\1``", text)  # properties of Arguments have no page of their own
    raise ValueError(f"arguments.py: {name} has no docstring below it")


def event_classes() -> Iterator[tuple[ast.ClassDef, str]]:
    """Each event with the level at which it is logged."""
    _, tree = read("events.py")
    levels = {"Event": "DEBUG"}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not any(ast.unparse(b) == "Event" for b in node.bases):
            continue
        levels[node.name] = next(
            (ast.unparse(f.value).split(".")[-1] for f in fields(node, "level") if f.value), "DEBUG"
        )
        yield node, levels[node.name]


def fields(node: ast.ClassDef, name: str | None = None) -> list[ast.AnnAssign]:
    found = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
    return [f for f in found if name is None or ast.unparse(f.target) == name]


def arguments_text() -> Iterator[str]:
    for heading, rows in argument_sections():
        yield f".. rubric:: {heading[0].upper()}{heading[1:]}"
        yield ""
        yield ".. list-table::"
        yield "   :header-rows: 1"
        yield "   :widths: 22 18 10 50"
        yield ""
        yield from row("argument", "type", "default", "meaning")
        for name, kind, default, meaning in rows:
            yield from row(
                f"``{name}``", f"``{kind}``", default if default == "required" else f"``{default}``", meaning
            )
        yield ""


def row(*cells: str) -> Iterator[str]:
    for number, cell in enumerate(cells):
        lines = cell.splitlines()
        yield f"   {'*' if number == 0 else ' '} - {lines[0]}"
        yield from (f"       {line}" for line in lines[1:])


def events_text() -> Iterator[str]:
    for node, level in event_classes():
        yield f".. py:class:: lightning_hivemind.events.{node.name}"
        yield ""
        yield from (f"   {line}" for line in (ast.get_docstring(node) or "").splitlines())
        yield ""
        yield f"   Logged at {level}. Fields:"
        yield (
            "   "
            + ", ".join(
                f"``{ast.unparse(f.target)}: {ast.unparse(f.annotation)}``"
                for f in fields(node)
                if "ClassVar" not in ast.unparse(f)
            )
            + "."
        )
        yield ""


def errors_text() -> Iterator[str]:
    _, tree = read("errors.py")
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            yield f".. py:exception:: lightning_hivemind.errors.{node.name}({bases})"
            yield ""
            yield from (f"   {line}" for line in (ast.get_docstring(node) or "").splitlines())
            yield ""
