"""The rules of the house that a tool can check: who may import whom, sizes, names, one version."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_hivemind

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "lightning_hivemind"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Rooms from the bottom up; a room imports from itself and from rows below it, and rooms of one row not from each other.
ROWS = [
    {"_version"},
    {"errors"},
    {"events", "lightning_twins", "outer", "platform"},
    {"codecs", "network", "subscribers"},
    {"arguments"},  # above network: it hands out the settings that network declares
    {"engine"},
    {"peer"},
    {"training"},
    {"strategy"},
    {"registry"},
    {"simulation"},
    {"advice"},  # above simulation: a codec's bytes are those that it forecasts with
    {"cli"},
]
HEIGHT = {room: height for height, row in enumerate(ROWS) for room in row}
ANNEXES = {"argument_checks": "arguments", "argument_rules": "arguments"}  # files that are one room with another
FACADE = "__init__"  # the package itself: exports everybody's names, so nobody may import it
FOREIGN = ("hivemind", "lightning", "pytorch_lightning")
MAX_LINES = 400
MAKERS = {f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "tensor", "rand", "randn", "arange", "eye")}


def room_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    room = inside.parts[0] if len(inside.parts) > 1 else inside.stem
    return ANNEXES.get(room, room)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names; a name taken from the package itself (`from lightning_hivemind import x`) counts as x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute, so that the rooms stay visible"
            if node.module == "lightning_hivemind":
                yield from (f"lightning_hivemind.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def violations(path: Path, source: str) -> list[str]:
    own = room_of(path)
    found = []
    for name in imported_modules(ast.parse(source)):
        if name.split(".")[0] != "lightning_hivemind":
            continue
        other = name.split(".")[1] if "." in name else FACADE
        other = ANNEXES.get(other, other)
        allowed = other == own or (other in HEIGHT and HEIGHT[other] < HEIGHT[own])
        if not allowed:
            found.append(f"{own} imports {name}")
    return found


def test_every_room_is_in_the_plan_and_no_other_one() -> None:
    rooms = {room_of(path) for path in SOURCES} - {FACADE}
    assert rooms == set(HEIGHT), "give each a row in ROWS (and in ARCHITECTURE.md)"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if room_of(p) != FACADE], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_point_downwards(path: Path) -> None:
    assert violations(path, path.read_text(encoding="utf-8")) == []


PROTOCOL = "lightning_hivemind.engine.native.protocol"
#: containers, and SHA-256: no I/O, no clock, no threads, no randomness
PURE = {"__future__", "collections", "collections.abc", "dataclasses", "hashlib", "itertools"}


def impure(source: str) -> set[str]:
    """What the protocol must not import."""
    return {name for name in imported_modules(ast.parse(source)) if not f"{name}.".startswith(f"{PROTOCOL}.")} - PURE


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name == "protocol"], ids=lambda path: path.name)
def test_the_protocol_imports_itself_and_nothing_that_could_do_io_or_wait(path: Path) -> None:
    assert impure(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "import time, collections",
        "from collections import abc; from random import choice",
        "def f():\n    import concurrent.futures",
        "import torch",
        "from lightning_hivemind.engine.native.driver import Driver",
        "from lightning_hivemind.engine.native.protocols import x",
        "from lightning_hivemind import errors",
    ],
)
def test_an_import_that_is_not_for_the_protocol_is_found(line: str) -> None:
    assert impure(line)


@pytest.mark.parametrize(
    "line",
    [
        "from lightning_hivemind.strategy import HivemindStrategy",
        "import lightning_hivemind.network.daemon",
        "from lightning_hivemind import strategy",
        "from lightning_hivemind import HivemindStrategy",
        "def f():\n    from lightning_hivemind.training import samples",
    ],
)
def test_an_import_that_points_upwards_or_sideways_is_found(line: str) -> None:
    assert violations(PACKAGE / "codecs" / "some.py", line)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short_enough_to_be_read_at_once(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_public_names_are_sorted_and_there() -> None:
    names = lightning_hivemind.__all__
    assert list(names) == sorted(set(names))
    missing = [name for name in names if getattr(lightning_hivemind, name, None) is None]
    assert not missing


def test_importing_the_package_loads_neither_hivemind_nor_a_lightning() -> None:
    code = f"import sys, lightning_hivemind; print([n for n in {FOREIGN!r} if n in sys.modules])"
    assert run_python(code) == "[]"


def test_the_package_imports_where_hivemind_does_not() -> None:
    code = (
        "import sys; sys.modules['hivemind'] = None; import lightning_hivemind; print(lightning_hivemind.__version__)"
    )
    assert run_python(code) == lightning_hivemind.__version__


def test_where_hivemind_does_not_run_one_sentence_says_so() -> None:
    code = """
import sys
sys.modules["hivemind"] = None
import lightning_hivemind as lh
from lightning_hivemind.errors import PlatformError
for make in lh.HivemindStrategy, lh.CollaborativeStrategy, lambda **_: lh.Float16Compression():
    try:
        make(target_batch_size=8)
    except PlatformError as error:
        print(error)
"""
    said = run_python(code).splitlines()
    assert len(said) == 3
    assert all(line.startswith("hivemind cannot be imported here (") for line in said)
    assert all("Install it with: pip install" in line for line in said)


#: whose objects are made by code that the bytes name
PICKLES = {"pickle", "_pickle", "pickletools", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
#: that read pickles, too
READERS = {"torch", "numpy", "pandas"}
READ = {"load", "loads", "read_pickle"}
EVALUATE = {"eval", "exec", "__import__"}
#: of a call, and the only value that it may have
HARMLESS = {"allow_pickle": False, "weights_only": True, "ext_hook": None, "object_hook": None}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` as it stands there; what is no name is a question mark."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def meanings(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports stand for, and those that it may use without."""
    found = {name: name for name in READERS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.asname: one.name for one in node.names if one.asname}
            found |= {name: name for name in (one.name.split(".")[0] for one in node.names if not one.asname)}
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def executing(source: str) -> list[str]:
    """What could execute bytes that come from elsewhere."""
    tree = ast.parse(source)
    meant = meanings(tree)
    found = [name for name in [*imported_modules(tree), *meant.values()] if name.split(".")[0] in PICKLES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = dotted(node).split(".")
            whole = ".".join([meant.get(first, first), *rest])
            room, name = whole.split(".")[0], whole.split(".")[-1]
            evaluates = name in EVALUATE and (whole == name or room == "builtins")
            if evaluates or (room in READERS and name in READ):
                found.append(whole)
        elif isinstance(node, ast.keyword) and node.arg in HARMLESS:
            value = node.value.value if isinstance(node.value, ast.Constant) else node.value
            found += [f"{node.arg}={ast.unparse(node.value)}"] * (value is not HARMLESS[node.arg])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_that_comes_from_the_network_can_be_executed(path: Path) -> None:
    """No module that makes objects of bytes is imported, nothing that reads them called, and nothing is evaluated."""
    assert executing(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import torch, pickle as p",
        "from pickle import loads",
        "import torch; torch.load(file)",
        "import torch; read = torch.load",
        "import torch as t; t.load(file)",
        "import torch.serialization; torch.serialization.load(file)",
        "import torch.serialization as ts; ts.load(file)",
        "from torch import load; load(file)",
        "from torch import load as read; read(file)",
        "from torch import jit; jit.load(file)",
        "import numpy as np; np.load(file)",
        "import numpy as np; np.load(file, allow_pickle=True)",
        "from numpy import load; load(file)",
        "from numpy.lib import format; format.read_array(file, allow_pickle=wanted)",
        "checkpoint(file, weights_only=False)",
        "import msgpack; msgpack.unpackb(data, ext_hook=make)",
        "eval(text)",
        "import builtins; builtins.exec(text)",
        "list(map(eval, texts))",
    ],
)
def test_what_could_execute_bytes_is_found(line: str) -> None:
    assert executing(line)


@pytest.mark.parametrize(
    "line",
    [
        "import numpy as np; np.frombuffer(data)",
        "import msgpack; msgpack.unpackb(data)",
        "self.stepper.load(state)",
        "model.eval()",
        "from json import loads; loads(text)",
        "checkpoint(file, weights_only=True)",
    ],
)
def test_what_executes_nothing_is_not_found(line: str) -> None:
    assert executing(line) == []


def at_torchs_defaults(source: str) -> list[str]:
    """Tensors whose dtype or device is the default one."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if dotted(call.func) in MAKERS]
    return [ast.unparse(call) for call in made if not {"dtype", "device"} <= {one.arg for one in call.keywords}]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_tensor_is_made_at_the_defaults_that_a_script_sets(path: Path) -> None:
    """``precision="bf16-true"`` does, for all threads, while a batch is computed; see ``engine/native/host.py``."""
    assert at_torchs_defaults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("line", ["torch.zeros(3)", "x = torch.empty(3, dtype=d)", "f(torch.tensor(1.0, device=d))"])
def test_a_tensor_at_the_defaults_is_found(line: str) -> None:
    assert at_torchs_defaults(line)


def test_the_version_is_stated_once() -> None:
    version = lightning_hivemind.__version__
    assert importlib.import_module("lightning_hivemind._version").__version__ == version
    stated = [p for p in SOURCES if re.search(r"^__version__\s*=", p.read_text(encoding="utf-8"), re.MULTILINE)]
    assert stated == [PACKAGE / "_version.py"]
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_make_test_runs_every_folder_that_holds_tests() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    folders = {f"tests/{p.relative_to(ROOT / 'tests').parts[0]}" for p in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"tests/\w+", next(line for line in makefile.splitlines() if "-m pytest" in line)))
    assert folders <= named


# What leaks from a developer's machine into a file: home folders, scratch folders, private networks' names.
PRIVATE = re.compile(
    r"/home/\w+/|/Users/\w+/|/root/|(?<![\w./])/(?:work|srv|mnt|data|scratch)\w*/|(?<!unix)/tmp/(?!pymp-)\w"
    r"|[\w-]+\.(?:internal|corp|intranet)\b|https?://[^\s/]*@",
)


def tracked_text_files() -> Iterator[tuple[str, str]]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__).resolve():
            yield name, path.read_text(encoding="utf-8", errors="ignore")


def test_no_committed_file_names_a_private_place() -> None:
    found = [f"{name}: {match[0]}" for name, text in tracked_text_files() for match in PRIVATE.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    "text", ["/home/ada/run", "http://build.corp/x", "https://u:secret@host/", "see /scratch7/x", "/tmp/x"]
)
def test_a_private_place_is_recognised(text: str) -> None:
    assert PRIVATE.search(text)


def run_python(code: str) -> str:
    """stdout of a fresh interpreter that finds the package where this one did."""

    paths = [str(Path(lightning_hivemind.__file__).parents[1])]
    script = f"import sys; sys.path[:0] = {paths!r}; {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
