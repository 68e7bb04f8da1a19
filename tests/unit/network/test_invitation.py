"""The line that others copy: it must start the same program, whatever started this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hivemind.network.invitation import invitation, join_command

ID = "12D3KooWHGnvLKJomb7RNZxpFXT8Aga4ts9Z9EtSnoMYQNg5z1BZ"
PUBLIC = f"/ip4/8.8.8.8/tcp/31330/p2p/{ID}"
LOCAL = f"/ip4/127.0.0.1/tcp/31330/p2p/{ID}"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A directory like a virtual environment's bin, with an interpreter and a console script."""
    bin_dir = tmp_path / "venv" / "bin"
    bin_dir.mkdir(parents=True)
    for name in ("python", "python3", "train-it"):
        (bin_dir / name).write_text("#!/bin/sh\n")
        (bin_dir / name).chmod(0o755)
    return bin_dir


def on_path(venv: Path) -> dict[str, str]:
    return {"PATH": f"{venv}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "train.py"], "python train.py"),
        (["python3", "train.py"], "python3 train.py"),
        (
            ["python", "train.py", "--name", "a b", "$HOME", "it's"],
            """python train.py --name 'a b' '$HOME' 'it'"'"'s'""",
        ),
        (["python", "-m", "pkg.train", "--lr=1"], "python -m pkg.train --lr=1"),
        (["python", "-u", "-X", "dev", "-m", "pkg"], "python -u -X dev -m pkg"),
        (["python", "-Werror", "my dir/train.py"], "python -Werror 'my dir/train.py'"),
        (["python", "-c", "print(1)\nprint('x')"], r"python -c $'print(1)\nprint(\'x\')'"),
    ],
)
def test_the_command_is_repeated_as_typed(argv: list[str], expected: str, venv: Path) -> None:
    assert join_command(argv, str(venv / "python"), on_path(venv)) == expected


def test_an_interpreter_that_path_does_not_find_is_named_in_full(venv: Path) -> None:
    executable = str(venv / "python")
    assert join_command(["python", "x.py"], executable, {"PATH": "/usr/bin"}) == f"{executable} x.py"
    assert join_command([executable, "x.py"], executable, {"PATH": "/usr/bin"}) == f"{executable} x.py"
    assert join_command([executable, "x.py"], executable, on_path(venv)) == "python x.py"


def test_a_console_script_is_called_by_its_name(venv: Path) -> None:
    executable, script = str(venv / "python"), str(venv / "train-it")
    assert join_command([executable, script, "fit"], executable, on_path(venv)) == "train-it fit"
    assert join_command([script, "fit"], executable, on_path(venv)) == "train-it fit"
    assert join_command([executable, script, "fit"], executable, {"PATH": "/bin"}) == f"{executable} {script} fit"


def test_sys_argv_of_a_script_will_do(venv: Path) -> None:
    assert join_command(["train.py", "-v"], str(venv / "python"), on_path(venv)) == "python train.py -v"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        [""],
        ["python"],
        ["python", "-i"],
        ["-c"],
        ["python", "-"],
        ["python", "-m", "ipykernel_launcher", "-f", "k.json"],
        ["/venv/lib/ipykernel_launcher.py", "-f", "k.json"],
    ],
)
def test_an_interactive_session_is_told_the_variable_only(argv: list[str], venv: Path) -> None:
    text = invitation([PUBLIC], argv=argv, executable=str(venv / "python"), environ=on_path(venv))
    assert f"\nINITIAL_PEERS={PUBLIC}\n" in text
    assert "run the same code" in text


def test_exactly_one_line_is_to_be_copied_and_public_addresses_need_no_advice(venv: Path) -> None:
    text = invitation(
        [LOCAL, PUBLIC], argv=["python", "train.py", "x\ny"], executable=str(venv / "python"), environ=on_path(venv)
    )
    lines = [line for line in text.splitlines() if "INITIAL_PEERS=" in line]
    assert lines == [rf"INITIAL_PEERS={PUBLIC} python train.py $'x\ny'"]
    assert text.endswith(f"{lines[0]}\n")


def test_a_loopback_address_comes_with_how_to_change_it(venv: Path) -> None:
    text = invitation([LOCAL], argv=["python", "x.py"], executable=str(venv / "python"), environ=on_path(venv))
    assert f"INITIAL_PEERS={LOCAL} python x.py\n" in text
    assert "this machine only" in text


SCRIPT = """
import os, sys
from lightning_hivemind.network.invitation import invitation
if "INITIAL_PEERS" in os.environ:
    print("JOINED", os.environ["INITIAL_PEERS"], sys.argv[1:])
else:
    print(invitation([sys.argv[1]], argv=sys.orig_argv, executable=sys.executable, environ=os.environ))
"""


@pytest.mark.parametrize("form", ["script", "module", "code"])
def test_the_printed_line_runs_in_a_shell_with_the_same_arguments(form: str, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__main__.py").write_text(SCRIPT)
    (tmp_path / "my script.py").write_text(SCRIPT)
    how = {"script": ["my script.py"], "module": ["-m", "pkg"], "code": ["-c", SCRIPT]}[form]
    arguments = [PUBLIC, "a b", "it's", "$HOME", "x\ny"]
    env = {k: v for k, v in os.environ.items() if k not in ("INITIAL_PEERS", "PL_INITIAL_PEERS")}
    options = {"cwd": tmp_path, "env": env, "text": True, "check": True, "stdout": subprocess.PIPE}
    printed = subprocess.run([sys.executable, *how, *arguments], **options).stdout  # type: ignore[call-overload]
    (line,) = [line for line in printed.splitlines() if line.startswith("INITIAL_PEERS=")]
    joined = subprocess.run(["bash", "-c", line], **options).stdout  # type: ignore[call-overload]
    assert joined == f"JOINED {PUBLIC} {arguments!r}\n"
