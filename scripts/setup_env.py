#!/usr/bin/env python3
"""Make the virtual environment that every target of the Makefile runs in. Needs nothing but Python and pip.

    python3 scripts/setup_env.py demo test      # the extras of pyproject.toml that are wanted

It takes seconds when nothing changed: the environment remembers which pyproject.toml, constraints and interpreter it
was made from. torch is installed first and without CUDA, whose libraries weigh gigabytes: by pip where that offers
such a build, otherwise by uv, which knows where torch's own builds are.

Kept to syntax that old interpreters can read, so that they can say that they are too old.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
OLDEST, NEWEST = (3, 10), (3, 13)


class SetupError(Exception):
    """Something the user has to do first; printed without a traceback."""


class NoTorchError(SetupError):
    """The user has to install torch."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it goes (default: .venv)")
    options = parser.parse_args()
    try:
        check_python()
        prepare(options.venv.absolute(), set(options.extras))
    except SetupError as error:
        print("setup_env: " + str(error), file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print("setup_env: `{}` failed (see above).".format(" ".join(map(str, error.cmd))), file=sys.stderr)
        return 1
    return 0


def check_python() -> None:
    version = sys.version_info[:2]
    if OLDEST <= version <= NEWEST:
        return
    raise SetupError(
        "{} is Python {}.{}; {}.{} to {}.{} are supported. Name one of these, for instance: "
        "make PYTHON=python3.11 demo".format(sys.executable, *version, *OLDEST, *NEWEST)
    )


def prepare(venv: Path, extras: set) -> None:
    stamp = venv / "lightning-hivemind.json"
    origin = fingerprint()
    known = json.loads(stamp.read_text()) if stamp.exists() else {}
    fresh = known.get("origin") == origin
    if fresh and extras <= set(known["extras"]):
        return
    python = venv / "bin" / "python"
    if known.get("interpreter") != interpreter() or not python.exists():
        make_venv(venv)
    elif stamp.exists():
        stamp.unlink()  # an interrupted installation must not look finished
    extras |= set(known.get("extras", ()))
    try:
        install_torch(python)
    except NoTorchError:
        # what the user installs now is not thrown away by the next call
        stamp.write_text(json.dumps({"interpreter": interpreter(), "extras": sorted(extras)}))
        raise
    say("installing this package with the extras {}".format(", ".join(sorted(extras)) or "(none)"))
    target = "{}[{}]".format(ROOT, ",".join(sorted(extras)))
    pip(python, "install", "--quiet", "--constraint", CONSTRAINTS, "--editable", target)
    stamp.write_text(json.dumps({"origin": origin, "interpreter": interpreter(), "extras": sorted(extras)}))
    say("ready: " + str(venv))


def fingerprint() -> str:
    """Everything that decides what would be installed; the place too, for an editable install points to it."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__).resolve()):
        digest.update(path.read_bytes())
    digest.update(interpreter().encode())
    return digest.hexdigest()


def interpreter() -> str:
    return f"{os.path.realpath(sys.executable)} {sys.version}"


def make_venv(venv: Path) -> None:
    say("making {} with Python {}.{}.{}".format(venv, *sys.version_info[:3]))
    if venv.exists() and not (venv / "pyvenv.cfg").exists():
        raise SetupError(f"{venv} exists and is no virtual environment: move it away.")
    plain = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    python = venv / "bin" / "python"
    if plain.returncode != 0:
        # Debian and Ubuntu split ensurepip off; a pip outside of the environment can fill it, too.
        bare = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)]
        outer = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "pip"]
        if subprocess.run(bare).returncode != 0 or subprocess.run(outer).returncode != 0:
            shutil.rmtree(str(venv), ignore_errors=True)
            raise SetupError(
                f"{sys.executable} cannot make a virtual environment:\n{(plain.stdout + plain.stderr).strip()}\n"
                "On Debian and Ubuntu: apt install python3-venv"
            )
    pip(python, "install", "--quiet", "--upgrade", "pip>=23.1")  # older ones have no installation reports


def install_torch(python: Path) -> None:
    pin = torch_pin()
    if installed_torch(python) == pin:
        return
    wanted = "torch==" + pin
    if "nvidia" not in names_that_pip_would_install(python, wanted):
        say(f"installing {wanted} with pip")
        pip(python, "install", "--quiet", wanted)
        return
    say(f"pip would bring CUDA along; installing {wanted} for CPUs with uv")
    pip(python, "install", "--quiet", "uv")
    uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python), "--torch-backend=cpu", wanted]
    if subprocess.run(uv).returncode != 0:
        raise NoTorchError(
            f"no build of {wanted} without CUDA could be installed (uv's answer is above). Either let "
            "https://download.pytorch.org through, or install any build of that version yourself and call this again:"
            f"\n  {python} -m pip install {wanted}"
        )


def torch_pin() -> str:
    match = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if match is None:
        raise SetupError(f"{CONSTRAINTS} does not pin torch.")
    return match.group(1)


def installed_torch(python: Path) -> str:
    """The version without its build suffix, or "" when there is none."""
    code = (
        "import importlib.metadata as m\n"
        "print(next((d.version for d in m.distributions() if (d.metadata['Name'] or '').lower() == 'torch'), ''))"
    )
    found = subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout.strip().split("+")[0]


def names_that_pip_would_install(python: Path, requirement: str) -> str:
    """One name per line; metadata is fetched, the packages are not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip(python, "install", "--quiet", "--dry-run", "--report", report, requirement)
        answer = json.loads(report.read_text())
    return "\n".join(package["metadata"]["name"].lower() for package in answer["install"])


def pip(python: Path, *arguments: object) -> None:
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    subprocess.run([str(python), "-m", "pip", *map(str, arguments)], check=True, env=environment)


def say(text: str) -> None:
    print("setup_env: " + text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
